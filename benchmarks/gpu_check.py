"""Check everything of this package that only a GPU can show, and time it, on one GPU in less than 8 minutes.

    python benchmarks/gpu_check.py --json gpu.json

Needs PyTorch with CUDA and NumPy, no network and no installation: it runs from a bare clone. Kernels whose packages are
missing and rivals that are not installed are named and left out. Sections are independent: one that fails does not stop
the others.

Exit status: 0 if every check holds, 1 if one fails, 2 without a GPU. ``--device cpu --tiny`` runs what a CPU can, in
seconds: it tests this script, not the GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_kernels import check_graphs, check_newton_schulz, check_syrk, compare_newton_schulz
from gpu_model import check_world_of_one, compare_training
from gpu_timing import Report, Setting
from report import machine, print_header, print_table, write_json

import dmuon_hf.core as dmuon

SECTIONS: dict[str, Callable[[Setting], Report]] = {
    "Symmetric products against float64": check_syrk,
    "Newton-Schulz against float64": check_newton_schulz,
    "CUDA graphs against eager calls": check_graphs,
    "FSDP2 on one rank against no process group": check_world_of_one,
    "A training step of a Llama": compare_training,
    "Newton-Schulz per shape": compare_newton_schulz,
}
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "quack-kernels", "gram-newton-schulz")
NO_GPU = 2


def environment(device: torch.device) -> dict[str, Any]:
    """The GPU, the packages that matter, and what the choice of a kernel rests on."""
    found: dict[str, Any] = {"device": str(device), "cuda": torch.version.cuda}
    found["versions"] = {package: _version(package) for package in PACKAGES}
    if device.type == "cuda":
        properties = torch.get_device_module(device).get_device_properties(device)
        found |= {"gpu": properties.name, "memory": properties.total_memory}
    return {**found, "kernels": dmuon.get_backend_status(), "summary": dmuon.get_ns_backend()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run(name: str, section: Callable[[Setting], Report], setting: Setting) -> dict[str, Any]:
    """One section with its table and its verdict; an exception is a failure of that section alone."""
    start = time.monotonic()
    report = Report()
    if setting.out_of_time:
        report.left_out.append("the whole section: out of time")
    else:
        try:
            report = section(setting)
        except Exception as error:
            traceback.print_exc()
            report.failures.append(f"{type(error).__name__}: {error}")
    if report.rows:
        print_table(name, report.columns, report.rows)
    verdict = f"{len(report.failures)} FAILED" if report.failures else "passed"
    seconds = time.monotonic() - start
    print(f"{name}: {report.checks} checks, {verdict}, {seconds:.0f} s")
    for failure in report.failures:
        print(f"  FAILED    {failure}")
    for reason in report.left_out:
        print(f"  left out  {reason}")
    found = {key: getattr(report, key) for key in ("checks", "failures", "left_out", "columns", "rows", "data")}
    return {"seconds": seconds, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    parser.add_argument("--seconds", type=float, default=420.0, help="start nothing after this (default: %(default)s)")
    parser.add_argument("--json", metavar="PATH", help="write everything")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU and a PyTorch built for it; torch.cuda.is_available() is False here.")
        print("--device cpu --tiny runs the parts that need none.")
        return NO_GPU
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu goes with --tiny: its full shapes would take hours")
    where = machine()
    print_header(where)
    device = torch.device(options.device)
    found = environment(device)
    print(found["summary"], found["versions"])
    setting = Setting(device, options.tiny, time.monotonic() + options.seconds)
    sections = {name: run(name, section, setting) for name, section in SECTIONS.items()}
    failed = [name for name, section in sections.items() if section["failures"]]
    checks = sum(section["checks"] for section in sections.values())
    print(f"\n{checks} checks; {'all passed' if not failed else 'FAILED: ' + ', '.join(failed)}")
    write_json(options.json, {"machine": where, "environment": found, "sections": sections})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
