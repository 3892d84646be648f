from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from dmuon_hf.core.ns import support
from dmuon_hf.core.ns.backends import quack
from dmuon_hf.core.ns.backends.contract import syrk_operands
from tests.unit.ns_reference import gaussian


class GemmSymmetric:
    """``quack.gemm_interface.gemm_symmetric`` in float64, with its leading arguments."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, A, B, C=None, out=None, out_dtype=None, dynamic_scheduler=False, alpha=1.0, beta=1.0):
        self.calls += 1
        assert isinstance(alpha, float) and isinstance(beta, float)
        product = alpha * (A.double() @ B.double())
        out.copy_(product if C is None else product + beta * C.double())
        return out


@pytest.fixture
def gemm(monkeypatch):
    support.log_once.cache_clear()
    stand_in = GemmSymmetric()
    monkeypatch.setattr(quack, "_gemm_symmetric", lambda: stand_in)
    return stand_in


def symmetric(*shape: int, seed: int = 0) -> torch.Tensor:
    R = gaussian(*shape, seed=seed).to(torch.bfloat16)
    return R + R.mT


def assert_equal_to_rounding(result, expected):
    torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("shape", [(16, 16), (3, 16, 16)], ids=str)
def test_product_and_diagonal_follow_the_contract(gemm, shape):
    R = symmetric(*shape)
    result = quack.syrk(R, R, R, alpha=2.0, beta=-0.5, diag=3.0)
    expected = 2 * R.double() @ R.double() - 0.5 * R.double() + 3 * torch.eye(16, dtype=torch.float64)
    assert result.shape == R.shape
    assert_equal_to_rounding(result, expected)
    assert gemm.calls == 1


@pytest.mark.parametrize("tall", [False, True])
def test_gram_matrix_of_either_orientation_is_quacks(gemm, tall):
    X = gaussian(32, 16).to(torch.bfloat16).T if tall else gaussian(16, 32).to(torch.bfloat16)
    assert_equal_to_rounding(quack.syrk(X), X.double() @ X.double().mT)
    assert gemm.calls == 1


@pytest.mark.parametrize(
    ("X", "culprit"),
    [
        (gaussian(12, 16).bfloat16(), "the result"),
        (gaussian(16, 12).bfloat16(), "A"),
        (gaussian(16, 34).bfloat16()[:, 1:33], "A"),
        (gaussian(16, 64).bfloat16()[:, ::2], "A"),
    ],
    ids=["rows", "columns", "offset", "stride"],
)
def test_operands_quack_cannot_load_go_to_the_library_and_are_logged_once(gemm, caplog, X, culprit):
    with caplog.at_level(logging.INFO, logger="dmuon_hf.core.ns"):
        for _ in range(2):
            assert_equal_to_rounding(quack.syrk(X), X.double() @ X.double().mT)
    (record,) = caplog.records
    assert f"library product, since {culprit} has strides" in record.getMessage()
    assert gemm.calls == 0


def test_misaligned_storage_is_refused():
    buffer = gaussian(16 * 16 + 4).bfloat16()
    assert quack.refusal(syrk_operands(buffer[: 16 * 16].view(16, 16))) is None
    assert quack.refusal(syrk_operands(buffer[4:].view(16, 16))) is not None


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)], ids=str)
def test_empty_products_are_not_quacks(gemm, shape):
    result = quack.syrk(torch.zeros(shape, dtype=torch.float16), diag=2.0)
    assert torch.equal(result, 2 * torch.eye(shape[0], dtype=torch.float16))
    assert gemm.calls == 0


def test_result_is_written_to_out(gemm):
    R, out = symmetric(16, 16), torch.empty(16, 16, dtype=torch.bfloat16)
    assert quack.syrk(R, out=out).data_ptr() == out.data_ptr()
    assert_equal_to_rounding(out, R.double() @ R.double().mT)


CROSS_COMPILE = """
    import sys
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    import quack.gemm_interface
    import quack.gemm_symmetric
    from dmuon_hf.core.ns.backends import contract
    from dmuon_hf.core.ns.backends.quack import syrk

    compiled = []
    launch = lambda plan, *arguments, **options: compiled.append(plan.compiled_fn)
    quack.gemm_symmetric.get_max_active_clusters = lambda *arguments, **options: 100
    quack.gemm_symmetric.run_gemm_symmetric_plan = launch
    quack.gemm_interface.run_gemm_symmetric_plan = launch
    # Indexing initialises CUDA even in fake mode.
    contract._batch = lambda x: x if x.ndim == 3 else x.unsqueeze(0)

    with FakeTensorMode():
        for dtype in [getattr(torch, name) for name in sys.argv[1:]]:
            R = torch.empty(2, 256, 256, dtype=dtype, device="cuda")
            wide, tall = R.new_empty(2, 256, 512), R.new_empty(2, 512, 256).mT
            results = [syrk(wide), syrk(tall), syrk(R, R, R, alpha=2.0, beta=0.5, diag=1.0)]
            assert all(result.shape == R.shape and result.dtype == dtype for result in results)
    assert len(compiled) == 3 * len(sys.argv[1:]), compiled
"""


@pytest.mark.parametrize(
    ("architecture", "dtypes"), [("90", ["float16", "bfloat16"]), ("100", ["float16"]), ("120", ["bfloat16"])]
)
def test_every_call_of_newton_schulz_compiles(architecture, dtypes):
    pytest.importorskip("quack", reason="quack-kernels is not installed")
    environment = os.environ | {"QUACK_ARCH": architecture, "CUTE_DSL_ARCH": f"sm_{architecture}a"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CROSS_COMPILE), *dtypes]
    subprocess.run(command, check=True, timeout=600, env=environment)
