"""The kernel itself, in CuTe DSL: ``alpha * A @ B^T + beta * C + diag * I`` for Ampere and Ada tensor cores.

Imported only where nvidia-cutlass-dsl is installed. A thread block computes one tile of the lower triangle:

1. ``cp.async`` brings slices of A and B, ``config.depth`` deep, into a ring of ``config.stages`` places in shared
   memory.
2. ``ldmatrix`` brings fragments into registers, one ahead of ``mma.sync.m16n8k16``, which sums in float32.
3. The sum is scaled, C and the diagonal are added, and the tile is rounded once.
4. The tile is written through shared memory, in whole rows: as it is, then mirrored.

The slice that ``depth`` does not divide comes first: slice 0 starts ``shortfall`` elements before the matrix, and its
part outside is zeros. The loop that follows needs no check along K. Rows beyond M are never read: zeros stand for them.
"""

# The decorators of CuTe DSL carry no types.
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cuda.bindings import driver
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warp

from dmuon_hf.core.ns.backends.cute_config import PADDING, SWIZZLES, Variant
from dmuon_hf.core.ns.backends.cute_rows import RowCopy

__all__ = ["ELEMENT_TYPES", "SyrkKernel", "tile_of"]

ELEMENT_TYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}

# Tile rows that are walked together, column by column, so that their operands stay in the L2 cache.
_BAND = 8


@cute.jit
def _triangle(index: Int32) -> tuple[Int32, Int32]:
    """``(i, j)`` with ``index = i (i + 1) / 2 + j`` and ``j <= i``."""
    # The rounded root is off by one at most.
    i = Int32((cute.math.sqrt(Float32(8 * index + 1), fastmath=True) - 1.0) * 0.5)
    if i * (i + 1) // 2 > index:
        i -= 1
    if (i + 1) * (i + 2) // 2 <= index:
        i += 1
    return i, index - i * (i + 1) // 2


@cute.jit
def tile_of(index: Int32, side: Int32) -> tuple[Int32, Int32]:
    """Row and column of the ``index``-th tile of a triangle with ``side`` tile rows, band after band.

    A band is a rectangle, walked down its columns, and the triangle at its end.
    """
    above, _ = _triangle(index)
    above -= above % _BAND
    height = cutlass.min(Int32(_BAND), side - above)
    rest = index - above * (above + 1) // 2
    row, column = rest % height, rest // height
    if rest >= height * above:
        row, column = _triangle(rest - height * above)
        column += above
    return above + row, column


