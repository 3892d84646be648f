"""Symmetric products in Triton: NVIDIA GPUs from SM80 on, and other vendors that Triton compiles for.

One program computes one tile of the lower triangle and writes it twice, the second time mirrored: half the
multiplications and half the reads of a full product. The epilogue adds ``beta * C`` and the diagonal in float32, so
that nothing is rounded twice. ``contract`` says what exactly is computed.

Triton is imported by the first call. CPU tensors run in Triton's interpreter, if the environment has
``TRITON_INTERPRET=1`` when Triton is first imported.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.backends.contract import DTYPES, SyrkOperands, syrk_operands
from dmuon_hf.core.triton_compiler import TYPE_NAMES, import_triton, target_of

if TYPE_CHECKING:
    import triton.language as tl

__all__ = ["TileConfig", "choose_config", "compile_ahead_of_time", "syrk"]

_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How the work is cut: tiles of ``rows x rows``, the long side in steps of ``depth``.

    ``stages`` steps are in flight in shared memory, ``4 * rows * depth`` bytes each; ``warps`` share one tile.
    """

    rows: int = 128
    depth: int = 64
    stages: int = 3
    warps: int = 8

    def __post_init__(self) -> None:
        for name, value, least in (("rows", self.rows, 16), ("depth", self.depth, 16), ("warps", self.warps, 1)):
            if value < least or value & (value - 1):
                raise ConfigurationError(f"TileConfig: {name} must be a power of two from {least} on; got {value}.")
        if self.stages < 1:
            raise ConfigurationError(f"TileConfig: stages must be at least 1; got {self.stages}.")

    def tiles(self, M: int) -> int:
        """Tiles of the lower triangle of an ``M x M`` matrix."""
        side = -(-M // self.rows)
        return side * (side + 1) // 2


# Each with its rate relative to the first: smaller tiles use less often what they load. Estimates, not measurements.
# Three stages of the largest take 96 KiB: within the 99 KiB of a program on SM86, SM89 and SM120.
_CONFIGS = {
    TileConfig(): 1.0,
    TileConfig(rows=64, depth=64, stages=3, warps=4): 0.75,
    TileConfig(rows=32, depth=64, stages=3, warps=4): 0.35,
}


def choose_config(M: int, batch: int = 1, *, multiprocessors: int = 108) -> TileConfig:
    """The tiles with which the busiest multiprocessor is done first; on equal GPUs the same for the same shape."""

    def time(config: TileConfig) -> float:
        share = -(-config.tiles(M) * batch // multiprocessors)
        return share * config.rows**2 / _CONFIGS[config]

    return min(_CONFIGS, key=time)


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
    """``alpha * A @ B^T + beta * C + diag * I`` as ``contract`` defines it, on the current stream of ``A.device``.

    Deterministic: the same operands and ``config`` give the same bits. The first call of a kind compiles for seconds.

    Raises:
        ConfigurationError: operands that the contract refuses.
        NotImplementedError: Triton is not installed, or does not run on this device.
    """
    operands = syrk_operands(A, B, None if beta == 0 else C, out=out)
    _check_device(A.device)
    if config is None:
        config = choose_config(operands.rows, operands.batch, multiprocessors=_multiprocessors(A.device))
    grid = (config.tiles(operands.rows) * operands.batch,)
    if grid[0]:
        launch = functools.partial(_launch, operands, grid, config, (float(alpha), float(beta), float(diag)))
        if A.device.type == "cpu":
            launch()
        else:
            with torch.accelerator.device_index(A.device.index):
                launch()
    return operands.result()


def _launch(operands: SyrkOperands, grid: tuple[int], config: TileConfig, scalars: tuple[float, float, float]) -> None:
    A, B, C, out = operands.A, operands.B, operands.C, operands.out
    unread = out if C is None else C
    _compiled_on_demand()[grid](
        *(A, B, unread, out, operands.rows, operands.depth, *scalars),
        *(*A.stride(), *B.stride(), *unread.stride(), *out.stride()),
        HAS_C=C is not None,
        TILE=config.rows,
        DEPTH=config.depth,
        num_warps=config.warps,
        num_stages=config.stages,
    )


# Its parameters have no types in Python: Triton infers them.
def _syrk_kernel(  # type: ignore[no-untyped-def]
    a_pointer,
    b_pointer,
    c_pointer,
    out_pointer,
    M,
    K,
    alpha,
    beta,
    diag,
    a_batch,
    a_row,
    a_depth,
    b_batch,
    b_row,
    b_depth,
    c_batch,
    c_row,
    c_column,
    out_batch,
    out_row,
    out_column,
    HAS_C: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile. Program ``p`` of a matrix has the tile ``(i, j)`` with ``p = i (i + 1) / 2 + j`` and ``j <= i``."""
    side = tl.cdiv(M, TILE)
    tiles = side * (side + 1) // 2
    program = tl.program_id(0)
    batch = (program // tiles).to(tl.int64)
    tile = program % tiles
    # The rounded root is off by one at most.
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2

    row = i * TILE + tl.arange(0, TILE)
    column = j * TILE + tl.arange(0, TILE)
    step = tl.arange(0, DEPTH)
    row_inside = row < M
    column_inside = column < M
    # 64-bit offsets: a stride times a row may pass 2^31.
    wide_row = row.to(tl.int64)
    wide_column = column.to(tl.int64)

    a_tile = a_pointer + batch * a_batch + wide_row[:, None] * a_row + step[None, :] * a_depth
    b_tile = b_pointer + batch * b_batch + wide_column[None, :] * b_row + step[:, None] * b_depth
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        step_inside = start + step < K
        left = tl.load(a_tile, mask=row_inside[:, None] & step_inside[None, :], other=0.0)
        right = tl.load(b_tile, mask=step_inside[:, None] & column_inside[None, :], other=0.0)
        total = tl.dot(left, right, total)
        a_tile += DEPTH * a_depth
        b_tile += DEPTH * b_depth

    inside = row_inside[:, None] & column_inside[None, :]
    total *= alpha
    if HAS_C:
        c_tile = c_pointer + batch * c_batch + wide_row[:, None] * c_row + wide_column[None, :] * c_column
        total += beta * tl.load(c_tile, mask=inside, other=0.0).to(tl.float32)
    total = tl.where(row[:, None] == column[None, :], total + diag, total)

    result = total.to(out_pointer.dtype.element_ty)
    mirrored = tl.trans(result)
    out = out_pointer + batch * out_batch
    out_tile = out + wide_row[:, None] * out_row + wide_column[None, :] * out_column
    mirrored_tile = out + wide_column[:, None] * out_row + wide_row[None, :] * out_column
    mirrored_inside = column_inside[:, None] & row_inside[None, :]
    # A mask that differs between neighbours makes every store a scalar one: only diagonal tiles have to pay for it.
    # There the strict upper half comes from the lower one, so that each element is written once.
    if i == j:
        tl.store(out_tile, result, mask=inside & (row[:, None] >= column[None, :]))
        tl.store(mirrored_tile, mirrored, mask=mirrored_inside & (column[:, None] < row[None, :]))
    else:
        tl.store(out_tile, result, mask=inside)
        tl.store(mirrored_tile, mirrored, mask=mirrored_inside)


def compile_ahead_of_time(
    architecture: int | str,
    dtype: torch.dtype,
    config: TileConfig | None = None,
    *,
    has_C: bool = True,
    aligned: bool = True,
    row_major: bool = True,
) -> Any:
    """Compile one variant without a GPU, for an architecture of NVIDIA (80, 86, 90, ...) or AMD (``"gfx942"``, ...).

    ``aligned`` promises 16-byte aligned pointers and ``K`` and row strides in multiples of 16, as the first launch
    finds out by itself. ``row_major=False`` is for operands that are transposed views.

    Returns:
        Triton's ``CompiledKernel``: ``asm["ptx"]`` (text) and ``asm["cubin"]`` (bytes), or ``asm["amdgcn"]`` and
        ``asm["hsaco"]``; ``metadata.shared`` (bytes).
        Its parameters are ``A, B, C, out, M, K, alpha, beta, diag`` and the strides of each operand but those known to
        be 1: of ``out``, ``C`` and row-major ``A``, ``B`` batch and row; of others batch and depth.

    Raises:
        ConfigurationError: a dtype that the contract refuses.
        NotImplementedError: Triton is not installed.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"syrk: the dtype must be float16 or bfloat16; got {dtype}.")
    config = config or TileConfig()
    triton = _triton()
    kernel = triton.JITFunction(_syrk_kernel)
    unit, apart = ("depth", "row") if row_major else ("row", "depth")
    constants = {"HAS_C": has_C, "TILE": config.rows, "DEPTH": config.depth}
    constants |= {f"a_{unit}": 1, f"b_{unit}": 1, "c_column": 1, "out_column": 1}
    divisible = {"a_pointer", "b_pointer", "c_pointer", "out_pointer", "K", "M"}
    divisible |= {f"{operand}_{stride}" for operand in "ab" for stride in ("batch", apart)}
    divisible |= {f"{operand}_{stride}" for operand in ("c", "out") for stride in ("batch", "row")}
    signature = {name: _parameter_type(name, dtype, constants) for name in kernel.arg_names}
    attributes = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(n,): attributes for n, name in enumerate(kernel.arg_names) if aligned and name in divisible},
    )
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return triton.compile(source, target=target_of(triton, architecture), options=options)


