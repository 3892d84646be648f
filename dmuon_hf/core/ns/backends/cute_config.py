"""What the CuTe DSL kernel is compiled for: tile sizes, dtype and alignment, as values that name no compiler."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.backends.contract import DTYPES

__all__ = ["WIDTHS", "TileConfig", "Variant", "choose_config", "common_width"]

# Elements of one copy between global and shared memory: 16 bytes, 4 bytes (the least that cp.async takes), 2 bytes.
WIDTHS = (8, 2, 1)
# Bits of the exclusive-or that spreads the 16-byte chunks of a row of ``depth`` elements over the banks.
SWIZZLES = {32: 2, 64: 3}
# Elements between the rows of the output tile in shared memory: neither its rows nor its columns share banks.
PADDING = 8
_WARPS = (2, 2)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How the work is cut: tiles of ``rows x rows`` by four warps, the long side in steps of ``depth``.

    ``stages`` steps have a place in shared memory, ``4 * rows * depth`` bytes each: one is multiplied while the others
    arrive.
    """

    rows: int = 128
    depth: int = 32
    stages: int = 3

    def __post_init__(self) -> None:
        if self.rows not in (32, 64, 128):
            raise ConfigurationError(f"TileConfig: rows must be 32, 64 or 128; got {self.rows}.")
        if self.depth not in SWIZZLES:
            raise ConfigurationError(f"TileConfig: depth must be 32 or 64; got {self.depth}.")
        if self.stages < 2:
            raise ConfigurationError(f"TileConfig: stages must be at least 2; got {self.stages}.")

    @property
    def warps(self) -> tuple[int, int]:
        """Warps along the rows and along the columns of a tile."""
        return _WARPS

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a tile: the operands, later the result."""
        return 2 * max(2 * self.rows * self.depth * self.stages, self.rows * (self.rows + PADDING))

    def tiles(self, M: int) -> int:
        """Tiles of the lower triangle of an ``M x M`` matrix."""
        side = -(-M // self.rows)
        return side * (side + 1) // 2


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel, apart from the architecture.

    Attributes:
        load_width: Elements of one copy of ``A`` and ``B``: their addresses, strides and ``K`` are multiples of it.
        store_width: The same for ``out`` and ``C``, whose rows are ``M`` long.
        has_c: Whether there is a term ``beta * C``.
    """

    dtype: torch.dtype
    config: TileConfig
    load_width: int = 8
    store_width: int = 8
    has_c: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"syrk: the dtype must be float16 or bfloat16; got {self.dtype}.")
        for width in (self.load_width, self.store_width):
            if width not in WIDTHS:
                raise ConfigurationError(f"Variant: a width must be one of {WIDTHS}; got {width}.")


def choose_config(
    M: int,
    batch: int = 1,
    *,
    load_width: int = 8,
    capability: tuple[int, int] = (8, 0),
    multiprocessors: int = 108,
) -> TileConfig:
    """The largest tiles that still give every multiprocessor one; a function of the shape, the same on equal GPUs.

    Where a multiprocessor has 164 KiB of shared memory or more, two tiles of 128 rows fit with four stages each; the
    100 KiB of SM86, SM89 and SM12x take three. Single elements are loaded through registers, which sums of 128 rows
    leave no room for.
    """
    large = TileConfig(rows=128, depth=32, stages=3 if _has_100_kib(capability) else 4)
    if load_width > 1 and large.tiles(M) * batch >= multiprocessors:
        return large
    return TileConfig(rows=64, depth=32, stages=4)


def _has_100_kib(capability: tuple[int, int]) -> bool:
    return capability in ((8, 6), (8, 9)) or capability[0] == 12


def common_width(*tensors: Tensor) -> int:
    """The widest copy that every row of all tensors, ``(L, rows, columns)``, starts and ends on a multiple of."""
    for width in WIDTHS:
        if all(_divides(width, x) for x in tensors):
            return width
    raise AssertionError("a tensor is aligned to its elements")


def _divides(width: int, x: Tensor) -> bool:
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return x.data_ptr() % (width * x.element_size()) == 0 and all(n % width == 0 for n in (x.shape[-1], *steps))
