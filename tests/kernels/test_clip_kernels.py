"""The clip kernels without a GPU: compiled, executed from PTX, interpreted, and as clipping calls them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim import clip_buckets, norms
from dmuon_hf.core.optim.clip_buckets import GradClipBucket, clip_grad_norm_buckets_
from dmuon_hf.core.optim.clip_kernels import CHUNK, WARPS, compile_ahead_of_time, is_taken, runs_on
from tests.kernels.clip_programs import run_ptx
from tests.kernels.resources import ARCHITECTURES, assemble, newest_ptxas

ROOT = Path(__file__).resolve().parents[2]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NAMES = ["square_sums", "scale"]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


@needs_triton
@pytest.mark.skipif(newest_ptxas() is None, reason="no ptxas on this machine")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_kernel_fits_a_multiprocessor_without_spilling(capability, name, tmp_path, record_resources):
    kernel = compile_ahead_of_time(name, capability, torch.bfloat16)
    resources = assemble(kernel.asm["ptx"], tmp_path, threads=32 * WARPS, dynamic_shared_bytes=kernel.metadata.shared)
    record_resources(f"clip {name} bf16", resources)
    resources.check(capability)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_runs_are_read_and_written_in_vectors(dtype):
    assert "ld.global.v4.b32" in compile_ahead_of_time("square_sums", 80, dtype).asm["ptx"]
    assert "st.global.v4.b32" in compile_ahead_of_time("scale", 80, dtype).asm["ptx"]


@needs_triton
def test_kernel_compiles_for_another_vendor():
    assert compile_ahead_of_time("square_sums", "gfx942", torch.bfloat16).asm["hsaco"]


@needs_triton
def test_dtype_that_the_kernels_do_not_take_is_refused():
    with pytest.raises(ConfigurationError, match="float64"):
        compile_ahead_of_time("scale", 80, torch.float64)


def _gradients(dtype, sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(5, CHUNK + 3, 100), (2 * CHUNK, 1), (7,)])
def test_sums_of_runs_equal_float64(dtype, sizes):
    tensors = _gradients(dtype, sizes)
    partial, report = run_ptx("square_sums", tensors)
    want = [run.double().square().sum() for tensor in tensors for run in tensor.split(CHUNK)]
    torch.testing.assert_close(partial.double(), torch.stack(want), rtol=1e-5, atol=0)
    assert report.clean, report


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(5, CHUNK + 3), (CHUNK, 9)])
def test_scaled_gradients_are_rounded_once(dtype, sizes):
    tensors = _gradients(dtype, sizes)
    want = [(tensor.float() * torch.tensor(0.3)).to(dtype) for tensor in tensors]
    _, report = run_ptx("scale", tensors, 0.3)
    assert all(map(torch.equal, tensors, want)) and report.clean


@needs_triton
def test_interpreted_kernels_equal_float64():
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.clip_interpreted"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == 9
    assert {name: failure for name, failure in results.items() if failure} == {}


def test_cpu_keeps_to_the_kernels_of_torch():
    assert not runs_on(torch.device("cpu"))


@pytest.mark.parametrize(
    ("tensor", "taken"),
    [
        (torch.ones(4, 6), True),
        (torch.ones(4, 6, dtype=torch.bfloat16), True),
        (torch.ones(4, 6, dtype=torch.float64), False),
        (torch.ones(4, 6).t(), False),
        (torch.ones(9)[1:], False),
    ],
    ids=["fp32", "bf16", "fp64", "transposed", "unaligned"],
)
def test_kernels_take_what_is_contiguous_aligned_and_narrow(tensor, taken):
    assert is_taken(tensor) is taken


class Kernels:
    """Stand-ins on the CPU for the kernels of a GPU, which note what they were given."""

    def __init__(self, monkeypatch):
        self.summed, self.scaled = [], []
        monkeypatch.setattr(norms, "runs_on", lambda device: True)
        monkeypatch.setattr(norms, "sum_of_squares", self.sum_of_squares)
        monkeypatch.setattr(norms, "scale_in_place_", self.scale_in_place_)

    def sum_of_squares(self, tensors):
        self.summed += [id(tensor) for tensor in tensors]
        return sum(tensor.double().square().sum() for tensor in tensors)

    def scale_in_place_(self, tensors, factor):
        self.scaled += [id(tensor) for tensor in tensors]
        torch._foreach_mul_(tensors, factor)


def _mixed():
    kinds = [torch.randn(8, 3), torch.randn(5).double(), torch.randn(3, 8).t(), torch.randn(16).bfloat16()]
    return kinds, {id(kinds[0]), id(kinds[3])}


def test_clip_gives_each_gradient_to_the_kernels_that_take_it(monkeypatch):
    kernels = Kernels(monkeypatch)
    grads, for_kernels = _mixed()
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    result = clip_grad_norm_buckets_([GradClipBucket("mixed", grads)], norm / 2)
    assert set(kernels.summed) == set(kernels.scaled) == for_kernels
    assert result.bucket_stats[0].total_norm == pytest.approx(norm, rel=1e-5)
    left = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    assert left == pytest.approx(norm / 2, rel=1e-2)
    assert not result.fastpath and result.fallback_reason == clip_buckets._NO_KERNELS


def test_result_says_that_the_kernels_took_everything(monkeypatch):
    Kernels(monkeypatch)
    result = clip_grad_norm_buckets_([GradClipBucket("all", [torch.randn(8)]), GradClipBucket("none", [])], 1.0)
    assert result.fastpath and result.fallback_reason is None
    assert [stats.fastpath for stats in result.bucket_stats] == [True, False]


@pytest.mark.parametrize(("norm_type", "foreach"), [(2.0, True), (2.0, False), (1.0, None), (math.inf, None)])
def test_other_norms_and_explicit_choices_are_left_to_torch(monkeypatch, norm_type, foreach):
    kernels = Kernels(monkeypatch)
    norms.norm_power([torch.randn(8)], norm_type, device=torch.device("cpu"), foreach=foreach)
    assert kernels.summed == []
