"""Local search on placements: the busiest slot gets less busy, and jobs stay where they may be."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from dmuon_hf.core.plan.local_search import Job, LocalSearch, Place


def searched(
    jobs: Sequence[Job], placed: Sequence[Place], slots: int, **options: object
) -> tuple[list[Place], list[int]]:
    places, loads = list(placed), [0] * slots
    for job, place in zip(jobs, places, strict=True):
        for slot in place:
            loads[slot] += job.cost
    LocalSearch(jobs, places, loads, **options).run()  # type: ignore[arg-type]
    return places, loads


def anywhere(slots: int) -> tuple[Place, ...]:
    return tuple((slot,) for slot in range(slots))


@pytest.mark.parametrize(
    ("costs", "slots", "start", "largest"),
    [
        ([4, 4], 2, [0, 0], 4),  # a move
        ([5, 4, 4, 3], 2, [0, 0, 1, 1], 8),  # a swap
        ([3, 3, 2, 2, 2], 2, [0, 1, 0, 1, 0], 6),  # what the costliest first leaves at 7
        ([6, 4, 3, 3, 2], 2, [0, 0, 1, 1, 1], 9),
        ([8, 5, 5, 2], 2, [0, 1, 1, 0], 10),
    ],
)
def test_busiest_slot_gets_less_busy(costs: list[int], slots: int, start: list[int], largest: int) -> None:
    options = anywhere(slots)
    _, loads = searched([Job(cost, options) for cost in costs], [(slot,) for slot in start], slots)
    assert max(loads) == largest


@pytest.mark.parametrize("seed", range(20))
def test_loads_are_those_of_the_places_and_no_slot_gets_busier_than_the_busiest(seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.randint(2, 6)
    all_options = [
        anywhere(slots),
        anywhere(slots)[: slots // 2 + 1],
        tuple((slot, slot - 1) for slot in range(1, slots)),
    ]
    jobs = [Job(rng.randint(1, 50), rng.choice(all_options)) for _ in range(30)]
    start = [rng.choice(job.options) for job in jobs]
    before = [sum(job.cost for job, place in zip(jobs, start, strict=True) if slot in place) for slot in range(slots)]
    places, loads = searched(jobs, start, slots)
    after = [sum(job.cost for job, place in zip(jobs, places, strict=True) if slot in place) for slot in range(slots)]
    assert all(place in job.options for job, place in zip(jobs, places, strict=True))
    assert loads == after
    assert max(after) <= max(before)


def test_work_that_several_slots_do_alike_is_moved_with_all_of_them() -> None:
    pairs: tuple[Place, ...] = ((0, 2), (1, 3))
    places, loads = searched([Job(5, pairs), Job(4, pairs), Job(3, anywhere(4))], [(0, 2), (0, 2), (1,)], 4)
    assert sorted(places[:2]) == [(0, 2), (1, 3)]
    assert sorted(loads) == [4, 5, 5, 7]


def test_slots_get_no_more_than_there_is_room_for() -> None:
    jobs = [Job(2, anywhere(3))] * 4
    places, _ = searched(jobs, [(0,)] * 4, 3, room=lambda _, there: 0 if there == (1,) else 2)
    assert (1,) not in places and (2,) in places


def test_changes_that_are_not_allowed_are_not_made() -> None:
    jobs = [Job(2, anywhere(2))] * 4
    assert searched(jobs, [(0,)] * 4, 2, may=lambda _: False)[0] == [(0,)] * 4


def test_search_ends_when_what_it_has_is_enough() -> None:
    jobs, loads = [Job(1, anywhere(2))] * 10, [10, 0]
    LocalSearch(jobs, [(0,)] * 10, loads).run(enough=8)
    assert max(loads) <= 8
    untouched = [6, 4]
    LocalSearch(jobs, [(0,)] * 6 + [(1,)] * 4, untouched).run(enough=6)
    assert untouched == [6, 4]
