"""The sections of the GPU check: each passes on a GPU, and each notices what it is there for."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_check
import gpu_kernels
import gpu_model
from gpu_timing import Report, Setting

from dmuon_hf.core.ns import NewtonSchulz, graph

CPU = Setting(torch.device("cpu"), tiny=True, deadline=math.inf)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", gpu_check.SECTIONS)
def test_section_passes_on_a_gpu(name):
    setting = Setting(torch.device("cuda"), tiny=True, deadline=math.inf)
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


OPTIONS = argparse.Namespace(device="cpu", tiny=True)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (subprocess.CompletedProcess([], -11), "ended with status -11, without a result"),
        (subprocess.TimeoutExpired([], 1.0), "still running"),
    ],
)
def test_crash_or_hang_of_a_section_is_its_failure_alone(ending, message, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check.subprocess, "run", mock.Mock(side_effect=[ending]))
    found = gpu_check.run_apart("CUDA graphs against eager calls", OPTIONS, remaining=10.0)
    assert len(found["failures"]) == 1
    assert message in found["failures"][0]
    assert "FAILED" in capsys.readouterr().out


def test_kernel_package_that_breaks_on_import_does_not_stop_the_check(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check.dmuon, "get_backend_status", mock.Mock(side_effect=OSError("libcuda.so.1")))
    found = gpu_check.environment(CPU.device)
    assert found["kernels"] == "OSError: libcuda.so.1"
    assert found["versions"]["torch"] is not None


def test_section_apart_gives_the_report_of_its_process_from_any_directory(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = gpu_check.run_apart("CUDA graphs against eager calls", OPTIONS, remaining=3600.0)
    assert found["left_out"] == ["CUDA graphs need a CUDA GPU"]
    assert found["failures"] == []


def test_section_apart_starts_no_process_after_the_deadline(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *args, **kwargs: pytest.fail("ran"))
    found = gpu_check.run_apart("CUDA graphs against eager calls", OPTIONS, remaining=-1.0)
    assert found["left_out"] == ["the whole section: out of time"]


def test_kernel_that_raises_does_not_hide_the_others(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "runnable", lambda report: ["quack", "cublas"])
    newton_schulz = gpu_kernels.dmuon.NewtonSchulz

    def built(backend, kernel, *, dtype):
        if kernel == "quack":
            raise RuntimeError("no such symbol")
        return newton_schulz(backend, kernel, dtype=dtype)

    monkeypatch.setattr(gpu_kernels.dmuon, "NewtonSchulz", built)
    report = gpu_kernels.check_newton_schulz(CPU)
    assert {row[0] for row in report.rows} == {"cublas"}
    assert {failure.split()[0] for failure in report.failures} == {"quack"}


class CudaOnPaper(Setting):
    """A CPU that takes the branches for CUDA."""

    @property
    def cuda(self) -> bool:
        return True


@pytest.fixture
def on_paper(monkeypatch):
    """What the sections ask of ``torch.cuda``, answered without it."""
    asked = {
        "mem_get_info": lambda *device: (20 << 30, 80 << 30),
        "reset_peak_memory_stats": lambda *device: None,
        "max_memory_allocated": lambda *device: 3 << 30,
    }
    for name, answer in asked.items():
        monkeypatch.setattr(torch.cpu, name, answer, raising=False)
    monkeypatch.setattr(graph, "_has_cuda", lambda: True)
    monkeypatch.setattr(graph.GraphReplay, "_may_capture", lambda self, G: True)
    monkeypatch.setattr(graph.CudaDevice, "stream", lambda self, device: 0)

    def capture(self, run, device):
        output = run()
        return lambda: output.copy_(run()), output

    monkeypatch.setattr(graph.CudaDevice, "capture", capture)
    return CudaOnPaper(torch.device("cpu"), tiny=True, deadline=math.inf)


@pytest.mark.parametrize("name", gpu_check.SECTIONS)
def test_branches_for_cuda_run_on_paper(name, on_paper, capsys):
    found = gpu_check.run(name, gpu_check.SECTIONS[name], on_paper)
    if name == "Streams, NCCL and gradient checks on one rank":
        assert found["failures"] == ["NCCL is taken for gloo"]
    else:
        assert found["failures"] == []
    json.dumps(found)
    if name == "CUDA graphs against eager calls":
        assert found["checks"] == 9
    if name == "A training step of a Llama":
        assert {row[-1] for row in found["rows"]} == {"3.0"}


def test_model_shrinks_to_the_memory_that_is_free(on_paper):
    report = Report()
    setting = CudaOnPaper(torch.device("cpu"), tiny=False, deadline=0.0)
    assert gpu_model._affordable(setting, report).layers == 8
    assert report.left_out == ["8 of 16 layers: 20 GiB are free"]


def test_section_after_the_deadline_is_left_out(capsys):
    late = Setting(CPU.device, tiny=True, deadline=-math.inf)
    found = gpu_check.run("Late", lambda setting: pytest.fail("ran"), late)
    assert found["left_out"] == ["the whole section: out of time"]
    assert found["failures"] == []
