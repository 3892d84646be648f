"""`dmuon-hf doctor`: what is installed, what the machine has, what is missing, and whether two ranks train right."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import subprocess
import sys
from typing import Any

import torch

from dmuon_hf import __version__
from dmuon_hf.cli.tables import console, print_json, print_table

__all__ = ["run", "run_version"]

_PACKAGES = {
    "torch": "pip install torch",
    "safetensors": "pip install safetensors",
    "transformers": "pip install 'dmuon_hf[hf]'",
    "accelerate": "pip install 'dmuon_hf[hf]'",
    "datasets": "pip install 'dmuon_hf[hf]'",
    "peft": "pip install 'dmuon_hf[hf]'",
    "trl": "pip install 'dmuon_hf[trl]'",
    "matplotlib": "pip install 'dmuon_hf[plot]'",
    "triton": "it comes with PyTorch for CUDA",
    "nvidia-cutlass-dsl": "pip install 'dmuon_hf[kernels]'",
    "quack-kernels": "pip install 'dmuon_hf[kernels]'",
}
_TIMEOUT = 300


def run_version(options: argparse.Namespace) -> int:
    """Print the version."""
    sys.stdout.write(f"dmuon_hf {__version__}\n")
    return 0


def run(options: argparse.Namespace) -> int:
    """Print the state of things; status 1 where the self-test fails."""
    found: dict[str, Any] = {
        "dmuon_hf": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "kernels": _kernels(),
        "self_test": None if options.no_self_test else _self_test(),
    }
    if options.json:
        print_json(found)
    else:
        _show(found)
    return 0 if found["self_test"] is None or found["self_test"]["passed"] else 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    accelerators = [
        f"{torch.cuda.get_device_name(i)}, {torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB"
        for i in range(torch.cuda.device_count())
    ]
    return accelerators or [f"CPU, {torch.get_num_threads()} threads"]


def _kernels() -> dict[str, Any]:
    from dmuon_hf.core import get_backend_status, get_ns_backend

    status = get_backend_status()
    if not torch.cuda.is_available():
        return {"newton_schulz": "plain PyTorch on the CPU", "missing": status["missing"]}
    return {"newton_schulz": get_ns_backend(), **status}


def _self_test() -> dict[str, Any]:
    """Two processes train a small model over gloo, in a process of their own that cannot harm this one."""
    command = [sys.executable, "-m", "dmuon_hf.cli.self_test"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return {"passed": False, "report": f"no answer within {_TIMEOUT} s"}
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().splitlines()
    return {"passed": done.returncode == 0, "report": lines[-1] if lines else f"exit status {done.returncode}"}


def _show(found: dict[str, Any]) -> None:
    out = console()
    out.print(f"dmuon_hf {found['dmuon_hf']}, Python {found['python']}, {'; '.join(found['devices'])}\n")
    print_table(
        "packages",
        ("name", "version", "how to get it"),
        (
            (name, version or "missing", "" if version else _PACKAGES[name])
            for name, version in found["packages"].items()
        ),
        left=3,
    )
    out.print()
    kernels = ((key, _text(value)) for key, value in found["kernels"].items())
    print_table("kernels of Newton-Schulz", ("what", "state"), kernels, left=2)
    test = found["self_test"]
    if test is not None:
        out.print(f"\nself-test on 2 ranks: {'passed' if test['passed'] else 'FAILED'}, {test['report']}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {entry}" for key, entry in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