def _parameter_type(name: str, dtype: torch.dtype, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name.endswith("_pointer"):
        return f"*{TYPE_NAMES[dtype]}"
    if name in ("alpha", "beta", "diag"):
        return "fp32"
    return "i32" if name in ("M", "K") else "i64"


@functools.cache
def _triton() -> Any:
    triton = import_triton("The 'triton' kernel", "choose kernel='cublas'")
    # The source of the kernel refers to the language by this name; its compiler looks among the globals.
    globals()["tl"] = triton.language
    return triton


@functools.cache
def _compiled_on_demand() -> Any:
    return _triton().jit(_syrk_kernel)


def _check_device(device: torch.device) -> None:
    triton = _triton()
    if device.type == "cpu":
        if not triton.knobs.runtime.interpret:
            raise NotImplementedError(
                "The 'triton' kernel runs CPU tensors only in Triton's interpreter, for tests: set TRITON_INTERPRET=1 "
                "before the first import of triton, or choose kernel='cublas'."
            )
    elif device.type == "cuda" and torch.version.cuda is not None:
        capability = _properties(device)[0]
        if capability < _LEAST_CAPABILITY:
            raise NotImplementedError(
                f"The 'triton' kernel needs an NVIDIA GPU from SM80 on; {device} is SM{capability[0]}{capability[1]}. "
                f"Choose kernel='cublas'."
            )


def _multiprocessors(device: torch.device) -> int:
    return 1 if device.type == "cpu" else _properties(device)[1]


@functools.cache
def _properties(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors of a GPU."""
    properties = torch.get_device_module(device).get_device_properties(device)
    capability = (getattr(properties, "major", 0), getattr(properties, "minor", 0))
    return capability, properties.multi_processor_count
