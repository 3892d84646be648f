"""The clip kernels compiled for sm_80 and run in the PTX interpreter."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dmuon_hf.core.optim.clip_kernels import CHUNK, WARPS, compile_ahead_of_time
from tests.ptx import GlobalMemory, Report, add_tensor, launch, parse

__all__ = ["run_ptx"]

Name = Literal["square_sums", "scale"]


@functools.cache
def _compiled(name: Name, dtype: torch.dtype) -> tuple[str, int]:
    kernel = compile_ahead_of_time(name, 80, dtype)
    return kernel.asm["ptx"], kernel.metadata.shared


def run_ptx(name: Name, tensors: Sequence[Tensor], factor: float = 1.0) -> tuple[Tensor, Report]:
    """Launch a kernel on all of some tensors; the sums of its runs, filled with NaN before, and the report."""
    ptx, shared_bytes = _compiled(name, tensors[0].dtype)
    runs = torch.tensor([-(-tensor.numel() // CHUNK) for tensor in tensors])
    programs = int(runs.sum())
    memory = GlobalMemory()
    gradients = [add_tensor(memory, tensor) for tensor in tensors]
    partial = torch.full((programs,), float("nan"))
    table = [
        torch.tensor([gradient.address for gradient in gradients]),
        torch.tensor([tensor.numel() for tensor in tensors]),
        runs.cumsum(0) - runs,
        torch.repeat_interleave(torch.arange(len(tensors), dtype=torch.int32), runs),
    ]
    values: list[int | float | bytes] = [gradients[0].address]
    values += [add_tensor(memory, row).address for row in table]
    sums = add_tensor(memory, partial)
    values.append(sums.address if name == "square_sums" else float(factor))
    grid = (programs, 1, 1)
    report = launch(parse(ptx), memory, values, grid=grid, threads=32 * WARPS, dynamic_shared_bytes=shared_bytes)
    stored = [sums] if name == "square_sums" else gradients
    assert all((buffer.writes == 1).all() for buffer in stored), "an element was not stored exactly once"
    return partial, report
