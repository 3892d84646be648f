from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
HAS_TRITON = importlib.util.find_spec("triton") is not None


def run_script(*arguments: str, directory: Path = ROOT, path: str = "") -> subprocess.CompletedProcess[str]:
    # Triton's interpreter lets the checks of its kernel run on a CPU.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=600, env=environment, cwd=directory
    )


def test_every_section_runs_on_a_cpu_from_any_directory(tmp_path):
    done = run_script("--device", "cpu", "--tiny", "--seconds", "3600", "--json", "check.json", directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads((tmp_path / "check.json").read_text())["sections"]
    checks = {name: section["checks"] for name, section in sections.items()}
    assert checks["Newton-Schulz against float64"] > 0
    assert checks["FSDP2 on one rank against no process group"] > 0
    assert checks["A training step of a Llama"] == 3
    assert (checks["Symmetric products against float64"] > 0) is HAS_TRITON
    assert (checks["Gradient clipping against float64"] > 0) is HAS_TRITON
    assert sections["CUDA graphs against eager calls"]["left_out"] == ["CUDA graphs need a CUDA GPU"]
    timed = [row[1] for row in sections["Newton-Schulz per shape"]["rows"]]
    assert {"dmuon gram kernel=cublas", "torch.optim.Muon"} <= set(timed)
    assert not any(section["failures"] for section in sections.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2():
    done = run_script()
    assert done.returncode == 2
    assert "needs a CUDA GPU" in done.stdout


def test_release_of_torch_on_which_nothing_loads_is_named_with_the_one_that_is_needed(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch.distributed.fsdp'] = None\n")
    done = run_script("--device", "cpu", "--tiny", path=str(tmp_path))
    assert done.returncode == 3
    message = done.stdout.splitlines()[-1]
    assert f"torch is {torch.__version__}" in message
    assert "torch >=2.13,<2.14" in message


def test_full_shapes_on_a_cpu_are_refused():
    done = run_script("--device", "cpu")
    assert done.returncode == 2
    assert "goes with --tiny" in done.stderr