class SyrkKernel:
    """The kernel for one ``Variant``; ``cute.compile`` takes an instance and example arguments of ``__call__``."""

    def __init__(self, variant: Variant) -> None:
        self.element = ELEMENT_TYPES[variant.dtype]
        self.config = variant.config
        self.load_width = variant.load_width
        self.store_width = variant.store_width
        self.has_c = variant.has_c

    @cute.jit
    def __call__(
        self,
        A: cute.Pointer,
        B: cute.Pointer,
        C: cute.Pointer,
        out: cute.Pointer,
        batch: Int32,
        M: Int32,
        K: Int32,
        alpha: Float32,
        beta: Float32,
        diag: Float32,
        A_batch: Int64,
        A_row: Int64,
        B_batch: Int64,
        B_row: Int64,
        C_batch: Int64,
        C_row: Int64,
        out_batch: Int64,
        out_row: Int64,
        stream: driver.CUstream,
    ) -> None:
        """Launch on ``stream``: one thread block per tile of the lower triangle and matrix of the batch.

        Rows are contiguous; ``X_batch`` and ``X_row`` are the strides of ``X`` in elements. ``C`` is not read unless
        the variant has it.
        """
        side = cute.ceil_div(M, self.config.rows)
        strides = (A_batch, A_row, B_batch, B_row, C_batch, C_row, out_batch, out_row)
        self.kernel(A, B, C, out, M, K, alpha, beta, diag, *strides).launch(
            grid=[side * (side + 1) // 2, batch, 1],
            block=[self.config.threads, 1, 1],
            smem=self.config.shared_bytes,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        A: cute.Pointer,
        B: cute.Pointer,
        C: cute.Pointer,
        out: cute.Pointer,
        M: Int32,
        K: Int32,
        alpha: Float32,
        beta: Float32,
        diag: Float32,
        A_batch: Int64,
        A_row: Int64,
        B_batch: Int64,
        B_row: Int64,
        C_batch: Int64,
        C_row: Int64,
        out_batch: Int64,
        out_row: Int64,
    ) -> None:
        rows = self.config.rows
        thread, _, _ = cute.arch.thread_idx()
        index, batch, _ = cute.arch.block_idx()
        i, j = tile_of(index, cute.ceil_div(M, rows))
        top, left = i * rows, j * rows

        # The same memory for both of its uses: the ring of slices, then the output tile.
        shared = cute.arch.get_dyn_smem(self.element, alignment=128)
        ring = rows * self.config.depth * self.config.stages
        ring_A = cute.make_tensor(shared, self.ring_layout())
        ring_B = cute.make_tensor(shared + ring, self.ring_layout())

        # At least one slice, so that K = 0 is a sum of zeros.
        slices = cutlass.max(cute.ceil_div(K, self.config.depth), Int32(1))
        shortfall = slices * self.config.depth - K
        slices_A = self.slices_of(A, batch * A_batch + top * A_row - shortfall, A_row, slices)
        slices_B = self.slices_of(B, batch * B_batch + left * B_row - shortfall, B_row, slices)

        mma = self.tiled_mma()
        sums = cute.make_rmem_tensor(mma.partition_shape_C((rows, rows)), Float32)
        sums.fill(0.0)
        loads = self.loads_of((slices_A, ring_A, M - top), (slices_B, ring_B, M - left), thread=thread)
        self.fill_ring(loads, slices, shortfall, thread)
        self.multiply(mma, sums, ring_A, ring_B, loads, slices, thread)
        self.drain_ring()

        previous = self.tile_in(C, batch * C_batch + top * C_row + left, C_row)
        below = self.tile_in(out, batch * out_batch + top * out_row + left, out_row)
        above = self.tile_in(out, batch * out_batch + left * out_row + top, out_row)
        extent, scalars = (M - top, M - left), (alpha, beta, diag)
        self.finish(mma, sums, shared, previous, below, above, extent, scalars, i == j, thread)

    # ---- the pipeline

    def ring_layout(self) -> Any:
        """``(rows, depth, stages)``, swizzled: the eight rows that an ``ldmatrix`` reads lie in different banks."""
        rows, depth, stages = self.config.rows, self.config.depth, self.config.stages
        block = cute.make_layout((8, depth), stride=(depth, 1))
        swizzled = cute.make_composed_layout(cute.make_swizzle(SWIZZLES[depth], 3, 3), 0, block)
        return cute.tile_to_shape(swizzled, (rows, depth, stages), (0, 1, 2))

    def slices_of(self, operand: Any, offset: Any, row_stride: Any, slices: Any) -> Any:
        """The ``(rows, depth, slices)`` of an operand that begin at ``offset``."""
        rows, depth = self.config.rows, self.config.depth
        row_stride = cute.assume(row_stride, divby=self.load_width)
        layout = cute.make_layout((rows, depth, slices), stride=(row_stride, 1, depth))
        return cute.make_tensor(operand + cute.assume(offset, divby=self.load_width), layout)

    def loads_of(self, *operands: Any, thread: Any) -> Any:
        """This thread's part of loading the operands: how, from where, to where, and which of its rows exist."""
        rows = RowCopy(self.element, threads=self.config.threads, columns=self.config.depth, width=self.load_width)
        count = self.config.rows // rows.down
        return tuple(
            (rows, rows.partition(slices, thread), rows.partition(ring, thread), rows.exist(count, thread, rows_left))
            for slices, ring, rows_left in operands
        )

    @cute.jit
    def load(self, loads: Any, n: Int32, place: Int32) -> None:
        """Start loading the ``n``-th slice of both operands into a place of the ring."""
        for rows, source, target, exist in loads:
            rows.bring(source[None, None, None, n], target[None, None, None, place], exist)

    @cute.jit
    def fill_ring(self, loads: Any, slices: Int32, shortfall: Int32, thread: Int32) -> None:
        """Start the first ``stages - 1`` loads, each a group of its own, empty where there is no such slice."""
        if loads[0][0].first_column(thread) < shortfall:
            for _, _, target, _ in loads:
                target[None, None, None, 0].fill(0.0)
        else:
            self.load(loads, 0, 0)
        cute.arch.cp_async_commit_group()
        for n in cutlass.range_constexpr(1, self.config.stages - 1):
            if n < slices:
                self.load(loads, n, n)
            cute.arch.cp_async_commit_group()

    def wait_for_slice(self) -> None:
        """Wait until the oldest slice in flight has arrived for all threads, and all are done with the one before."""
        cute.arch.cp_async_wait_group(self.config.stages - 2)
        cute.arch.sync_threads()

    def drain_ring(self) -> None:
        """Wait until nothing writes to the ring any more and nobody reads it: it becomes the output tile."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    # ---- the product

    def tiled_mma(self) -> Any:
        down, across = self.config.warps
        atom = warp.MmaF16BF16Op(self.element, Float32, (16, 8, 16))
        # 16 columns per warp: two products, whose operands one ldmatrix.x4 brings.
        return cute.make_tiled_mma(atom, (down, across, 1), permutation_mnk=(16 * down, 16 * across, 16))

    @cute.jit
    def multiply(self, mma: Any, sums: Any, ring_A: Any, ring_B: Any, loads: Any, slices: Int32, thread: Int32) -> None:
        """Add the products of all slices to ``sums``, loading ``stages - 1`` slices ahead."""
        stages = self.config.stages
        steps = self.config.depth // 16
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(num_matrices=4), self.element)
        copy_A, copy_B = cute.make_tiled_copy_A(atom, mma), cute.make_tiled_copy_B(atom, mma)
        source_A = copy_A.get_slice(thread).partition_S(ring_A)
        source_B = copy_B.get_slice(thread).partition_S(ring_B)
        part_A = mma.make_fragment_A(mma.get_slice(thread).partition_A(ring_A[None, None, 0]))
        part_B = mma.make_fragment_B(mma.get_slice(thread).partition_B(ring_B[None, None, 0]))
        into_A, into_B = copy_A.retile(part_A), copy_B.retile(part_B)

        self.wait_for_slice()
        cute.copy(copy_A, source_A[None, None, 0, 0], into_A[None, None, 0])
        cute.copy(copy_B, source_B[None, None, 0, 0], into_B[None, None, 0])
        reads, writes = Int32(0), Int32(stages - 1)
        for n in cutlass.range(slices, unroll=1):
            for step in cutlass.range_constexpr(steps):
                if cutlass.const_expr(step == steps - 1):
                    self.wait_for_slice()
                    # After the last slice, a fragment of it is fetched again and not multiplied.
                    if n + 1 < slices:
                        reads = (reads + 1) % stages
                ahead = (step + 1) % steps
                cute.copy(copy_A, source_A[None, None, ahead, reads], into_A[None, None, ahead])
                cute.copy(copy_B, source_B[None, None, ahead, reads], into_B[None, None, ahead])
                if cutlass.const_expr(step == 0):
                    # The place of the slice before this one, which all threads have left behind.
                    if n + stages - 1 < slices:
                        self.load(loads, n + stages - 1, writes)
                    cute.arch.cp_async_commit_group()
                    writes = (writes + 1) % stages
                cute.gemm(mma, sums, part_A[None, None, step], part_B[None, None, step], sums)

    # ---- the output

    @cute.jit
    def finish(
        self,
        mma: Any,
        sums: Any,
        shared: Any,
        previous: Any,
        below: Any,
        above: Any,
        extent: Any,
        scalars: Any,
        on_diagonal: Boolean,
        thread: Int32,
    ) -> None:
        """Add the other terms to ``sums``, round, and write the tile ``below`` the diagonal and its mirror ``above``.

        ``extent`` is the part of the tile that lies in the matrix; ``previous`` the tile of ``C``.
        """
        alpha, beta, diag = scalars
        rows = self.config.rows
        tile = cute.make_tensor(shared, cute.make_layout((rows, rows), stride=(rows + PADDING, 1)))
        mirror = cute.make_tensor(shared, cute.make_layout((rows, rows), stride=(1, rows + PADDING)))
        mine = mma.get_slice(thread).partition_C(tile)
        mine_mirrored = mma.get_slice(thread).partition_C(mirror)
        where = mma.get_slice(thread).partition_C(cute.make_identity_tensor((rows, rows)))

        sums.store(alpha * sums.load())
        if cutlass.const_expr(self.has_c):
            self.tile_copy().bring_tile(previous, tile, *extent, thread)
            self.wait_for_tile()
            addend = cute.make_fragment_like(sums, self.element)
            cute.autovec_copy(mine, addend)
            sums.store(sums.load() + beta * addend.load().to(Float32))
        if on_diagonal:
            for n in cutlass.range(cute.size(sums), unroll_full=True):
                sums[n] = sums[n] + (diag if where[n][0] == where[n][1] else Float32(0.0))

        # Each thread replaces the elements of C that it alone has read.
        result = cute.make_fragment_like(sums, self.element)
        result.store(sums.load().to(self.element))
        cute.autovec_copy(result, mine)
        cute.arch.sync_threads()
        if on_diagonal:
            for n in cutlass.range(cute.size(result), unroll_full=True):
                if where[n][0] > where[n][1]:
                    mine_mirrored[n] = result[n]
            cute.arch.sync_threads()
        self.tile_copy().send_tile(tile, below, *extent, thread)
        if not on_diagonal:
            cute.arch.sync_threads()
            cute.autovec_copy(result, mine_mirrored)
            cute.arch.sync_threads()
            self.tile_copy().send_tile(tile, above, extent[1], extent[0], thread)

    def tile_in(self, matrix: Any, offset: Any, row_stride: Any) -> Any:
        """The tile of ``C`` or ``out`` that begins at ``offset``."""
        rows = self.config.rows
        layout = cute.make_layout((rows, rows), stride=(cute.assume(row_stride, divby=self.store_width), 1))
        return cute.make_tensor(matrix + cute.assume(offset, divby=self.store_width), layout)

    def tile_copy(self) -> RowCopy:
        return RowCopy(self.element, threads=self.config.threads, columns=self.config.rows, width=self.store_width)

    def wait_for_tile(self) -> None:
        """Wait until the tile of ``C`` has arrived for all threads."""
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
