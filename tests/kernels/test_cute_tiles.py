"""The order of the tiles, computed by the kernel's own function on the CPU."""

from __future__ import annotations

import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
cute = pytest.importorskip("cutlass.cute", reason="nvidia-cutlass-dsl is not installed")

from cutlass import Int32  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from dmuon_hf.core.ns.backends.cute_kernel import tile_of  # noqa: E402


@cute.jit
def _walk(first: Int32, count: Int32, side: Int32, out: cute.Tensor):
    for n in cutlass.range(count):
        row, column = tile_of(first + n, side)
        out[n, 0] = row
        out[n, 1] = column


def tiles(side: int, first: int = 0, count: int | None = None) -> list[tuple[int, int]]:
    out = torch.zeros(side * (side + 1) // 2 if count is None else count, 2, dtype=torch.int32)
    _walk(first, out.shape[0], side, from_dlpack(out))
    return [(row, column) for row, column in out.tolist()]


@pytest.mark.parametrize("side", [1, 7, 8, 9, 16, 67])
def test_every_tile_of_the_lower_triangle_comes_once(side: int) -> None:
    assert sorted(tiles(side)) == [(row, column) for row in range(side) for column in range(row + 1)]


def test_last_tiles_of_a_very_large_matrix_are_right() -> None:
    """Where a float32 root is no longer exact."""
    side = 20_001
    last = tiles(side, first=side * (side + 1) // 2 - 3 * side, count=3 * side)
    assert len(set(last)) == 3 * side
    assert all(0 <= column <= row < side for row, column in last)
    assert last[-1] == (side - 1, side - 1)


def test_tiles_that_run_together_share_their_columns() -> None:
    """Of 64 tiles in a row of the plain order, all columns differ; in a band of eight rows, eight are enough."""
    side = 64
    together = tiles(side)[-8 * 56 : -8 * 48]
    assert len({column for _, column in together}) <= 9
