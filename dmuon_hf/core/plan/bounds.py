"""How evenly work can be shared at all: a proven lower bound of the largest load, in integers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

__all__ = ["least_possible_load"]

_MOST_PER_SLOT: Final = 32

_PRECISION_BITS: Final = 12
"""The capacity that can be refuted is found to one part in 2 to the power of this."""


def least_possible_load(costs: Iterable[int], slots: int) -> int:
    """A load that the busiest of ``slots`` cannot fall below, however the work is placed; 0 without work.

    The largest of

    - the mean load and the largest item,
    - for every ``k``: of the ``k * slots + 1`` largest items one slot holds ``k + 1``, so at least the ``k + 1``
      smallest of them (``k = 1`` is two of the first ``slots + 1``),
    - the largest load that two bounds of bin packing show to be too small for all slots: L2 (Martello and Toth,
      Knapsack Problems, 1990, section 8.3.2), and the dual feasible functions u(k) (Fekete and Schepers, Mathematical
      Programming 91, 2001) up to ``k = 32``.
    """
    ascending = sorted(cost for cost in costs if cost > 0)
    if not ascending:
        return 0
    sums = [0, *accumulate(reversed(ascending))]
    bound = max(-(-sums[-1] // slots), ascending[-1])
    for last in range(slots + 1, len(ascending) + 1, slots):
        bound = max(bound, sums[last] - sums[last - (last - 1) // slots - 1])
    capacities = _Capacities(ascending, slots)
    if not capacities.refutes(bound):
        return bound
    # Not every capacity below one that cannot be refuted can be, so this finds a bound, not always the best.
    refuted, open_ = bound, 2 * bound
    while open_ - refuted > 1 + (refuted >> _PRECISION_BITS):
        middle = (refuted + open_) // 2
        if capacities.refutes(middle):
            refuted = middle
        else:
            open_ = middle
    return refuted + 1


class _Capacities:
    """Which capacities of every slot are shown to be too small for items of sizes ``ascending``."""

    def __init__(self, ascending: list[int], slots: int) -> None:
        self._sizes = ascending
        self._slots = slots
        self._sums = [0, *accumulate(ascending)]
        self._kinds = sorted(Counter(ascending).items())

    def refutes(self, capacity: int) -> bool:
        return self._refuted_by_halves(capacity) or self._refuted_by_counts(capacity)

    def _refuted_by_halves(self, capacity: int) -> bool:
        """L2: items above half need slots of their own, and those of ``t`` and more fit into what is left beside them.

        An item above ``capacity - t`` leaves no room for any of these.
        """
        half = bisect_right(self._sizes, capacity // 2)
        above = len(self._sizes) - half
        if above > self._slots:
            return True
        start = 0
        for size, count in self._kinds:
            if start >= half:
                return False
            full = bisect_left(self._sizes, capacity - size + 1)
            room = (full - half) * capacity - (self._sums[full] - self._sums[half])
            missing = self._sums[half] - self._sums[start] - room
            if above + max(0, -(-missing // capacity)) > self._slots:
                return True
            start += count
        return False

    def _refuted_by_counts(self, capacity: int) -> bool:
        """u(k): an item of size ``x`` counts as the largest whole number below ``(k + 1) x / capacity``.

        What fits into one capacity adds up to less than ``k + 1`` of these, so to at most ``k``.
        """
        return any(
            sum(count * (((k + 1) * size - 1) // capacity) for size, count in self._kinds) > k * self._slots
            for k in range(1, _MOST_PER_SLOT + 1)
        )
