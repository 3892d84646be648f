"""Launch a kernel on torch tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from tests.ptx.cta import run_cta
from tests.ptx.errors import PtxError
from tests.ptx.memory import Buffer, GlobalMemory
from tests.ptx.parser import Kernel
from tests.ptx.shared import Report

__all__ = ["add_tensor", "launch", "pack"]


def add_tensor(memory: GlobalMemory, tensor: Tensor, *, misalignment: int = 0) -> Buffer:
    """Make the elements of ``tensor`` accessible, and of its storage nothing between or around them.

    The address of the result is that of the first element.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span = span if tensor.numel() else 0
    flat = torch.as_strided(tensor, (span,), (1,), tensor.storage_offset())
    member = torch.zeros(span, dtype=torch.bool)
    torch.as_strided(member, tensor.shape, tensor.stride(), 0).fill_(True)
    valid = np.repeat(member.numpy(), tensor.element_size())
    return memory.add(flat.view(torch.uint8).numpy(), valid=valid, misalignment=misalignment)


def pack(kernel: Kernel, values: Sequence[int | float | bytes]) -> dict[str, bytes]:
    """The bytes of each parameter; a missing tail of 8-byte parameters is zero (scratch pointers of Triton)."""
    names = list(kernel.parameters)
    if len(values) > len(names):
        raise PtxError(f"{kernel.name} has {len(names)} parameters, not {len(values)}")
    packed = {}
    for name, value in zip(names, [*values, *[0] * (len(names) - len(values))], strict=True):
        size = kernel.parameters[name]
        if isinstance(value, float):
            value = struct.pack("<f" if size == 4 else "<d", value)
        elif isinstance(value, int):
            value = value.to_bytes(size, "little", signed=value < 0)
        if len(value) != size:
            raise PtxError(f"parameter {name} has {size} bytes, not {len(value)}")
        packed[name] = value
    return packed


def launch(
    kernel: Kernel,
    memory: GlobalMemory,
    values: Sequence[int | float | bytes],
    *,
    grid: tuple[int, int, int],
    threads: int,
    dynamic_shared_bytes: int = 0,
    blocks: Iterable[tuple[int, int, int]] | None = None,
) -> Report:
    """Run all CTAs of ``grid``, or those in ``blocks``, one after the other, each of ``threads`` threads in one row."""
    report = Report()
    parameters = pack(kernel, values)
    if blocks is None:
        blocks = ((x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0]))
    shared_bytes = kernel.static_shared_bytes + dynamic_shared_bytes
    for block in blocks:
        run_cta(
            kernel,
            memory,
            parameters,
            threads=threads,
            block=block,
            grid=grid,
            shared_bytes=shared_bytes,
            report=report,
        )
    return report
