"""The bound below which no placement brings the busiest slot: below the optimum, and near it."""

from __future__ import annotations

import random

import pytest

from dmuon_hf.core.plan import least_possible_load
from tests.unit.partitions import largest_load_of_best


@pytest.mark.parametrize("seed", range(60))
def test_bound_is_never_above_the_best_placement(seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.randint(1, 4)
    few = [rng.randint(1, 60) for _ in range(rng.randint(1, 5))]
    costs = [rng.choice(few) if seed % 2 else rng.randint(1, 60) for _ in range(rng.randint(1, 11))]
    best = largest_load_of_best(costs, slots)
    assert 0.9 * best <= least_possible_load(costs, slots) <= best


@pytest.mark.parametrize(
    ("costs", "slots", "bound"),
    [
        ([], 3, 0),
        ([0, 0], 3, 0),
        ([4, 4, 4], 2, 8),  # two of the first three share a slot
        ([7], 3, 7),  # the largest
        ([5, 5, 5], 1, 15),  # the mean
        ([3] * 7, 3, 9),  # three of the first seven share a slot
        ([10, 6, 6, 6, 6, 6], 3, 15),
        ([56] * 240 + [30] * 160, 256, 86),  # what is left beside those above half does not hold the others
        ([767] * 96 + [52] * 18432, 1024, 1040),  # with 19 small ones in a slot, or 5 beside a large one, some are left
    ],
)
def test_bound_of_known_costs(costs: list[int], slots: int, bound: int) -> None:
    assert least_possible_load(costs, slots) == bound


def test_bound_does_not_depend_on_the_order() -> None:
    costs = [9, 1, 7, 7, 2, 5]
    assert least_possible_load(costs, 2) == least_possible_load(sorted(costs), 2)
