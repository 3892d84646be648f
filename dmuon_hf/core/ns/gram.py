"""Newton-Schulz on the Gram matrix of the short side.

With ``R = X X^T`` one step maps ``X`` to ``P X``, ``P = a I + b R + c R^2``, and ``R`` to ``P R P``. So the steps
between two restarts need only products of the short side: their factors ``P`` are multiplied up in ``Q``, and ``X``
is touched once at the end. All these matrices are polynomials in one ``R``: they commute and every product of them is
symmetric.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon_hf.core.ns.coefficients import Coefficients, Row, rows_of_call
from dmuon_hf.core.ns.inputs import (
    DEFAULT_EPS,
    check_eps,
    check_matrix,
    compute_dtype,
    is_tall,
    normalizer,
    supported_dtype,
)
from dmuon_hf.core.ns.iteration import orthogonalize
from dmuon_hf.core.ns.kernels import Kernel, resolve_kernel
from dmuon_hf.core.ns.restarts import segments

__all__ = [
    "gram_newton_schulz",
    "gram_newton_schulz_factors",
    "gram_newton_schulz_q",
    "iterate_gram",
    "newton_schulz",
    "segment_factor",
]


def newton_schulz(
    G: Tensor,
    steps: int = 5,
    eps: float = DEFAULT_EPS,
    coefficients: Coefficients | None = None,
    restart_iterations: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Orthogonalise ``G`` with the default algorithm, ``gram_newton_schulz``; see there."""
    return gram_newton_schulz(G, steps, eps, coefficients, restart_iterations, dtype=dtype)


