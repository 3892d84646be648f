"""Newton-Schulz on the matrix itself."""

from __future__ import annotations

import torch
from torch import Tensor

from dmuon_hf.core.ns.coefficients import Coefficients, Row, rows_of_call
from dmuon_hf.core.ns.inputs import DEFAULT_EPS, is_tall
from dmuon_hf.core.ns.iteration import orthogonalize
from dmuon_hf.core.ns.kernels import Kernel, resolve_kernel

__all__ = ["direct_newton_schulz", "iterate_direct"]


def direct_newton_schulz(
    G: Tensor,
    steps: int = 5,
    eps: float = DEFAULT_EPS,
    coefficients: Coefficients | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Orthogonalise ``G`` by the classic iteration ``X <- a X + b (X X^T) X + c (X X^T)^2 X``.

    Every step costs two products with the long side; ``gram_newton_schulz`` is cheaper for elongated matrices. Local
    to the caller: no collective. ``G`` is not changed.

    Args:
        G: ``(m, n)`` or a batch ``(B, m, n)``; float16, bfloat16, float32 or float64.
        steps: Iterations when no ``coefficients`` are given: rows of the default table, the last one repeated beyond
            its end. A table that is given says itself how many there are.
        eps: Added to the norm of ``G`` after its largest entry was scaled to between 1 and 2.
        coefficients: ``(a, b, c)`` per step, each run once; ``None`` means ``DEFAULT_COEFFICIENTS``.
        dtype: What to iterate in. ``None``: float16 on accelerators; on a CPU float32, or bfloat16 for bfloat16 input
            where the CPU multiplies it natively; always float64 for float64 input. float16 on a CPU works and is very
            slow.

    Returns:
        A new tensor of the shape and dtype of ``G``. Zero matrices give exactly zero; a non-finite entry makes its
        matrix non-finite.

    Raises:
        ConfigurationError: an argument outside the above.
    """
    rows, kernel = rows_of_call(coefficients, steps), resolve_kernel()
    return orthogonalize(G, lambda X: iterate_direct(X, rows, kernel), eps=eps, dtype=dtype, kernel=kernel)


def iterate_direct(X: Tensor, rows: tuple[Row, ...], kernel: Kernel) -> Tensor:
    """Run ``rows`` on normalised ``X``, ``(m, n)`` or ``(B, m, n)``, in the dtype of ``X``."""
    tall = is_tall(X)
    fused = torch.addmm if X.ndim == 2 else torch.baddbmm
    for a, b, c in rows:
        R = kernel.gram(X.mT if tall else X)
        Z = kernel.symmetric(R, R, R, alpha=c, beta=b)
        X = fused(X, X, Z, beta=a) if tall else fused(X, Z, X, beta=a)
    return X
