"""Mistakes that this kind of kernel is prone to, each made on purpose: the interpreter and the reference catch them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
cute = pytest.importorskip("cutlass.cute", reason="nvidia-cutlass-dsl is not installed")

from dmuon_hf.core.ns.backends.cute_config import Variant  # noqa: E402
from dmuon_hf.core.ns.backends.cute_kernel import SyrkKernel  # noqa: E402
from dmuon_hf.core.ns.backends.cute_rows import RowCopy  # noqa: E402
from tests.kernels.cute_programs import SMALLEST, compiled, interpret, operands_of, run_case  # noqa: E402
from tests.kernels.reference import make_case  # noqa: E402
from tests.ptx import OutOfBoundsError, Report  # noqa: E402

VARIANT = Variant(torch.float16, SMALLEST)


class WaitsForOneSliceTooFew(SyrkKernel):
    def wait_for_slice(self) -> None:
        cute.arch.cp_async_wait_group(self.config.stages - 1)
        cute.arch.sync_threads()


class WaitsWithoutBarrier(SyrkKernel):
    def wait_for_slice(self) -> None:
        cute.arch.cp_async_wait_group(self.config.stages - 2)


class ReusesRingWithoutBarrier(SyrkKernel):
    def drain_ring(self) -> None:
        cute.arch.cp_async_wait_group(0)


class LoadsTheTailWhole(SyrkKernel):
    @cute.jit
    def fill_ring(self, loads: Any, slices: Any, shortfall: Any, thread: Any) -> None:
        for n in cutlass.range_constexpr(self.config.stages - 1):
            if n < slices:
                self.load(loads, n, n)
            cute.arch.cp_async_commit_group()


class ReadsCWhileItArrives(SyrkKernel):
    def wait_for_tile(self) -> None:
        cute.arch.cp_async_commit_group()
        cute.arch.sync_threads()


class StoresRowsThatDoNotExist(SyrkKernel):
    def tile_copy(self) -> RowCopy:
        return _AllRows(self.element, threads=self.config.threads, columns=self.config.rows, width=self.store_width)


class _AllRows(RowCopy):
    def exist(self, count: int, thread: Any, rows_left: Any) -> Any:
        return super().exist(count, thread, thread // self.across + count * self.down)


def report_of(kernel_class: type[SyrkKernel], variant: Variant = VARIANT, *, M: int = 40, K: int = 200) -> Report:
    case = make_case(M, K, variant.dtype)
    operands = operands_of(case)
    return interpret(compiled(variant, kernel_class), variant, operands, (case.alpha, case.beta, case.diag))


def test_slice_read_before_it_arrived_is_reported() -> None:
    assert any("ldmatrix" in text for text in report_of(WaitsForOneSliceTooFew).in_flight)


def test_missing_barrier_between_slices_is_reported() -> None:
    assert report_of(WaitsWithoutBarrier).unordered


def test_ring_reused_for_the_result_while_it_is_read_is_reported() -> None:
    assert report_of(ReusesRingWithoutBarrier).unordered


def test_C_read_before_it_arrived_is_reported() -> None:
    assert report_of(ReadsCWhileItArrives).in_flight


def test_tail_of_K_loaded_whole_is_out_of_bounds() -> None:
    with pytest.raises(OutOfBoundsError, match=r"cp\.async"):
        report_of(LoadsTheTailWhole)


def test_tail_of_K_loaded_whole_inside_a_batch_is_wrong() -> None:
    """Before the second matrix lies the first one: nothing is out of bounds there."""
    case = make_case(32, 40, torch.float16, batch=2)
    padded = torch.cat((torch.zeros(1, 32, 40, dtype=torch.float16), case.A))
    case = type(case)(padded[1:], None, case.C, case.alpha, case.beta, case.diag, case.expected)
    with pytest.raises((AssertionError, OutOfBoundsError)):
        run_case(case, VARIANT, LoadsTheTailWhole)


def test_rows_beyond_M_stored_are_out_of_bounds() -> None:
    with pytest.raises(OutOfBoundsError):
        report_of(StoresRowsThatDoNotExist)
