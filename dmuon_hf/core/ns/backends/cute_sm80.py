"""Symmetric products in CuTe DSL on tensor cores of SM80, SM86, SM87 and SM89.

``contract`` says what is computed, ``cute_kernel`` how. nvidia-cutlass-dsl is imported by the first call; a kernel is
compiled when its variant is first asked for, which takes seconds, and kept for the process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.backends.contract import SyrkOperands, syrk_operands
from dmuon_hf.core.ns.backends.cute_config import TileConfig, Variant, choose_config, common_width

__all__ = ["Compiled", "compile_ahead_of_time", "launch_arguments", "syrk"]

PACKAGE = "nvidia-cutlass-dsl"
_LEAST_VERSION = (4, 4)
_LEAST_CAPABILITY = (8, 0)
# Of the second dimension of a launch.
_MOST_MATRICES = 65_535

_compiled: dict[tuple[str, Variant], Any] = {}
_lock = threading.Lock()


class Compiled(NamedTuple):
    """A kernel as text and as a binary for one architecture."""

    ptx: str
    cubin: bytes


def syrk(
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    diag: float = 0.0,
    out: Tensor | None = None,
    config: TileConfig | None = None,
) -> Tensor:
    """``alpha * A @ B^T + beta * C + diag * I`` as ``contract`` defines it, on the current stream of their device.

    Deterministic: the same operands and ``config`` give the same bits. ``C`` is not read if ``beta`` is 0. Operands
    whose rows are not contiguous are copied first. Rows that start and end on 16 bytes are fastest, those on 4 bytes
    come next; with odd ``K`` or odd strides every element is loaded by itself, several times slower.

    Raises:
        ConfigurationError: operands that the contract refuses, an ``out`` whose rows are not contiguous, or more than
            65,535 matrices.
        NotImplementedError: nvidia-cutlass-dsl is not installed, or the device is no NVIDIA GPU from SM80 on.
    """
    operands = syrk_operands(A, B, C, out=out)
    capability, multiprocessors = _check_device(A.device)
    operands = _with_contiguous_rows(replace(operands, C=None) if beta == 0 else operands)
    if operands.batch > _MOST_MATRICES:
        raise ConfigurationError(f"syrk: at most {_MOST_MATRICES} matrices at a time; got {operands.batch}.")
    if operands.rows == 0 or operands.batch == 0:
        return operands.result()
    load_width = common_width(operands.A, operands.B)
    if config is None:
        config = choose_config(
            operands.rows,
            operands.batch,
            load_width=load_width,
            capability=capability,
            multiprocessors=multiprocessors,
        )
    variant = Variant(
        dtype=A.dtype,
        config=config,
        load_width=load_width,
        store_width=common_width(operands.out, *(() if operands.C is None else (operands.C,))),
        has_c=operands.C is not None,
    )
    _launch(_architecture(capability), variant, operands, (float(alpha), float(beta), float(diag)))
    return operands.result()


def compile_ahead_of_time(architecture: str, variant: Variant, *, kernel: Any = None) -> Compiled:
    """Compile one variant for an architecture (``"sm_80"``, ``"sm_90a"``, ...) without a GPU.

    Its entry point takes ``A, B, C, out`` (pointers), ``M, K`` (int32), ``alpha, beta, diag`` (float32) and the strides
    ``A_batch, A_row, B_batch, B_row, C_batch, C_row, out_batch, out_row`` (int64, in elements), and expects a grid of
    ``(variant.config.tiles(M), L)`` blocks of ``variant.config.threads``.

    ``kernel`` replaces ``SyrkKernel(variant)``.

    Raises:
        NotImplementedError: nvidia-cutlass-dsl is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="dmuon_hf-cute-") as folder:
        options = f"--gpu-arch {architecture} --keep-ptx --keep-cubin --dump-dir {folder}"
        artifacts = _compile(variant, options, kernel).artifacts
        return Compiled(ptx=artifacts.PTX, cubin=artifacts.CUBIN)


def _kernel(architecture: str, variant: Variant) -> Any:
    key = (architecture, variant)
    with _lock:
        if key not in _compiled:
            _compiled[key] = _compile(variant, f"--gpu-arch {architecture}")
        return _compiled[key]


def _compile(variant: Variant, options: str, kernel: Any = None) -> Any:
    """``cute.compile`` on arguments of which only the types, and the alignment of the pointers, count."""
    modules = _load()
    kernel = kernel or modules.kernel.SyrkKernel(variant)
    return modules.cute.compile(kernel, *_example_arguments(variant), options=options)


def _example_arguments(variant: Variant) -> list[Any]:
    modules = _load()
    element = modules.kernel.ELEMENT_TYPES[variant.dtype]
    pointers = [
        modules.make_ptr(element, 0, modules.cute.AddressSpace.gmem, assumed_align=2 * width)
        for width in (variant.load_width, variant.load_width, variant.store_width, variant.store_width)
    ]
    return [*pointers, 1, 0, 0, 0.0, 0.0, 0.0, *(0,) * 8, modules.driver.CUstream(0)]


