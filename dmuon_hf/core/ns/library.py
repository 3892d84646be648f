"""Symmetric products out of ordinary matrix products: whatever library PyTorch calls on the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["LibraryKernel", "row_blocks"]


_MOST_BLOCKS = 8
# Below this many rows per block and thread, starting more and smaller products costs more than is saved (measured with
# one and two threads of AVX-512).
_LEAST_ROWS = {torch.float32: 80, torch.float64: 80, torch.bfloat16: 160}


def row_blocks(rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """Into how many row blocks a symmetric product of ``rows`` rows is split; 1 means one whole product."""
    if device.type != "cpu" or dtype not in _LEAST_ROWS:
        return 1
    return max(1, min(_MOST_BLOCKS, rows // (_LEAST_ROWS[dtype] * torch.get_num_threads())))


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """``kernel="cublas"``.

    On a CPU a symmetric product is computed block row by block row up to the diagonal block, and the rest mirrored: k
    blocks do (k + 1) / 2k of the multiplications. On a GPU it is one whole product.
    """

    @property
    def name(self) -> str:
        return "cublas"

    def symmetric(
        self, A: Tensor, B: Tensor, C: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        blocks = row_blocks(A.shape[-2], A.dtype, A.device) if A.ndim == 2 else 1
        if blocks > 1:
            return _blocked(A, B, C, alpha=alpha, beta=beta, blocks=blocks)
        if C is None:
            product = A @ B
            return product if alpha == 1.0 else product.mul_(alpha)
        return (torch.addmm if A.ndim == 2 else torch.baddbmm)(C, A, B, beta=beta, alpha=alpha)

    def one_by_one(self, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        return row_blocks(rows, dtype, device) > 1

    def symmetric_share(self, rows: int, dtype: torch.dtype, device: torch.device) -> float:
        blocks = row_blocks(rows, dtype, device)
        return (blocks + 1) / (2 * blocks)


def _blocked(A: Tensor, B: Tensor, C: Tensor | None, *, alpha: float, beta: float, blocks: int) -> Tensor:
    m = A.shape[0]
    # Rows lie apart by more than their length: at a power of two the mirrored reads would all fall into one cache set.
    out = torch.empty(m, m + 16, dtype=A.dtype, device=A.device)[:, :m]
    # Blocks start at multiples of 16 elements: vector loads stay aligned.
    bounds = [m * block // blocks // 16 * 16 for block in range(blocks)] + [m]
    for start, stop in pairwise(bounds):
        lower = out[start:stop, :stop]
        if C is None:
            torch.mm(A[start:stop], B[:, :stop], out=lower)
            if alpha != 1.0:
                lower.mul_(alpha)
        else:
            torch.addmm(C[start:stop, :stop], A[start:stop], B[:, :stop], beta=beta, alpha=alpha, out=lower)
        if start:
            out[:start, start:stop].copy_(lower[:, :start].mT)
    return out
