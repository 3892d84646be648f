from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns import NewtonSchulz, get_backend_status, get_ns_backend, gram_newton_schulz, newton_schulz
from dmuon_hf.core.ns.kernels import resolve_kernel
from dmuon_hf.core.ns.library import LibraryKernel, row_blocks
from tests.unit.ns_reference import gaussian

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_kernel_from_the_environment(monkeypatch):
    monkeypatch.delenv("DMUON_NS_KERNEL", raising=False)


@pytest.mark.parametrize("arguments", [{}, {"kernel": "cublas"}, {"deterministic": True}], ids=str)
def test_kernel_resolves_to_the_library(arguments):
    assert NewtonSchulz(**arguments).kernel_name == "cublas"


@pytest.mark.parametrize("value", ["cublas", "auto", ""])
def test_environment_may_name_the_library(monkeypatch, value):
    monkeypatch.setenv("DMUON_NS_KERNEL", value)
    assert NewtonSchulz().kernel_name == "cublas"


def test_environment_names_the_kernel_of_auto(monkeypatch):
    monkeypatch.setenv("DMUON_NS_KERNEL", "quack")
    for construct in (NewtonSchulz, get_ns_backend, get_backend_status, lambda: newton_schulz(gaussian(2, 3))):
        with pytest.raises(NotImplementedError, match="DMUON_NS_KERNEL=quack"):
            construct()


def test_unknown_name_in_the_environment_raises_with_the_choices(monkeypatch):
    monkeypatch.setenv("DMUON_NS_KERNEL", "fastest")
    with pytest.raises(ConfigurationError, match=r"DMUON_NS_KERNEL=fastest.*'cublas'"):
        NewtonSchulz()


def test_explicit_arguments_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("DMUON_NS_KERNEL", "quack")
    assert NewtonSchulz(kernel="cublas").kernel_name == "cublas"
    assert NewtonSchulz(deterministic=True).kernel_name == "cublas"
    gram_newton_schulz(gaussian(2, 3), deterministic=True)


def test_explicit_kernel_against_deterministic_warns_and_wins():
    with (
        pytest.warns(UserWarning, match="kernel='quack' and deterministic=True disagree: the kernel wins"),
        pytest.raises(NotImplementedError, match="kernel='quack'"),
    ):
        NewtonSchulz(kernel="quack", deterministic=True)


def test_library_kernel_with_deterministic_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NewtonSchulz(kernel="cublas", deterministic=True)


def test_ns_backend_line_names_the_kernel_and_the_gpu(monkeypatch):
    assert get_ns_backend() == "Gram NS · kernel=cublas (SM0, universal fallback)"
    monkeypatch.setattr("dmuon_hf.core.ns.kernels.sm_version", lambda: 75)
    assert get_ns_backend() == "Gram NS · kernel=cublas (SM75, universal fallback)"


def test_backend_status_has_the_documented_keys():
    documented = {
        "sm_version": 0,
        "auto_choice": "cublas",
        "quack_available": False,
        "cute_sm80_available": False,
        "cublas_always_available": True,
    }
    assert get_backend_status().items() >= documented.items()


def test_import_and_use_on_a_cpu_leave_cuda_alone():
    script = (
        "import torch; from dmuon_hf.core import ns; ns.NewtonSchulz()(torch.ones(2, 3)); "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [161, 330, 650])
def test_blocked_symmetric_product_equals_the_whole_one(monkeypatch, rows, dtype):
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    kernel = resolve_kernel()
    R = gaussian(rows, rows).to(dtype)
    R = R + R.mT
    tolerance = {"rtol": 0.0, "atol": float((R @ R).abs().max()) * torch.finfo(dtype).eps * 4}
    for A, B, C in [(R[:, :40], R[:, :40].mT, None), (R, R, None), (R, R, R)]:
        expected = 0.5 * (A.double() @ B.double()) + (0.0 if C is None else 2.0 * C.double())
        result = kernel.symmetric(A, B, C, alpha=0.5, beta=2.0)
        torch.testing.assert_close(result.double(), expected, **tolerance)


def test_blocks_are_as_many_as_their_overhead_allows(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert [row_blocks(rows, rows, torch.float32, CPU) for rows in (1, 100, 256, 512, 5000)] == [1, 1, 4, 11, 16]
    assert [row_blocks(rows, rows, torch.bfloat16, CPU) for rows in (256, 512, 1024, 5000)] == [1, 2, 5, 16]


def test_deeper_products_have_more_blocks_of_enough_rows(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert [row_blocks(512, depth, torch.bfloat16, CPU) for depth in (64, 512, 2048, 8192)] == [1, 2, 4, 4]


@pytest.mark.parametrize(("blocks", "columns_by_rows"), [(1, 130 * 130), (2, 64 * 130 + 66 * 66), (100, 9508)])
def test_blocks_that_are_given_are_those_computed(blocks, columns_by_rows):
    with FlopCounterMode(display=False) as counter:
        LibraryKernel(blocks=blocks).gram(gaussian(130, 40))
    assert counter.get_total_flops() == 2 * 40 * columns_by_rows


def test_more_threads_make_fewer_blocks(monkeypatch):
    blocks = []
    for threads in (1, 2, 4, 16):
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        blocks.append(row_blocks(640, 640, torch.float32, CPU))
    assert blocks == [15, 8, 4, 1]


def test_blocks_are_only_used_where_they_were_measured():
    assert row_blocks(4096, 4096, torch.float16, CPU) == 1
    assert row_blocks(4096, 4096, torch.float32, torch.device("cuda")) == 1


def test_symmetric_share_is_what_the_blocks_compute(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    kernel = LibraryKernel()
    assert kernel.symmetric_share(100, 100, torch.float32, CPU) == 1.0
    assert kernel.symmetric_share(256, 256, torch.float32, CPU) == 10 / 16
    assert kernel.symmetric_share(4096, 4096, torch.float32, CPU) == 17 / 32
    assert LibraryKernel(blocks=8).symmetric_share(4096, 4096, torch.float32, CPU) == 36 / 64
