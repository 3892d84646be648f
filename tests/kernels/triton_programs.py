"""Triton's SYRK compiled for sm_80 and run in the PTX interpreter."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dmuon_hf.core.ns.backends.triton_syrk import TileConfig, compile_ahead_of_time
from tests.kernels.reference import Case
from tests.ptx import GlobalMemory, Report, add_tensor, launch, parse

__all__ = ["SMALL", "compiled", "run_ptx"]

SMALL = TileConfig(rows=32, depth=32, stages=3, warps=4)


@functools.cache
def compiled(
    dtype: torch.dtype, config: TileConfig, *, has_C: bool = True, aligned: bool = True, row_major: bool = True
) -> tuple[str, int]:
    """PTX for sm_80 and the bytes of dynamic shared memory of one variant."""
    kernel = compile_ahead_of_time(80, dtype, config, has_C=has_C, aligned=aligned, row_major=row_major)
    return kernel.asm["ptx"], kernel.metadata.shared


def run_ptx(
    case: Case,
    ptx: str,
    shared_bytes: int,
    config: TileConfig,
    *,
    row_major: bool = True,
    misalignment: int = 0,
) -> tuple[Tensor, Report]:
    """Launch the program on the operands of ``case``; the result, filled with NaN before, and the report.

    Asserts that every element was stored exactly once.
    """
    A = case.A if case.A.ndim == 3 else case.A[None]
    B, C = (None if x is None else x.view(-1, *x.shape[-2:]) for x in (case.B, case.C))
    batch, M, K = A.shape
    out = torch.full((batch, M, M), float("nan"), dtype=A.dtype)
    memory = GlobalMemory()
    a = add_tensor(memory, A, misalignment=misalignment)
    b = a if B is None else add_tensor(memory, B, misalignment=misalignment)
    result = add_tensor(memory, out, misalignment=misalignment)
    c = result if C is None else add_tensor(memory, C, misalignment=misalignment)
    strides: list[int] = []
    for operand in (A, A if B is None else B):
        strides += [operand.stride(0), operand.stride(1 if row_major else 2)]
    strides += [*(out if C is None else C).stride()[:2], *out.stride()[:2]]
    values = [a.address, b.address, c.address, result.address, M, K, case.alpha, case.beta, case.diag, *strides]
    grid = (config.tiles(M) * batch, 1, 1)
    report = launch(parse(ptx), memory, values, grid=grid, threads=32 * config.warps, dynamic_shared_bytes=shared_bytes)
    assert (result.writes == 1).all(), "an element was not stored exactly once"
    return (out if case.A.ndim == 3 else out[0]), report
