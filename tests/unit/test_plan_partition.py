"""Owner assignment: every item once, bounded imbalance, the same on every rank, whatever the mesh."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import Slot, WorkItem, assign_owners, imbalance, least_possible_load, matrix_cost
from tests.unit.model_shapes import MODEL_SHAPES, matrices_of
from tests.unit.partitions import largest_load_of_best


def random_items(seed: int, count: int | None = None) -> list[WorkItem]:
    rng = random.Random(seed)
    count = rng.randint(1, 80) if count is None else count
    items = []
    for index in range(count):
        numel = rng.choice([64, 2_000, 30_000, 1_000_000, 5_000_000])
        items.append(
            WorkItem(f"layers.{index // 7}.w{index % 7}", numel * rng.randint(1, 5), numel, f"layers.{index // 7}")
        )
    return items


def slot_loads(items: list[WorkItem], owners: dict[str, Slot], shards: int, replicas: int) -> list[int]:
    loads = Counter({(shard, replicate): 0 for shard in range(shards) for replicate in range(replicas)})
    for item in items:
        loads[owners[item.name]] += item.cost
    return list(loads.values())


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("strategy", ["lpt", "round_robin", "rank0"])
def test_every_item_gets_exactly_one_slot_of_the_mesh(seed: int, strategy: str) -> None:
    rng = random.Random(seed)
    shards, replicas, items = rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 4]), random_items(seed)
    owners = assign_owners(items, shard_size=shards, replicate_size=replicas, strategy=strategy)  # type: ignore[arg-type]
    assert list(owners) == [item.name for item in items]
    assert all(0 <= shard < shards and 0 <= replicate < replicas for shard, replicate in owners.values())


def model_items(model: str) -> list[WorkItem]:
    return [
        WorkItem(name, matrix_cost(shape, spec), shape[0] * shape[1], name.rpartition(".")[0])
        for name, (shape, spec) in matrices_of(model).items()
    ]


@pytest.mark.parametrize("model", MODEL_SHAPES)
@pytest.mark.parametrize(("shards", "replicas"), [(2, 1), (8, 1), (64, 1), (1024, 1), (8, 8), (8, 128)])
def test_owners_of_a_published_model_are_within_2_percent_of_the_bound(model: str, shards: int, replicas: int) -> None:
    items = model_items(model)
    owners = assign_owners(items, shard_size=shards, replicate_size=replicas)
    bound = least_possible_load([item.cost for item in items], shards * replicas)
    assert max(slot_loads(items, owners, shards, replicas)) <= 1.02 * bound


def test_owners_of_a_tiny_model_are_within_2_percent_of_the_bound() -> None:
    shapes = {"q": 64 * 64, "k": 32 * 64, "up": 160 * 64, "down": 64 * 160}
    items = [
        WorkItem(f"{layer}.{name}", 3000 * numel, numel, f"{layer}")
        for layer in range(24)
        for name, numel in shapes.items()
    ]
    loads = slot_loads(items, assign_owners(items, shard_size=4), 4, 1)
    assert max(loads) <= 1.02 * least_possible_load([item.cost for item in items], 4)


@pytest.mark.parametrize("slots", range(2, 9))
def test_graham_s_worst_case_of_lpt_is_placed_as_well_as_can_be(slots: int) -> None:
    costs = [cost for size in range(slots, 2 * slots) for cost in (size, size)] + [slots]
    items = [WorkItem(f"w{index:02}", cost, 1 << 20, "g") for index, cost in enumerate(costs)]
    assert max(slot_loads(items, assign_owners(items, shard_size=slots), slots, 1)) == 3 * slots


@pytest.mark.parametrize("seed", range(60))
def test_placement_is_close_to_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.randint(2, 4)
    few = [rng.randint(5, 60) for _ in range(rng.randint(2, 4))]
    costs = [rng.choice(few) if seed % 2 else rng.randint(5, 60) for _ in range(rng.randint(slots, 11))]
    items = [WorkItem(f"w{index:02}", cost, 1 << 20, "g") for index, cost in enumerate(costs)]
    loads = slot_loads(items, assign_owners(items, shard_size=slots), slots, 1)
    assert max(loads) <= 1.06 * largest_load_of_best(costs, slots)


@pytest.mark.parametrize("seed", range(30))
def test_lpt_stays_within_four_thirds_of_the_best_possible(seed: int) -> None:
    items, slots = random_items(seed), random.Random(seed).randint(1, 12)
    owners = assign_owners(items, shard_size=slots, pack_small=False)
    loads = slot_loads(items, owners, slots, 1)
    costs = sorted((item.cost for item in items), reverse=True)
    # Lower bounds of the optimum: an even split, the largest item, and two of the first slots+1 sharing one slot.
    two_share = costs[slots - 1] + costs[slots] if len(costs) > slots else 0
    assert max(loads) <= (4 / 3 - 1 / (3 * slots)) * max(sum(costs) / slots, costs[0], two_share) + 1


@pytest.mark.parametrize("seed", range(30))
def test_column_balance_bounds_shard_columns_and_slots(seed: int) -> None:
    rng = random.Random(seed)
    items, shards, replicas = random_items(seed), rng.randint(1, 6), rng.randint(2, 4)
    owners = assign_owners(items, shard_size=shards, replicate_size=replicas, pack_small=False)
    total, largest = sum(item.cost for item in items), max(item.cost for item in items)
    columns = [sum(item.cost for item in items if owners[item.name][0] == shard) for shard in range(shards)]
    assert max(columns) <= total / shards + largest
    assert max(slot_loads(items, owners, shards, replicas)) <= total / (shards * replicas) + 2 * largest


def test_column_balance_evens_columns_that_flat_lpt_leaves_uneven() -> None:
    costs = [10, 6, 6, 6]
    items = [WorkItem(f"w{index}", cost, 1 << 20, "g") for index, cost in enumerate(costs)]

    def columns(balance: bool) -> list[int]:
        owners = assign_owners(items, shard_size=2, replicate_size=2, column_balance=balance)
        return [sum(item.cost for item in items if owners[item.name][0] == shard) for shard in range(2)]

    assert columns(balance=True) == [16, 12]
    many = [WorkItem(f"w{index}", cost, 1 << 20, "g") for index, cost in enumerate([8, 7, 3, 3, 3, 2])]
    even = assign_owners(many, shard_size=2, replicate_size=2, column_balance=True)
    flat = assign_owners(many, shard_size=2, replicate_size=2, column_balance=False)

    def spread(owners: dict[str, Slot]) -> int:
        totals = [sum(item.cost for item in many if owners[item.name][0] == shard) for shard in range(2)]
        return abs(totals[0] - totals[1])

    assert spread(even) == 0 < spread(flat)


@pytest.mark.parametrize("seed", range(20))
def test_lpt_does_not_depend_on_the_order_of_items(seed: int) -> None:
    items = random_items(seed)
    shuffled = random.Random(seed).sample(items, len(items))
    options = {"shard_size": 4, "replicate_size": 2, "pack_small": False}
    assert assign_owners(items, **options) == assign_owners(shuffled, **options)  # type: ignore[arg-type]


def test_equal_costs_are_dealt_in_name_order() -> None:
    items = [WorkItem(name, 5, 1 << 20, "g") for name in ("c", "a", "b", "d")]
    assert assign_owners(items, shard_size=4) == {"c": (2, 0), "a": (0, 0), "b": (1, 0), "d": (3, 0)}
    hsdp = assign_owners(items, shard_size=2, replicate_size=2)
    assert hsdp == {"a": (0, 0), "b": (1, 0), "c": (0, 1), "d": (1, 1)}


def test_round_robin_deals_in_model_order_over_shards_then_replicas() -> None:
    items = [WorkItem(name, 5, 1 << 20, "g") for name in ("c", "a", "b", "d", "e")]
    owners = assign_owners(items, shard_size=2, replicate_size=2, strategy="round_robin")
    assert owners == {"c": (0, 0), "a": (1, 0), "b": (0, 1), "d": (1, 1), "e": (0, 0)}


def test_rank0_owns_everything() -> None:
    assert set(assign_owners(random_items(3), shard_size=8, strategy="rank0").values()) == {(0, 0)}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("strategy", ["lpt", "round_robin"])
def test_owner_cap_limits_distinct_slots_of_a_group(seed: int, strategy: str) -> None:
    items = random_items(seed, count=60)
    owners = assign_owners(items, shard_size=4, replicate_size=2, strategy=strategy, max_owners_per_group=2)  # type: ignore[arg-type]
    for group in {item.group for item in items}:
        assert len({owners[item.name] for item in items if item.group == group}) <= 2


def test_small_items_of_a_group_share_an_owner_and_large_ones_do_not() -> None:
    large = [WorkItem(f"l{index}.big{index}", 10**9, 1 << 20, f"l{index // 4}") for index in range(8)]
    small = [WorkItem(f"l{group}.small{index}", 1000, 100, f"l{group}") for group in range(2) for index in range(5)]
    packed = assign_owners([*large, *small], shard_size=4)
    single = assign_owners([*large, *small], shard_size=4, pack_small=False)
    for group in range(2):
        assert len({packed[item.name] for item in small if item.group == f"l{group}"}) == 1
        assert len({single[item.name] for item in small if item.group == f"l{group}"}) > 1


def test_packing_never_makes_a_parcel_that_spoils_the_balance() -> None:
    items = [WorkItem(f"l0.w{index}", 100, 100, "l0") for index in range(64)]  # a tiny model: all of it is small
    owners = assign_owners(items, shard_size=4)
    assert imbalance(slot_loads(items, owners, 4, 1)) == 0.0


@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (7, 1), (64, 2), (256, 4), (1024, 1)])
def test_large_models_and_meshes_are_balanced(shards: int, replicas: int) -> None:
    items = [item for seed in range(3) for item in random_items(seed, count=2000)]
    items = [WorkItem(f"{index}.{item.name}", item.cost, item.numel, item.group) for index, item in enumerate(items)]
    owners = assign_owners(items, shard_size=shards, replicate_size=replicas)
    largest, mean = max(item.cost for item in items), sum(item.cost for item in items) / (shards * replicas)
    assert max(slot_loads(items, owners, shards, replicas)) <= mean + 2 * largest


def test_imbalance_of_known_loads() -> None:
    assert imbalance([1, 1, 1]) == 0.0
    assert imbalance([3, 1]) == pytest.approx(0.5)
    assert imbalance([0, 0]) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_size": 0}, "at least 1"),
        ({"shard_size": 2, "replicate_size": 0}, "at least 1"),
        ({"shard_size": 2, "strategy": "best"}, "owner_strategy"),
        ({"shard_size": 2, "max_owners_per_group": 0}, "max_owners_per_group"),
    ],
)
def test_invalid_option_raises(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        assign_owners(random_items(0), **options)  # type: ignore[arg-type]


def test_duplicate_names_raise() -> None:
    item = WorkItem("a", 1, 1, "g")
    with pytest.raises(ConfigurationError, match="unique"):
        assign_owners([item, item], shard_size=1)