def gram_newton_schulz(
    G: Tensor,
    steps: int = 5,
    eps: float = DEFAULT_EPS,
    coefficients: Coefficients | None = None,
    restart_iterations: Sequence[int] | None = None,
    deterministic: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Orthogonalise ``G`` by Newton-Schulz on its Gram matrix, with restarts.

    Computes what ``direct_newton_schulz`` computes, up to rounding, with fewer multiplications on elongated matrices.
    Local to the caller: no collective. ``G`` is not changed.

    Args:
        G: ``(m, n)`` or a batch ``(B, m, n)``; float16, bfloat16, float32 or float64.
        steps: Iterations when no ``coefficients`` are given: rows of the default table, the last one repeated beyond
            its end. A table that is given says itself how many there are.
        eps: Added to the norm of ``G`` after its largest entry was scaled to between 1 and 2.
        coefficients: ``(a, b, c)`` per step, each run once; ``None`` means ``DEFAULT_COEFFICIENTS``.
        restart_iterations: Iterations, counted from 0, before which the Gram matrix is formed anew. ``None`` chooses
            by coefficients and dtype: ``[2]`` for five steps of either table, ``[2, 4]`` when they run in bfloat16.
            ``[]`` means none, which is inaccurate in 16 bits.
        deterministic: Use the library products, whatever ``DMUON_NS_KERNEL`` says.
        dtype: What to iterate in. ``None``: float16 on accelerators; on a CPU float32, or bfloat16 for bfloat16 input
            where the CPU multiplies it natively; always float64 for float64 input. float16 on a CPU works and is very
            slow.

    Returns:
        A new tensor of the shape and dtype of ``G``. Zero matrices give exactly zero; a non-finite entry makes its
        matrix non-finite.

    Raises:
        ConfigurationError: an argument outside the above.
    """
    rows, kernel = rows_of_call(coefficients, steps), resolve_kernel(deterministic=deterministic)

    def iterate(X: Tensor) -> Tensor:
        return iterate_gram(X, segments(rows, restart_iterations, X.dtype), kernel)

    return orthogonalize(G, iterate, eps=eps, dtype=dtype, kernel=kernel)


@torch.no_grad()
def gram_newton_schulz_factors(
    G: Tensor,
    steps: int = 5,
    eps: float = DEFAULT_EPS,
    coefficients: Coefficients | None = None,
    restart_iterations: Sequence[int] | None = None,
    deterministic: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[tuple[Tensor, ...], bool, Tensor]:
    """The factors that ``gram_newton_schulz`` multiplies onto the normalised matrix, one per segment between restarts.

    With ``(factors, transposed, normalizer)`` and ``X = G / normalizer``, transposed if ``transposed``, in the dtype
    of the factors, ``X = factor @ X`` for every factor in turn gives ``gram_newton_schulz(G)``, transposed if
    ``transposed``. The arguments are those of ``gram_newton_schulz``.

    Returns:
        ``factors``: ``(k, k)`` or ``(B, k, k)`` with ``k = min(m, n)``, in the dtype iterated in.
        ``transposed``: whether ``m > n``.
        ``normalizer``: the norm of ``G`` in float32 (float64 for float64 ``G``), a scalar or ``(B, 1, 1)``; infinite
        if the norm itself is too large for that dtype.

    Raises:
        ConfigurationError: as ``gram_newton_schulz``; also for a matrix without entries.
    """
    check_matrix(G)
    check_eps(eps)
    rows, kernel = rows_of_call(coefficients, steps), resolve_kernel(deterministic=deterministic)
    X, scale, norm = normalizer(G, eps, compute_dtype(G, supported_dtype(dtype)))
    factors = _factors(X, segments(rows, restart_iterations, X.dtype), kernel, X.dtype)[0]
    whole = scale * norm
    return factors, is_tall(G), whole.squeeze() if G.ndim == 2 else whole


gram_newton_schulz_q = gram_newton_schulz_factors


def iterate_gram(
    X: Tensor, segments: tuple[tuple[Row, ...], ...], kernel: Kernel, gram_dtype: torch.dtype | None = None
) -> Tensor:
    """Run ``segments`` on normalised ``X``, ``(m, n)`` or ``(B, m, n)``, in the dtype of ``X``.

    With ``gram_dtype`` the products of the short side are formed and kept in that dtype, and each factor is rounded
    once, to the dtype of ``X``.
    """
    factors, X = _factors(X, segments, kernel, gram_dtype or X.dtype)
    return _apply(factors[-1], X)


def _factors(
    X: Tensor, segments: tuple[tuple[Row, ...], ...], kernel: Kernel, gram_dtype: torch.dtype
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The factor of each segment, in the dtype of ``X``, and ``X`` with all of them applied but the last."""
    factors: list[Tensor] = []
    for rows in segments:
        if factors:
            X = _apply(factors[-1], X)
        R = kernel.gram((X.mT if is_tall(X) else X).to(gram_dtype))
        factors.append(segment_factor(R, rows, kernel).to(X.dtype))
    return tuple(factors), X


def segment_factor(R: Tensor, rows: tuple[Row, ...], kernel: Kernel) -> Tensor:
    """``P_k ... P_1`` for the steps ``rows`` on the Gram matrix ``R``.

    ``P = a I + Z`` is formed only where no product can add ``a`` instead: on a diagonal that holds ``a`` the low bits
    of ``Z`` are rounded away. Factors alternate sides, ``Z (R Z)`` and ``Z (Z' ...)``: rounding errors that are not
    symmetric then cancel in part, which matters most where a kernel mirrors one triangle.
    """
    if len(rows) == 1:
        a, b, c = rows[0]
        return kernel.symmetric(R, R, R, alpha=c, beta=b, diag=a)
    Q: Tensor | None = None
    for index, (a, b, c) in enumerate(rows):
        Z = kernel.symmetric(R, R, R, alpha=c, beta=b)
        if index + 1 < len(rows):
            half = kernel.symmetric(R, Z, R, beta=a)
            R = kernel.symmetric(Z, half, half, beta=a)
        if Q is None:
            Z.diagonal(dim1=-2, dim2=-1).add_(a)
            Q = Z
        else:
            Q = kernel.symmetric(Z, Q, Q, beta=a)
    assert Q is not None
    return Q


def _apply(Q: Tensor, X: Tensor) -> Tensor:
    return X @ Q.mT if is_tall(X) else Q @ X
