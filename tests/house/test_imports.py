"""What importing the package pulls in and touches. Each check runs in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ("transformers", "accelerate", "peft", "datasets", "safetensors")


def _run(code: str, **env: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")} | env
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    return set(json.loads(_run(code)))


@pytest.mark.parametrize("statement", ["import dmuon_hf.core", "import dmuon_hf"])
def test_import_loads_no_hugging_face_library(statement):
    assert _loaded_after(statement) & set(FOREIGN) == set()


IMPORT_ALL_OF_CORE = """
import importlib, pkgutil
import dmuon_hf.core as core
for found in pkgutil.walk_packages(core.__path__, "dmuon_hf.core."):
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        # Kernels need their compiler, which not every machine has.
        kernel = found.name.startswith("dmuon_hf.core.ns.backends.")
        assert kernel and error.name in ("cutlass", "cuda", "triton"), error
"""


def test_every_core_module_imports_without_hugging_face_libraries():
    assert _loaded_after(IMPORT_ALL_OF_CORE) & {"transformers", "accelerate", "peft", "datasets"} == set()


def test_core_imports_nothing_from_the_layer_above():
    foreign = []
    for path in (ROOT / "dmuon_hf" / "core").rglob("*.py"):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]) and words[1].split(".")[0] == "dmuon_hf":
                foreign += [] if words[1].startswith("dmuon_hf.core") else [f"{path.name}: {line.strip()}"]
    assert foreign == []


def test_optimizer_meets_the_runtime_in_the_named_modules_only():
    package = ROOT / "dmuon_hf" / "core" / "optim"
    meeting = {path.name for path in package.glob("*.py") if "dmuon_hf.core.runtime" in path.read_text()}
    assert meeting == {"binding.py", "clip_buckets.py", "stages.py", "state.py"}
    said = (package / "interfaces.py").read_text()
    assert all(name in said for name in meeting)


def test_import_touches_no_cuda_and_no_process_group():
    code = (
        "import torch, dmuon_hf, dmuon_hf.core\n"
        "import torch.distributed as dist\n"
        "print(torch.cuda.is_initialized(), dist.is_initialized())"
    )
    assert _run(code).split() == ["False", "False"]


def test_import_leaves_accelerate_and_trainer_as_they_were():
    code = """
import accelerate, transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate import Accelerator
def facts():
    return [dict(vars(c)) for c in (Accelerator, AcceleratorState, PartialState, transformers.Trainer)]
before = facts()
import dmuon_hf, dmuon_hf.core
print(facts() == before, PartialState._shared_state == {})
"""
    assert _run(code).split() == ["True", "True"]


def test_public_names_all_resolve():
    code = (
        "import dmuon_hf, dmuon_hf.core as core\n"
        "print([n for m in (dmuon_hf, core) for n in m.__all__ if not hasattr(m, n)])"
    )
    assert _run(code).strip() == "[]"
