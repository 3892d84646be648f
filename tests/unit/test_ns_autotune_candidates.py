from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dmuon_hf.core.ns import NewtonSchulz, syrk_kernel
from dmuon_hf.core.ns.autotune import Choice, candidates
from dmuon_hf.core.ns.autotune.candidates import CONFIGS, build, choices
from dmuon_hf.core.ns.backends import cute_config, triton_syrk
from dmuon_hf.core.ns.backends.contract import DTYPES
from dmuon_hf.core.ns.library import LibraryKernel
from dmuon_hf.core.ns.support import CANDIDATES, Candidate
from tests.unit.ns_autotune_fakes import product
from tests.unit.ns_reference import gaussian


@pytest.fixture
def gpu(monkeypatch):
    """A machine with an SM90 GPU that quack and triton run on."""

    def missing(candidate: Candidate, sm: int) -> str | None:
        assert sm == 90
        return "the package is not installed" if candidate.name == "cute_sm80" else None

    monkeypatch.setattr(candidates, "sm_version", lambda: 90)
    monkeypatch.setattr(candidates, "missing", missing)


def on_gpu(**changes: object) -> candidates.Product:
    return product(**{"rows": 1024, "depth": 1024, "dtype": torch.float16, "device": "cuda", **changes})


def tiled(kernel: str) -> list[Choice]:
    return [Choice(kernel, config) for config in CONFIGS[kernel]]


def test_gpu_tries_every_kernel_that_runs_there_and_the_library(gpu):
    assert choices(on_gpu(), "quack", "auto") == [Choice("quack"), *tiled("triton"), Choice("cublas")]


def test_default_without_sizes_of_its_own_stays_a_candidate(gpu):
    assert choices(on_gpu(), "triton", "auto")[0] == Choice("triton")
    assert Choice("quack") in choices(on_gpu(), "triton", "auto")


