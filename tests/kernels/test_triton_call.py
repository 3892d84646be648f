"""Calling Triton's SYRK: in Triton's interpreter, and where it cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.backends import triton_syrk
from dmuon_hf.core.ns.backends.triton_syrk import TileConfig, choose_config, syrk

ROOT = Path(__file__).resolve().parents[2]
A = torch.ones(4, 6, dtype=torch.float16)


def test_interpreted_kernel_equals_float64():
    pytest.importorskip("triton", reason="the package triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_interpreted"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == 20
    assert {name: failure for name, failure in results.items() if failure} == {}


def test_missing_triton_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    triton_syrk._triton.cache_clear()
    with pytest.raises(NotImplementedError, match="needs the package triton"):
        syrk(A)
    triton_syrk._triton.cache_clear()


def test_cpu_tensor_outside_the_interpreter_is_refused():
    pytest.importorskip("triton", reason="the package triton is not installed")
    with pytest.raises(NotImplementedError, match="TRITON_INTERPRET=1"):
        syrk(A)


def test_import_of_the_backend_does_not_import_triton():
    code = "import sys, dmuon_hf.core.ns.backends.triton_syrk; print('triton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("wrong", [{"rows": 48}, {"rows": 8}, {"depth": 0}, {"stages": 0}, {"warps": 3}])
def test_impossible_tiles_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        TileConfig(**wrong)


@pytest.mark.parametrize(
    ("M", "batch", "rows"),
    [
        (4096, 1, 128),
        # Of 136 tiles of 128 rows the last four would keep 128 of 132 multiprocessors waiting.
        (2048, 1, 64),
        (1024, 8, 128),
        (16, 1, 32),
    ],
)
def test_tiles_keep_the_multiprocessors_busy(M, batch, rows):
    assert choose_config(M, batch, multiprocessors=132).rows == rows


@pytest.mark.parametrize(("M", "tiles"), [(1, 1), (128, 1), (129, 3), (512, 10)])
def test_tiles_cover_the_lower_triangle(M, tiles):
    assert TileConfig(rows=128).tiles(M) == tiles
