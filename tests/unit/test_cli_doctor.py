"""`dmuon-hf doctor` and `version`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from dmuon_hf import __version__
from dmuon_hf.cli import doctor, main, self_test


def test_doctor_reports_versions_devices_kernels_and_a_passed_self_test(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"] == torch.__version__
    assert found["devices"]
    assert "cute_sm80" in found["kernels"]["missing"] or torch.cuda.is_available()
    assert found["self_test"]["passed"]
    assert found["self_test"]["report"].startswith("3 steps, largest relative difference")


def test_package_that_is_missing_is_named_with_the_way_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor._PACKAGES, "not-a-package", "pip install 'dmuon_hf[it]'")
    assert main(["doctor", "--no-self-test"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "not-a-package missing pip install 'dmuon_hf[it]'" in text


def test_self_test_that_fails_ends_with_status_1_and_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nRuntimeError: no loopback")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failing)
    assert main(["doctor"]) == 1
    assert "FAILED, RuntimeError: no loopback" in capsys.readouterr().out


def test_self_test_compares_with_one_process() -> None:
    assert self_test._TOLERANCE < 1e-4
    expected = self_test._one_process()
    model = self_test._model()
    moved = {name: (expected[name] - value).abs().max() for name, value in model.named_parameters()}
    assert min(moved.values()) > 1e-3


def test_version_is_that_of_the_package() -> None:
    command = [sys.executable, "-m", "dmuon_hf", "version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"dmuon_hf {__version__}\n"


def test_command_whose_library_is_missing_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dmuon_hf.cli.routes", None)
    assert main(["routes", "anything"]) == 2
    assert "pip install 'dmuon_hf[hf]'" in capsys.readouterr().err
