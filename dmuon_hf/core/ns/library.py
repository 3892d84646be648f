"""Symmetric products out of ordinary matrix products: whatever library PyTorch calls on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["LibraryKernel", "row_blocks"]


_MOST_BLOCKS = 16
_LEAST_ROWS = 16


@dataclass(frozen=True, slots=True)
class _Overhead:
    """What another block has to be worth, per thread; measured on AVX-512.

    Attributes:
        rows: Least rows of a block: products of fewer rows reach less of the peak rate.
        products: Multiplications that take as long as starting two more products and mirroring.
    """

    rows: int
    products: int


_OVERHEADS = {
    torch.float32: _Overhead(rows=40, products=1 << 20),
    torch.float64: _Overhead(rows=40, products=1 << 20),
    torch.bfloat16: _Overhead(rows=128, products=1 << 25),
}


def row_blocks(rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> int:
    """Into how many row blocks a symmetric product of ``rows x depth`` by ``depth x rows`` is split, 1 if not at all.

    b blocks do ``(b + 1) / 2b`` of the multiplications and cost b overheads, so the time is least at the square root of
    half the ratio of the two.
    """
    if device.type != "cpu" or dtype not in _OVERHEADS:
        return 1
    overhead, threads = _OVERHEADS[dtype], torch.get_num_threads()
    affordable = math.isqrt(rows * rows * depth // (overhead.products * threads))
    return max(1, min(_MOST_BLOCKS, rows // (overhead.rows * threads), affordable))


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """``kernel="cublas"``.

    On a CPU a symmetric product is computed block column by block column from the diagonal block down, and the rest
    mirrored: k blocks do (k + 1) / 2k of the multiplications. On a GPU it is one whole product.

    Attributes:
        blocks: How many blocks on a CPU; ``None`` chooses by ``row_blocks``.
    """

    blocks: int | None = None

    @property
    def name(self) -> str:
        return "cublas"

    def gram(self, X: Tensor) -> Tensor:
        return self.symmetric(X, X.mT)

    def symmetric(
        self,
        A: Tensor,
        B: Tensor,
        C: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        diag: float = 0.0,
    ) -> Tensor:
        blocks = self._count(A.shape[0], A.shape[1], A.dtype, A.device) if A.ndim == 2 else 1
        if blocks > 1:
            product = _blocked(A, B, C, alpha=alpha, beta=beta, blocks=blocks)
        elif C is None:
            product = A @ B
            if alpha != 1.0:
                product.mul_(alpha)
        else:
            product = (torch.addmm if A.ndim == 2 else torch.baddbmm)(C, A, B, beta=beta, alpha=alpha)
        if diag != 0.0:
            product.diagonal(dim1=-2, dim2=-1).add_(diag)
        return product

    def one_by_one(self, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        return self._count(rows, rows, dtype, device) > 1

    def symmetric_share(self, rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> float:
        bounds = _bounds(rows, self._count(rows, depth, dtype, device))
        return sum((stop - start) * (rows - start) for start, stop in pairwise(bounds)) / max(1, rows * rows)

    def _count(self, rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> int:
        if self.blocks is None or device.type != "cpu":
            return row_blocks(rows, depth, dtype, device)
        return max(1, min(self.blocks, rows // _LEAST_ROWS))


def _bounds(rows: int, blocks: int) -> list[int]:
    """Where blocks start, and the end; at multiples of 16 elements, so that vector loads stay aligned."""
    return [rows * block // blocks // 16 * 16 for block in range(blocks)] + [rows]


def _blocked(A: Tensor, B: Tensor, C: Tensor | None, *, alpha: float, beta: float, blocks: int) -> Tensor:
    """Block columns from the diagonal down, each mirrored: so every column of ``B`` is packed for one product only."""
    m = A.shape[0]
    # Rows lie apart by more than their length: at a power of two the mirrored reads would all fall into one cache set.
    out = torch.empty(m, m + 16, dtype=A.dtype, device=A.device)[:, :m]
    for start, stop in pairwise(_bounds(m, blocks)):
        lower = out[start:, start:stop]
        if C is None:
            torch.mm(A[start:], B[:, start:stop], out=lower)
            if alpha != 1.0:
                lower.mul_(alpha)
        else:
            torch.addmm(C[start:, start:stop], A[start:], B[:, start:stop], beta=beta, alpha=alpha, out=lower)
        if stop < m:
            out[start:stop, stop:].copy_(out[stop:, start:stop].mT)
    return out
