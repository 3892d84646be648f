"""The CuTe DSL kernel compiled for sm_80 and run in the PTX interpreter."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import pytest
import torch
from torch import Tensor

from dmuon_hf.core.ns.backends.contract import SyrkOperands, syrk_operands
from dmuon_hf.core.ns.backends.cute_config import TileConfig, Variant
from dmuon_hf.core.ns.backends.cute_sm80 import compile_ahead_of_time, launch_arguments
from tests.kernels.reference import Case
from tests.ptx import GlobalMemory, Kernel, Report, add_tensor, launch, parse

__all__ = ["LARGE", "SMALL", "SMALLEST", "compiled", "interpret", "needs_cutlass", "operands_of", "run_case"]

LARGE = TileConfig(rows=128, depth=32, stages=4)
SMALL = TileConfig(rows=64, depth=32, stages=4)
SMALLEST = TileConfig(rows=32, depth=32, stages=3)

try:
    importlib.metadata.version("nvidia-cutlass-dsl")
except importlib.metadata.PackageNotFoundError:
    _missing = True
else:
    _missing = False
needs_cutlass = pytest.mark.skipif(_missing, reason="nvidia-cutlass-dsl is not installed")


@functools.cache
def compiled(variant: Variant, kernel_class: type[Any] | None = None) -> Kernel:
    """The program of a variant, or of a ``kernel_class`` in place of ``SyrkKernel``."""
    return parse(compile_ahead_of_time("sm_80", variant, kernel=kernel_class and kernel_class(variant)).ptx)


def interpret(kernel: Kernel, variant: Variant, operands: SyrkOperands, scalars: tuple[float, float, float]) -> Report:
    """Launch on every tile and matrix, and assert that each element of ``out`` was stored exactly once."""
    tensors, numbers = launch_arguments(operands, scalars)
    memory = GlobalMemory()
    buffers = {}
    for tensor in tensors:
        if tensor.data_ptr() not in buffers:
            # The same alignment as in this process; more would hide a copy that is too wide.
            buffers[tensor.data_ptr()] = add_tensor(memory, tensor, misalignment=tensor.data_ptr() % 16)
    report = launch(
        kernel,
        memory,
        [*(buffers[tensor.data_ptr()].address for tensor in tensors), *numbers],
        grid=(variant.config.tiles(operands.rows), operands.batch, 1),
        threads=variant.config.threads,
        dynamic_shared_bytes=variant.config.shared_bytes,
    )
    out = buffers[operands.out.data_ptr()]
    assert (out.writes[out.valid] == 1).all(), "an element was not stored exactly once"
    return report


def operands_of(case: Case, out: Tensor | None = None) -> SyrkOperands:
    """The operands of a case, with an ``out`` full of NaN unless one is given."""
    shape = (*case.A.shape[:-1], case.A.shape[-2])
    return syrk_operands(
        case.A, case.B, case.C, out=torch.full(shape, float("nan"), dtype=case.A.dtype) if out is None else out
    )


def run_case(case: Case, variant: Variant, kernel_class: type[Any] | None = None) -> Report:
    """Interpret a variant on a case, assert the result, and give the report."""
    operands = operands_of(case)
    report = interpret(compiled(variant, kernel_class), variant, operands, (case.alpha, case.beta, case.diag))
    case.check(operands.result())
    return report
