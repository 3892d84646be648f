"""Rows between global and shared memory, in CuTe DSL: which thread copies what, and whether it exists.

Imported only where nvidia-cutlass-dsl is installed.
"""

# The decorators of CuTe DSL carry no types.
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync

__all__ = ["RowCopy"]


class RowCopy:
    """All threads of a block on rows of ``columns`` elements, ``width`` elements a thread, ``down`` rows at a time.

    Row ``r`` and column ``c`` of a tensor are thread ``r % down * across + c // width``'s. ``partition`` gives a thread
    its elements as ``(width, rows / down, 1, ...)``. To be made inside a kernel.
    """

    def __init__(self, element: Any, *, threads: int, columns: int, width: int) -> None:
        self.width = width
        self.across = columns // width
        self.down = threads // self.across
        bits = 16 * width
        self.out_of_shared = cute.make_copy_atom(CopyUniversalOp(), element, num_bits_per_copy=bits)
        self.into_shared = self.out_of_shared
        if width > 1:
            # Whole 16-byte copies bypass the L1 cache. cp.async copies no less than 4 bytes.
            mode = cpasync.LoadCacheMode.GLOBAL if width == 8 else cpasync.LoadCacheMode.ALWAYS
            self.into_shared = cute.make_copy_atom(cpasync.CopyG2SOp(mode), element, num_bits_per_copy=bits)
        places = cute.make_layout((self.down, self.across), stride=(self.across, 1))
        self.tiled = cute.make_tiled_copy_tv(self.into_shared, places, cute.make_layout((1, width)))

    def partition(self, tensor: Any, thread: Any) -> Any:
        return self.tiled.get_slice(thread).partition_S(tensor)

    def first_column(self, thread: Any) -> Any:
        """The first of this thread's columns."""
        return thread % self.across * self.width

    def exist(self, count: int, thread: Any, rows_left: Any) -> Any:
        """For the first ``count`` rows of this thread: which are above row ``rows_left``."""
        exist = cute.make_rmem_tensor((1, count, 1), Boolean)
        for n in range(count):
            exist[0, n, 0] = thread // self.across + n * self.down < rows_left
        return exist

    @cute.jit
    def bring(self, source: Any, target: Any, exist: Any) -> None:
        """Start copying a part to shared memory, and zeros for the rows that do not exist.

        It has arrived when its ``cp.async`` group has. Single elements pass through registers and arrive at once.
        """
        if cutlass.const_expr(self.width == 1):
            passing = cute.make_fragment_like(target)
            passing.fill(0.0)
            cute.copy(self.into_shared, source, passing, pred=exist)
            cute.copy(self.out_of_shared, passing, target)
        else:
            cute.copy(self.into_shared, source, target, pred=exist)

    @cute.jit
    def send(self, source: Any, target: Any, exist: Any) -> None:
        """Copy a part from shared to global memory, only the rows that exist."""
        passing = cute.make_fragment_like(source)
        cute.copy(self.out_of_shared, source, passing)
        cute.copy(self.out_of_shared, passing, target, pred=exist)

    @cute.jit
    def bring_tile(self, tile: Any, target: Any, rows_left: Int32, columns_left: Int32, thread: Int32) -> None:
        """``bring`` the upper left ``(rows_left, columns_left)`` of a tile, and zeros for the rest."""
        rows_left = rows_left if self.first_column(thread) < columns_left else 0
        height, width = self.chunk(tile)
        for n in cutlass.range(tile.shape[0] // height, unroll=1):
            self.bring(
                self.partition(cute.local_tile(tile, (height, width), (n, 0)), thread),
                self.partition(cute.local_tile(target, (height, width), (n, 0)), thread),
                self.exist(height // self.down, thread, rows_left - n * height),
            )

    @cute.jit
    def send_tile(self, tile: Any, target: Any, rows_left: Int32, columns_left: Int32, thread: Int32) -> None:
        """``send`` the upper left ``(rows_left, columns_left)`` of a tile."""
        rows_left = rows_left if self.first_column(thread) < columns_left else 0
        height, width = self.chunk(tile)
        for n in cutlass.range(tile.shape[0] // height, unroll=1):
            self.send(
                self.partition(cute.local_tile(tile, (height, width), (n, 0)), thread),
                self.partition(cute.local_tile(target, (height, width), (n, 0)), thread),
                self.exist(height // self.down, thread, rows_left - n * height),
            )

    def chunk(self, tile: Any) -> tuple[int, int]:
        """The part of a tile that is copied at once: at most eight rows of each thread, for their registers."""
        rows, columns = tile.shape
        return min(rows, 8 * self.down), columns