def launch_arguments(
    operands: SyrkOperands, scalars: tuple[float, float, float]
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], list[int | float]]:
    """``A, B, C, out``, whose addresses the kernel takes, and the numbers after them.

    ``out`` stands for a ``C`` that is not read.
    """
    C = operands.out if operands.C is None else operands.C
    tensors = (operands.A, operands.B, C, operands.out)
    return tensors, [operands.rows, operands.depth, *scalars, *(stride for x in tensors for stride in _strides(x))]


def _launch(architecture: str, variant: Variant, operands: SyrkOperands, scalars: tuple[float, float, float]) -> None:
    device = operands.A.device
    kernel = _kernel(architecture, variant)
    tensors, numbers = launch_arguments(operands, scalars)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        values = (*(x.data_ptr() for x in tensors), operands.batch, *numbers, stream)
        kernel(*map(_Argument, _KINDS, values))


class _Argument:
    """A number where a compiled function reads it. The compiler's own conversion takes the host six times as long."""

    __slots__ = ("_number", "_pointers")

    def __init__(self, kind: Callable[[Any], Any], value: float) -> None:
        self._number = kind(value)
        self._pointers = [ctypes.addressof(self._number)]

    def __c_pointers__(self) -> list[int]:
        return self._pointers


# Of A, B, C, out; batch, M, K; alpha, beta, diag; the strides; the stream.
_KINDS = (
    *(ctypes.c_void_p,) * 4,
    *(ctypes.c_int32,) * 3,
    *(ctypes.c_float,) * 3,
    *(ctypes.c_int64,) * 8,
    ctypes.c_void_p,
)


def _strides(x: Tensor) -> tuple[int, int]:
    """Of batch and rows; 0 where there is one only, whose stride means nothing and may break the alignment."""
    batch, rows = (stride if size > 1 else 0 for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True))
    return batch, rows


def _with_contiguous_rows(operands: SyrkOperands) -> SyrkOperands:
    if not _has_contiguous_rows(operands.out):
        raise ConfigurationError(
            f"syrk: the rows of out must be contiguous for the 'cute_sm80' kernel; got strides {operands.out.stride()}."
        )
    A = _contiguous(operands.A)
    B = A if operands.gram else _contiguous(operands.B)
    return replace(operands, A=A, B=B, C=None if operands.C is None else _contiguous(operands.C))


def _contiguous(x: Tensor) -> Tensor:
    return x if _has_contiguous_rows(x) else x.contiguous()


def _has_contiguous_rows(x: Tensor) -> bool:
    return x.shape[-1] <= 1 or x.stride(-1) == 1


def _check_device(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    if device.type != "cuda" or torch.version.cuda is None:
        raise NotImplementedError(
            f"The 'cute_sm80' kernel runs on NVIDIA GPUs; the operands are on {device}. Choose kernel='cublas'."
        )
    capability, multiprocessors = _properties(device)
    if capability < _LEAST_CAPABILITY:
        raise NotImplementedError(
            f"The 'cute_sm80' kernel needs an NVIDIA GPU from SM80 on; {device} is SM{capability[0]}{capability[1]}. "
            f"Choose kernel='cublas'."
        )
    return capability, multiprocessors


@functools.cache
def _properties(device: torch.device) -> tuple[tuple[int, int], int]:
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


def _architecture(capability: tuple[int, int]) -> str:
    """The compiler's name of an architecture; from SM90 on with the suffix of code for this one only."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


class _Modules(NamedTuple):
    cute: Any
    make_ptr: Any
    driver: Any
    kernel: Any


@functools.cache
def _load() -> _Modules:
    """Import the compiler and the kernel written for it."""
    advice = f"Install {PACKAGE}>={'.'.join(map(str, _LEAST_VERSION))}, or choose kernel='cublas'."
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise NotImplementedError(
            f"The 'cute_sm80' kernel needs the package {PACKAGE}, which is not installed. {advice}"
        ) from error
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _LEAST_VERSION:
        raise NotImplementedError(f"The 'cute_sm80' kernel does not run with {PACKAGE} {version}. {advice}")
    try:
        from cuda.bindings import driver
        from cutlass import cute
        from cutlass.cute.runtime import make_ptr

        from dmuon_hf.core.ns.backends import cute_kernel
    except Exception as error:
        # Without a driver, or with another Python, the package fails in ways of its own.
        raise NotImplementedError(
            f"The 'cute_sm80' kernel cannot import {PACKAGE} {version}: {error}. {advice}"
        ) from error
    return _Modules(cute, make_ptr, driver, cute_kernel)
