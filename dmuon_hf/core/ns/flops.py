"""Multiply-add counts of the two algorithms, times two: what ``backend="auto"`` chooses by.

For a matrix with sides ``m <= n``; ``share`` is the part of a full product that a symmetric product costs, 0.5 to 1,
and ``short_share`` the same where the short side is summed over, if it differs.
"""

from __future__ import annotations

__all__ = ["direct_flops", "gram_flops"]


def direct_flops(m: int, n: int, *, steps: int, share: float, short_share: float | None = None) -> float:
    """Per step the Gram matrix (symmetric), its square (symmetric), and one full product with the long side."""
    short = share if short_share is None else short_share
    return steps * (share * 2 * m * m * n + short * 2 * m**3 + 2 * m * m * n)


def gram_flops(
    m: int, n: int, *, segment_lengths: tuple[int, ...], share: float, short_share: float | None = None
) -> float:
    """Per segment the Gram matrix and one full product with the long side, the rest on the short side.

    There every product is symmetric: a step squares ``R``; each but the first of a segment extends ``Q``; each but
    the last advances ``R`` by two products.
    """
    short = share if short_share is None else short_share
    long_side = len(segment_lengths) * (share * 2 * m * m * n + 2 * m * m * n)
    short_products = sum(length + 3 * (length - 1) for length in segment_lengths)
    return long_side + short * 2 * m**3 * short_products
