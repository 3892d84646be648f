"""Who orthogonalises sharded matrices: pure, balanced, at most one bucket's worth at a time."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import LinkCosts, MatrixSpec, least_possible_load, matrix_cost
from dmuon_hf.core.sharded import ShardedEntry, ShardedPlan, make_sharded_plan
from dmuon_hf.core.sharded.itinerary import itinerary_of
from dmuon_hf.core.shards.layout import Cut, ShardLayout
from tests.unit.model_shapes import matrices_of

SHARED = LinkCosts(near=0, far=0)
ALIKE = LinkCosts(near=0, far=1 << 40)


def entry(
    name: str, shape: tuple[int, ...], mesh: tuple[int, ...], cuts: tuple[Cut | None, ...], **changes: object
) -> ShardedEntry:
    layout = ShardLayout(shape, mesh, tuple(range(torch.Size(mesh).numel())), cuts)
    return replace(ShardedEntry(name, torch.float32, MatrixSpec(), layout), **changes)


def llama(mesh: tuple[int, ...], cuts: tuple[Cut | None, ...], layers: int = 8) -> list[ShardedEntry]:
    shapes = {"q": (1024, 1024), "k": (256, 1024), "up": (2816, 1024), "down": (1024, 2816)}
    return [entry(f"{layer}.{name}", shape, mesh, cuts) for layer in range(layers) for name, shape in shapes.items()]


def plan_of(entries: list[ShardedEntry], **options: object) -> ShardedPlan:
    return make_sharded_plan(entries, entries[0].layout.ranks, **options)


@pytest.mark.parametrize(
    ("mesh", "cuts"), [((8,), (Cut(0),)), ((2, 4), (None, Cut(0))), ((4, 2), (Cut(0, factor=2), Cut(0)))]
)
def test_workers_are_balanced_over_all_ranks(mesh: tuple[int, ...], cuts: tuple[Cut | None, ...]) -> None:
    assert plan_of(llama(mesh, cuts), links=SHARED).imbalance() < 0.1


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b", "gemma-2-9b", "gpt2", "phi-3-mini"])
@pytest.mark.parametrize(
    ("mesh", "cuts"),
    [
        ((8,), (Cut(0),)),
        ((64,), (Cut(0),)),
        ((1024,), (Cut(0),)),
        ((8, 8), (Cut(0, factor=8), Cut(0))),
        ((8, 8), (None, Cut(0))),
    ],
)
def test_workers_of_a_published_model_are_within_2_percent_of_the_bound(
    model: str, mesh: tuple[int, ...], cuts: tuple[Cut | None, ...]
) -> None:
    entries = [entry(name, shape, mesh, cuts, spec=spec) for name, (shape, spec) in matrices_of(model).items()]
    plan = plan_of(entries, links=SHARED)
    bound = least_possible_load([matrix_cost(one.stored, one.spec) for one in entries], len(plan.ranks))
    assert max(plan.loads) <= 1.02 * bound
    assert sum(plan.loads) == sum(matrix_cost(one.stored, one.spec) for one in entries)


def test_workers_make_up_for_matrices_that_lie_whole_on_some_ranks() -> None:
    stack = entry("experts", (6, 1024, 1024), (8,), (Cut(0),))
    plan = plan_of([stack, *llama((8,), (Cut(0),), layers=16)])
    assert plan.imbalance() < 0.02


def test_matrices_of_all_copies_leave_those_of_every_copy_other_ranks() -> None:
    """Large matrices have one worker for all copies, small ones one in each."""
    mesh, cuts = (4, 2), (None, Cut(0))
    large = [entry(f"large.{index}", (4096, 4096), mesh, cuts) for index in range(4)]
    plan = plan_of([*large, *(entry(f"small.{index}", (64, 64), mesh, cuts) for index in range(4))])
    workers = {plan.entries[task.entry].name.partition(".")[0]: set() for task in plan.tasks}
    for task in plan.tasks:
        workers[plan.entries[task.entry].name.partition(".")[0]].add(task.worker)
    assert workers == {"large": {0, 2, 4, 6}, "small": {1, 3, 5, 7}}


def test_copies_that_compute_alike_do_the_same() -> None:
    plan = plan_of(llama((2, 4), (None, Cut(0))), links=ALIKE)
    assert plan.loads[:4] == plan.loads[4:]
    assert {task.homes for task in plan.tasks} == {(0,), (1,)}


def test_large_matrices_are_shared_and_small_ones_are_not() -> None:
    plan = plan_of(
        [entry("large", (4096, 4096), (2, 2), (None, Cut(0))), entry("small", (64, 64), (2, 2), (None, Cut(0)))]
    )
    assert Counter(plan.entries[task.entry].name for task in plan.tasks) == {"large": 1, "small": 2}


def test_worker_holds_some_of_its_matrix() -> None:
    plan = plan_of([entry("few_rows", (3, 8), (8,), (Cut(0),))])
    assert [task.worker < 3 for task in plan.tasks] == [True]


def test_bucket_takes_in_no_more_than_it_may_and_a_larger_matrix_alone() -> None:
    plan = plan_of(llama((8,), (Cut(0),)), bucket_numel=2 << 20)
    taken: dict[tuple[int, int], list[int]] = defaultdict(list)
    for task in plan.tasks:
        rows, columns = plan.entries[task.entry].stored
        taken[task.bucket, task.worker].append(rows * columns)
    assert all(sum(sizes) <= 2 << 20 or len(sizes) == 1 for sizes in taken.values())
    assert plan.buckets == 1 + max(bucket for bucket, _ in taken)


def test_bucket_has_one_precision() -> None:
    plan = plan_of(
        [
            entry("a", (8, 8), (4,), (Cut(0),)),
            entry("b", (8, 8), (4,), (Cut(0),), dtype=torch.float64),
            entry("c", (8, 8), (4,), (Cut(0),), dtype=torch.bfloat16),
        ]
    )
    dtypes = defaultdict(set)
    for task in plan.tasks:
        dtypes[task.bucket].add(plan.entries[task.entry].dtype)
    assert list(dtypes.values()) == [{torch.float32, torch.bfloat16}, {torch.float64}]


def test_member_that_lies_whole_does_not_travel_and_one_that_is_cut_does() -> None:
    whole = plan_of([entry("experts", (6, 8, 8), (2, 2), (None, Cut(0)))])
    cut = plan_of([entry("experts", (6, 8, 8), (2, 2), (Cut(0), Cut(2)))])
    assert whole.tasks == () and whole.buckets == 0
    assert sorted(task.member for task in cut.tasks) == list(range(6))
    assert [len(itinerary_of(whole, rank).whole) for rank in range(4)] == [3, 3, 3, 3]
    assert [len(itinerary_of(cut, rank).whole) for rank in range(4)] == [0, 0, 0, 0]


def test_what_one_rank_sends_another_takes() -> None:
    entries = [*llama((2, 4), (None, Cut(0)), layers=2), entry("experts", (6, 9, 8), (2, 4), (Cut(0), Cut(1)))]
    plan = plan_of(entries, links=SHARED, bucket_numel=1 << 21)
    stops = [itinerary_of(plan, rank).stops for rank in plan.ranks]
    for bucket in range(plan.buckets):
        for one_way, other_way in (("sends", "takes"), ("gives", "gets")):
            sent: dict[tuple[int, int], list] = defaultdict(list)
            taken: dict[tuple[int, int], list] = defaultdict(list)
            for rank in plan.ranks:
                for leg in getattr(stops[rank][bucket], one_way):
                    sent[rank, leg.peer].append((leg.task, leg.rows, leg.columns))
                for leg in getattr(stops[rank][bucket], other_way):
                    taken[leg.peer, rank].append((leg.task, leg.rows, leg.columns))
            assert sent == taken


def test_plan_does_not_depend_on_anything_else_and_its_digest_tells() -> None:
    entries = llama((2, 4), (None, Cut(0)))
    assert plan_of(entries) == plan_of(list(entries))
    assert plan_of(entries).digest() == plan_of(list(entries)).digest()
    assert plan_of(entries).digest() != plan_of(entries[::-1]).digest()


@pytest.mark.parametrize("shape", [(8,), (2, 2, 2, 2), (0, 8)])
def test_parameter_without_matrices_is_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="odd_one"):
        entry("odd_one", shape, (1,), (None,))


def test_sections_that_do_not_add_up_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="odd_one"):
        entry("odd_one", (4, 8, 8), (1,), (None,), spec=MatrixSpec(sections=(4, 3)))
