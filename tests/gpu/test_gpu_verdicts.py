"""The sections of the GPU check: each passes on a GPU, and each notices what it is there for."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_check
import gpu_kernels
import gpu_model
from gpu_timing import Report, Setting

from dmuon_hf.core.ns import NewtonSchulz

CPU = Setting(torch.device("cpu"), tiny=True, deadline=time.monotonic() + 600)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", gpu_check.SECTIONS)
def test_section_passes_on_a_gpu(name):
    setting = Setting(torch.device("cuda"), tiny=True, deadline=time.monotonic() + 600)
    report = gpu_check.SECTIONS[name](setting)
    assert report.failures == []


class Broken:
    """A symmetric product in float64 with one fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.calls = 0

    def __call__(self, A, B=None, C=None, *, alpha=1.0, beta=1.0, diag=0.0, out=None):
        self.calls += 1
        product = alpha * A.double() @ (A if B is None else B).double().mT
        if C is not None:
            product += beta * C.double()
        if self.fault != "no diagonal":
            product += diag * torch.eye(A.shape[-2], dtype=torch.float64)
        if self.fault == "not mirrored":
            product = product.tril()
        if self.fault == "another result each time":
            product *= 1.0 + 1e-2 * self.calls
        result = product.to(A.dtype)
        if out is None:
            return result
        if self.fault == "writes past a row":
            out.as_strided(out.shape, out.stride(), out.storage_offset() + out.shape[-1]).zero_()
        return out.copy_(result)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none", None),
        ("no diagonal", "roundings"),
        ("not mirrored", "not symmetric"),
        ("another result each time", "other bits"),
        ("writes past a row", "outside its output"),
    ],
)
def test_faults_of_a_kernel_are_found(fault, message):
    report = Report()
    gpu_kernels._syrk_errors(Broken(fault), (40, 72), torch.float16, CPU.device, report, "stand-in")
    if message is None:
        assert report.failures == []
    else:
        assert any(message in failure for failure in report.failures)


def test_inaccurate_newton_schulz_is_found(monkeypatch):
    monkeypatch.setattr(NewtonSchulz, "__call__", lambda self, G, steps=None: torch.zeros_like(G))
    assert gpu_kernels.check_newton_schulz(CPU).failures


def test_training_that_differs_from_a_single_process_is_found(monkeypatch):
    build = gpu_model.build

    def other_rate(shape, setting, mesh, ns, **options):
        model, optimizer = build(shape, setting, mesh, ns, **options)
        if mesh is not None:
            for group in optimizer.param_groups:
                group["lr"] *= 2
        return model, optimizer

    monkeypatch.setattr(gpu_model, "build", other_rate)
    assert any("relative distance" in failure for failure in gpu_model.check_world_of_one(CPU).failures)


def test_exception_in_a_section_is_its_failure_alone(capsys):
    def broken(setting: Setting) -> Report:
        raise RuntimeError("out of memory")

    assert gpu_check.run("Broken", broken, CPU)["failures"] == ["RuntimeError: out of memory"]


def test_section_after_the_deadline_is_left_out(capsys):
    late = Setting(CPU.device, tiny=True, deadline=time.monotonic() - 1)
    found = gpu_check.run("Late", lambda setting: pytest.fail("ran"), late)
    assert found["left_out"] == ["the whole section: out of time"]
    assert found["failures"] == []
