"""The frame around an iteration: checks, normalisation, batches, dtypes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dmuon_hf.core.ns.inputs import check_eps, check_matrix, compute_dtype, normalizer, supported_dtype
from dmuon_hf.core.ns.kernels import Kernel

__all__ = ["orthogonalize"]


@torch.no_grad()
def orthogonalize(
    G: Tensor,
    iterate: Callable[[Tensor], Tensor],
    *,
    eps: float,
    dtype: torch.dtype | None,
    kernel: Kernel,
) -> Tensor:
    """Normalise ``G``, ``(m, n)`` or ``(B, m, n)``, hand it to ``iterate`` in the dtype to compute in, and cast back.

    A batch goes to ``iterate`` as one tensor, or matrix by matrix where ``kernel`` is faster that way.
    """
    check_matrix(G)
    check_eps(eps)
    compute = compute_dtype(G, supported_dtype(dtype))
    if G.numel() == 0:
        return torch.empty_like(G)
    if G.ndim == 3 and (len(G) == 1 or kernel.one_by_one(min(G.shape[1:]), compute, G.device)):
        out = torch.empty(G.shape, dtype=G.dtype, device=G.device)
        for matrix, result in zip(G, out, strict=True):
            result.copy_(iterate(normalizer(matrix, eps, compute)[0]))
        return out
    return iterate(normalizer(G, eps, compute)[0]).to(G.dtype)
