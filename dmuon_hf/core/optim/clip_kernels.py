"""Sums of squares and scaling of many gradients in one launch each: what clipping costs on a GPU, in Triton.

torch's multi-tensor kernels take a few hundred tensors in a launch; these take any number, by a table of their
addresses. Each program has a run of ``CHUNK`` elements of one tensor. Sums of runs are added up by torch in the order
of the table, without atomics, so that the same gradients give the same bits.

Triton is imported by the first call. CPU tensors run in Triton's interpreter, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from dmuon_hf.core.device import host_to_device
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.triton_compiler import TYPE_NAMES, import_triton, target_of

if TYPE_CHECKING:
    import triton.language as tl

__all__ = ["CHUNK", "WARPS", "compile_ahead_of_time", "is_taken", "runs_on", "scale_in_place_", "sum_of_squares"]

CHUNK: Final = 1 << 14
WARPS: Final = 4
_BLOCK: Final = 1 << 10
_ALIGNMENT: Final = 16
_LEAST_CAPABILITY: Final = (8, 0)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels are for this device: an NVIDIA GPU from SM80 on, where Triton is installed."""
    return device.type == "cuda" and torch.version.cuda is not None and _is_capable(device)


def is_taken(tensor: Tensor) -> bool:
    """Whether the kernels take this tensor: contiguous, aligned, of 16 or 32 bits."""
    dense = tensor.layout is torch.strided and tensor.is_contiguous()
    return dense and tensor.dtype in TYPE_NAMES and tensor.data_ptr() % _ALIGNMENT == 0


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """``sum x^2`` over all elements: fp64 scalar on their device. Runs are summed in fp32. Does not synchronise.

    Args:
        tensors: Of one device and dtype, each taken (:func:`is_taken`).
    """
    table, owner, programs = _table(tensors)
    partial = torch.empty(programs, dtype=torch.float32, device=tensors[0].device)
    if programs:
        _launch("square_sums", tensors[0], programs, (*table, owner, partial))
    return partial.sum(dtype=torch.float64)


def scale_in_place_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply every element by ``factor``, in fp32. Does not synchronise; tensors as for :func:`sum_of_squares`."""
    table, owner, programs = _table(tensors)
    if programs:
        _launch("scale", tensors[0], programs, (*table, owner, float(factor)))


def _table(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor, int]:
    """Addresses, lengths and first programs of the tensors, and whose run each program has; on their device."""
    lengths = [tensor.numel() for tensor in tensors]
    runs = [-(-length // CHUNK) for length in lengths]
    first = [0]
    for count in runs:
        first.append(first[-1] + count)
    device = tensors[0].device
    rows = torch.tensor([[tensor.data_ptr() for tensor in tensors], lengths, first[:-1], runs], dtype=torch.int64)
    addresses, numels, starts, counts = host_to_device(rows, device).unbind()
    index = torch.arange(len(tensors), dtype=torch.int32, device=device)
    owner = torch.repeat_interleave(index, counts, output_size=first[-1])
    return (addresses, numels, starts), owner, first[-1]


def _launch(name: Literal["square_sums", "scale"], like: Tensor, programs: int, arguments: tuple[Any, ...]) -> None:
    kernel = _compiled_on_demand(name)

    def launch() -> None:
        kernel[(programs,)](like, *arguments, CHUNK=CHUNK, BLOCK=_BLOCK, num_warps=WARPS)

    if like.device.type == "cpu":
        launch()
    else:
        with torch.accelerator.device_index(like.device.index):
            launch()


# Their parameters have no types in Python: Triton infers them. `like` is any of the tensors, for the type of all.
def _square_sums(  # type: ignore[no-untyped-def]
    like, addresses, numels, starts, owner, partial, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of squares of one run."""
    program = tl.program_id(0)
    tensor = tl.load(owner + program)
    start = (program - tl.load(starts + tensor)) * CHUNK
    numel = tl.load(numels + tensor)
    values = tl.multiple_of(tl.load(addresses + tensor).to(like.dtype), 16)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # A mask would make every load a scalar one: only the last run of a tensor has to pay for it.
    if start + CHUNK <= numel:
        for offset in range(0, CHUNK, BLOCK):
            value = tl.load(values + start + offset + lane).to(tl.float32)
            total += value * value
    else:
        for offset in range(0, CHUNK, BLOCK):
            place = start + offset + lane
            value = tl.load(values + place, mask=place < numel, other=0.0).to(tl.float32)
            total += value * value
    tl.store(partial + program, tl.sum(total, axis=0))


def _scale(  # type: ignore[no-untyped-def]
    like, addresses, numels, starts, owner, factor, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """One run, scaled in place."""
    program = tl.program_id(0)
    tensor = tl.load(owner + program)
    start = (program - tl.load(starts + tensor)) * CHUNK
    numel = tl.load(numels + tensor)
    values = tl.multiple_of(tl.load(addresses + tensor).to(like.dtype), 16)
    lane = tl.arange(0, BLOCK)
    if start + CHUNK <= numel:
        for offset in range(0, CHUNK, BLOCK):
            place = values + start + offset + lane
            tl.store(place, (tl.load(place).to(tl.float32) * factor).to(like.dtype.element_ty))
    else:
        for offset in range(0, CHUNK, BLOCK):
            place = start + offset + lane
            value = tl.load(values + place, mask=place < numel, other=0.0).to(tl.float32)
            tl.store(values + place, (value * factor).to(like.dtype.element_ty), mask=place < numel)


_KERNELS: Final = {"square_sums": _square_sums, "scale": _scale}


def compile_ahead_of_time(name: Literal["square_sums", "scale"], architecture: int | str, dtype: torch.dtype) -> Any:
    """Compile one kernel without a GPU, for an architecture of NVIDIA (80, 86, 90, ...) or AMD (``"gfx942"``, ...).

    Returns:
        Triton's ``CompiledKernel``. Its parameters are ``like, addresses, numels, starts, owner`` and ``partial``, or
        the factor in fp32.

    Raises:
        ConfigurationError: A dtype that the kernels do not take.
        NotImplementedError: Triton is not installed.
    """
    if dtype not in TYPE_NAMES:
        raise ConfigurationError(f"gradients are clipped by a kernel in {', '.join(map(str, TYPE_NAMES))}; got {dtype}")
    triton = _triton()
    kernel = triton.JITFunction(_KERNELS[name])
    types = {"like": f"*{TYPE_NAMES[dtype]}", "owner": "*i32", "partial": "*fp32", "factor": "fp32"}
    constants = {"CHUNK": CHUNK, "BLOCK": _BLOCK}
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "*i64") for arg in kernel.arg_names}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=target_of(triton, architecture), options={"num_warps": WARPS})


@functools.cache
def _triton() -> Any:
    triton = import_triton("clipping by a kernel", "leave it to torch's multi-tensor kernels")
    # The sources of the kernels refer to the language by this name; their compiler looks among the globals.
    globals()["tl"] = triton.language
    return triton


@functools.cache
def _compiled_on_demand(name: Literal["square_sums", "scale"]) -> Any:
    return _triton().jit(_KERNELS[name])


@functools.cache
def _is_capable(device: torch.device) -> bool:
    try:
        _triton()
    except NotImplementedError:
        return False
    properties = torch.get_device_module(device).get_device_properties(device)
    return (properties.major, properties.minor) >= _LEAST_CAPABILITY
