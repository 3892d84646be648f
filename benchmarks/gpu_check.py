"""Check everything of this package that only a GPU can show, and time it, on one GPU in less than 8 minutes.

    python benchmarks/gpu_check.py --json gpu.json

Needs PyTorch with CUDA and NumPy, no network and no installation: it runs from a bare clone. Kernels whose packages are
missing and rivals that are not installed are named and left out. On a GPU every section has a process of its own: one
that fails, crashes or hangs does not stop the others.

Exit status: 0 if every check holds, 1 if one fails, 2 without a GPU, 3 with a Python or PyTorch on which this package
does not load. ``--device cpu --tiny`` runs what a CPU can, in seconds: it tests this script, not the GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
NO_GPU, DOES_NOT_LOAD = 2, 3


def written_for() -> str:
    """The releases of torch that the package is made for, as its requirements have them."""
    found = re.search(r'"torch([<>=][^"]*)"', (ROOT / "pyproject.toml").read_text())
    return found.group(1) if found else "of another release"


try:
    import torch
    from gpu_kernels import check_clip, check_graphs, check_newton_schulz, check_syrk, compare_newton_schulz
    from gpu_model import check_world_of_one, compare_training
    from gpu_runtime import check_runtime
    from gpu_timing import Report, Setting
    from report import machine, print_header, print_table, write_json

    import dmuon_hf.core as dmuon
except (ImportError, AttributeError, TypeError) as error:
    traceback.print_exc()
    installed = getattr(sys.modules.get("torch"), "__version__", "missing")
    print(
        f"gpu_check does not load here: {error}. Python is {sys.version.split()[0]}, torch is {installed}; it is "
        f"written for Python 3.10 or newer and torch {written_for()}. PYTHON=... of `make gpu-check` chooses another "
        "interpreter."
    )
    sys.exit(DOES_NOT_LOAD)

SECTIONS: dict[str, Callable[[Setting], Report]] = {
    "Symmetric products against float64": check_syrk,
    "Newton-Schulz against float64": check_newton_schulz,
    "CUDA graphs against eager calls": check_graphs,
    "Gradient clipping against float64": check_clip,
    "Streams, NCCL and gradient checks on one rank": check_runtime,
    "FSDP2 on one rank against no process group": check_world_of_one,
    "A training step of a Llama": compare_training,
    "Newton-Schulz per shape": compare_newton_schulz,
}
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "quack-kernels", "gram-newton-schulz")
# Seconds after the end of the time allowed in which a section may finish what it has begun, and most of all for one.
GRACE = 90.0
SECTION_LIMIT = 240.0


def environment(device: torch.device) -> dict[str, Any]:
    """The GPU, the packages that matter, and what the choice of a kernel rests on."""
    found: dict[str, Any] = {"device": str(device), "cuda": torch.version.cuda}
    found["versions"] = {package: _version(package) for package in PACKAGES}
    if device.type == "cuda":
        properties = torch.get_device_module(device).get_device_properties(device)
        found |= {"gpu": properties.name, "memory": properties.total_memory}
    try:
        return {**found, "kernels": dmuon.get_backend_status(), "summary": dmuon.get_ns_backend()}
    except Exception as error:
        traceback.print_exc()
        return {**found, "kernels": f"{type(error).__name__}: {error}"}


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
    return {"seconds": seconds, **as_json(report)}


def run_apart(name: str, options: argparse.Namespace, remaining: float) -> dict[str, Any]:
    """One section in a process of its own: after a fault in a kernel nothing more works on the GPU in that process."""
    if remaining <= 0:
        return run(name, SECTIONS[name], Setting(torch.device(options.device), options.tiny, 0.0))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "section.json"
        command = [sys.executable, __file__, "--device", options.device, "--section", name, "--json", str(result)]
        command += ["--seconds", str(remaining), *(["--tiny"] if options.tiny else [])]
        sys.stdout.flush()
        limit = min(remaining + GRACE, SECTION_LIMIT)
        try:
            status = subprocess.run(command, check=False, timeout=limit).returncode
            ended = f"its process ended with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"its process was still running after {limit:.0f} s, and was killed"
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text())["sections"][name]
            return found
    print(f"{name}: FAILED, {ended}")
    lost = Report(failures=[f"{ended}, without a result"])
    return {"seconds": time.monotonic() - start, **as_json(lost)}


def as_json(report: Report) -> dict[str, Any]:
    return {key: getattr(report, key) for key in ("checks", "failures", "left_out", "columns", "rows", "data")}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    parser.add_argument("--seconds", type=float, default=420.0, help="start nothing after this (default: %(default)s)")
    parser.add_argument("--json", metavar="PATH", help="write everything")
    parser.add_argument("--section", choices=SECTIONS, metavar="NAME", help="only this one, in this process")
    parser.add_argument("--apart", action="store_true", help="on a CPU, too, a process for every section")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu goes with --tiny: its full shapes would take hours")
    return options


def main() -> int:
    options = arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU and a PyTorch built for it; torch.cuda.is_available() is False here.")
        print("--device cpu --tiny runs the parts that need none.")
        return NO_GPU
    device = torch.device(options.device)
    deadline = time.monotonic() + options.seconds
    if options.section is not None:
        faulthandler.enable()
        section = run(options.section, SECTIONS[options.section], Setting(device, options.tiny, deadline))
        write_json(options.json, {"sections": {options.section: section}})
        return 1 if section["failures"] else 0
    where = machine()
    print_header(where)
    print(f"written for torch {written_for()}: on another release a failure may be that release's")
    found = environment(device)
    print(found.get("summary", "what the kernels rest on cannot be told"), found["versions"])
    sections = {}
    for name in SECTIONS:
        if device.type == "cuda" or options.apart:
            sections[name] = run_apart(name, options, deadline - time.monotonic())
        else:
            sections[name] = run(name, SECTIONS[name], Setting(device, options.tiny, deadline))
    failed = [name for name, section in sections.items() if section["failures"]]
    checks = sum(section["checks"] for section in sections.values())
    print(f"\n{checks} checks; {'all passed' if not failed else 'FAILED: ' + ', '.join(failed)}")
    write_json(options.json, {"machine": where, "environment": found, "sections": sections})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