def test_named_kernel_leaves_only_its_own_configurations(gpu):
    assert choices(on_gpu(), "triton", "triton") == [Choice("triton"), *tiled("triton")]
    assert choices(on_gpu(), "quack", "quack") == [Choice("quack")]
    assert choices(on_gpu(), "cublas", "cublas") == [Choice("cublas")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_products_of_a_gpu_have_nothing_to_choose(gpu, dtype):
    assert choices(on_gpu(dtype=dtype), "quack", "auto") == [Choice("quack")]


def test_tiles_of_no_fewer_rows_than_the_product_are_left_out(gpu):
    found = choices(on_gpu(rows=128), "quack", "auto")
    assert found[0] == Choice("quack")
    assert {choice.config[0] for choice in found[1:]} == {32, 64}
    assert {choice.kernel for choice in found[1:]} == {"triton"}


def test_small_products_of_a_gpu_have_nothing_to_choose(gpu):
    assert choices(on_gpu(rows=32), "quack", "auto") == [Choice("quack")]


def test_cpu_tries_numbers_of_blocks_other_than_its_own(monkeypatch):
    monkeypatch.setattr(candidates, "row_blocks", lambda *_: 4)
    assert choices(product(rows=1024), "cublas", "auto") == [
        Choice("cublas"),
        *(Choice("cublas", (blocks,)) for blocks in (1, 2, 6, 8, 12, 16)),
    ]


def test_blocks_have_rows_enough():
    found = choices(product(rows=70), "cublas", "auto")
    assert max(choice.config[0] for choice in found[1:]) == 4


def test_cpu_stays_with_a_kernel_that_was_named():
    assert choices(product(rows=1024), "triton", "triton") == [Choice("triton")]


@pytest.mark.parametrize("changes", [{"batch": 3}, {"dtype": torch.float16}, {"rows": 8}], ids=str)
def test_cpu_products_that_are_never_split_have_nothing_to_choose(changes):
    assert choices(product(**changes), "cublas", "auto") == [Choice("cublas")]


@pytest.mark.parametrize("kernel", ["cute_sm80", "triton"])
def test_every_configuration_is_one_of_its_kernel(kernel):
    module = {"cute_sm80": cute_config, "triton": triton_syrk}[kernel]
    for choice in tiled(kernel):
        assert build(choice).tiles == module.TileConfig(*choice.config)


@pytest.mark.parametrize("kernel", ["cute_sm80", "triton"])
def test_shared_memory_of_every_configuration_fits_everywhere(kernel):
    for rows, depth, stages, *_ in CONFIGS[kernel]:
        assert 4 * rows * depth * stages <= 99 * 1024


def test_blocks_reach_the_library():
    assert build(Choice("cublas", (6,))) == LibraryKernel(6)
    assert build(Choice("cublas")) == LibraryKernel()


def test_every_kernel_has_its_configurations_listed():
    assert set(CONFIGS) == {candidate.name for candidate in CANDIDATES}


def test_tiles_reach_the_kernel_with_every_product(monkeypatch):
    seen = []

    def syrk(A, B=None, C=None, *, alpha=1.0, beta=1.0, diag=0.0, config=None):
        seen.append(config)
        return LibraryKernel().symmetric(A, A.mT if B is None else B.mT, C, alpha=alpha, beta=beta, diag=diag)

    monkeypatch.setattr(syrk_kernel, "_load", lambda module: syrk)
    monkeypatch.setattr(syrk_kernel.SyrkKernel, "_interpreted", lambda self: True)
    kernel = build(Choice("triton", (64, 32, 4, 4)))
    A = gaussian(96, 96).to(DTYPES[1])
    kernel.gram(A)
    kernel.symmetric(A, A, A)
    assert seen == [triton_syrk.TileConfig(64, 32, 4, 4)] * 2
    kernel.gram(A[:64])
    assert len(seen) == 2


def test_kernel_without_tiles_is_called_as_before(monkeypatch):
    def syrk(A, B=None, C=None, *, alpha=1.0, beta=1.0, diag=0.0):
        return A @ A.mT

    monkeypatch.setattr(syrk_kernel, "_load", lambda module: syrk)
    monkeypatch.setattr(syrk_kernel.SyrkKernel, "_takes", lambda *_: True)
    A = gaussian(300, 8).half()
    assert torch.equal(build(Choice("quack")).gram(A), A @ A.mT)


def test_share_of_a_product_follows_the_tiles():
    small, large = build(Choice("triton", (64, 32, 4, 4))), build(Choice("triton", (128, 64, 3, 8)))
    cuda = torch.device("cuda")
    assert small.symmetric_share(512, 512, torch.float16, cuda) == 9 / 16
    assert large.symmetric_share(512, 512, torch.float16, cuda) == 5 / 8


def test_requested_kernel_of_the_environment_narrows_the_candidates(monkeypatch):
    monkeypatch.setenv("DMUON_NS_KERNEL", "cublas")
    tuner = NewtonSchulz(autotune=True).tuner
    assert tuner is not None
    assert tuner.request == "cublas"


def test_triton_in_its_interpreter_is_a_sound_candidate():
    pytest.importorskip("triton", reason="triton is not installed")
    script = (
        "import torch; from dmuon_hf.core.ns.autotune.candidates import CONFIGS, Choice, build; "
        "from dmuon_hf.core.ns.autotune.measure import Operands; "
        "from tests.unit.ns_autotune_fakes import CPU, product; "
        "kernel = build(Choice('triton', CONFIGS['triton'][-1])); "
        "gram = product(rows=75, depth=130, dtype=torch.float16, row_major=False, batch=2); "
        "symmetric = product(gram=False, rows=75, depth=75, dtype=torch.float16, fused=True); "
        "assert [Operands.of(case, CPU).problem(kernel) for case in (gram, symmetric)] == [None, None]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600, env=os.environ | {"TRITON_INTERPRET": "1"})
