"""Placements by brute force, as a reference for the planner."""

from __future__ import annotations

from collections.abc import Sequence


def largest_load_of_best(costs: Sequence[int], slots: int) -> int:
    """The least largest load of any placement of a dozen items, found by trying all."""
    ordered = sorted(costs, reverse=True)
    best = sum(ordered)
    loads = [0] * slots

    def place(index: int) -> None:
        nonlocal best
        if index == len(ordered):
            best = max(loads)
            return
        # Slots of one load are alike.
        for slot in {load: slot for slot, load in enumerate(loads)}.values():
            loads[slot] += ordered[index]
            if loads[slot] < best:
                place(index + 1)
            loads[slot] -= ordered[index]

    place(0)
    return best
