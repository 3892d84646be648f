"""Kernels with one mistake each: the tests that prove the right ones would find it."""

from __future__ import annotations

import importlib.util
import inspect
import re

import pytest
import torch

from dmuon_hf.core.ns.backends import triton_syrk
from tests.kernels.reference import make_case
from tests.kernels.triton_programs import SMALL, compiled, run_ptx
from tests.ptx import OutOfBoundsError

pytest.importorskip("triton", reason="the package triton is not installed")

FP16 = torch.float16


@pytest.fixture
def compile_with(tmp_path):
    """Compile the kernel after replacing one piece of its source."""

    def build(right: str, wrong: str, **variant: bool) -> tuple[str, int]:
        source = inspect.getsource(triton_syrk)
        assert source.count(right) == 1, f"{right!r} stands {source.count(right)} times in the kernel"
        path = tmp_path / "broken_syrk.py"
        path.write_text(source.replace(right, wrong))
        spec = importlib.util.spec_from_file_location("broken_syrk", path)
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their module up.
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(__import__("sys").modules, "broken_syrk", module)
            spec.loader.exec_module(module)
            kernel = module.compile_ahead_of_time(80, FP16, SMALL, **variant)
        return kernel.asm["ptx"], kernel.metadata.shared

    return build


def _without_waits(ptx: str) -> str:
    """Every wait leaves one group more in flight."""
    ptx, count = re.subn(r"cp\.async\.wait_group\s+(\d+)", lambda m: f"cp.async.wait_group {int(m[1]) + 1}", ptx)
    assert count
    return ptx


def test_wait_for_too_few_groups_is_reported_as_a_race():
    ptx, shared = compiled(FP16, SMALL)
    report = run_ptx(make_case(64, 160, FP16), _without_waits(ptx), shared, SMALL)[1]
    assert report.in_flight


def test_missing_barrier_is_reported_as_a_race():
    ptx, shared = compiled(FP16, SMALL)
    report = run_ptx(make_case(64, 160, FP16), re.sub(r"bar\.sync\s+0;", "", ptx), shared, SMALL)[1]
    assert report.unordered


def test_tail_of_K_without_a_predicate_reads_out_of_bounds(compile_with):
    ptx, shared = compile_with("mask=row_inside[:, None] & step_inside[None, :]", "mask=row_inside[:, None]")
    case = make_case(32, 48, FP16)
    with pytest.raises(OutOfBoundsError, match=r"cp\.async"):
        run_ptx(case, ptx, shared, SMALL)


def test_tail_of_M_without_a_predicate_is_out_of_bounds(compile_with):
    ptx, shared = compile_with("row_inside = row < M\n", "row_inside = row < M + TILE\n")
    with pytest.raises(OutOfBoundsError):
        run_ptx(make_case(48, 64, FP16), ptx, shared, SMALL)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("mirrored = tl.trans(result)", "mirrored = result"),
        ("total *= alpha", "total *= beta"),
        ("total + diag, total)", "total, total)"),
        ("total = tl.dot(left, right, total)", "total = tl.dot(left, right)"),
        ("batch * c_batch + wide_row[:, None] * c_row", "batch * c_batch + wide_row[:, None] * c_column"),
    ],
    ids=["mirror", "alpha", "diag", "accumulation", "C"],
)
def test_wrong_arithmetic_gives_a_wrong_matrix(compile_with, right, wrong):
    ptx, shared = compile_with(right, wrong)
    case = make_case(64, 64, FP16)
    out, _ = run_ptx(case, ptx, shared, SMALL)
    with pytest.raises(AssertionError, match=r"relative error|not symmetric"):
        case.check(out)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(row[:, None] >= column[None, :])", "(row[:, None] > column[None, :])"),
        ("        tl.store(mirrored_tile, mirrored, mask=mirrored_inside)\n", "        pass\n"),
    ],
    ids=["diagonal", "mirrored tiles"],
)
def test_element_that_is_not_written_is_noticed(compile_with, right, wrong):
    ptx, shared = compile_with(right, wrong)
    with pytest.raises(AssertionError, match="not stored exactly once"):
        run_ptx(make_case(64, 64, FP16), ptx, shared, SMALL)
