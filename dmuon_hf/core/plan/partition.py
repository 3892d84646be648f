"""Assignment of work to owner slots. Deterministic: the result depends on names, costs and options alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan.bounds import least_possible_load
from dmuon_hf.core.plan.local_search import Job, LocalSearch, Place

__all__ = ["PACKED_NUMEL", "SMALL_NUMEL", "OwnerStrategy", "Slot", "WorkItem", "assign_owners", "imbalance"]

OwnerStrategy = Literal["lpt", "round_robin", "rank0"]

Slot: TypeAlias = tuple[int, int]
"""An owner: (rank in the shard dimension, rank in the replicate dimension)."""

SMALL_NUMEL = 1 << 14
"""Matrices below this many elements are packed with others of their group."""

PACKED_NUMEL = 1 << 16
"""A pack holds at most this many elements."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One parameter to be placed: its cost decides the balance, its group what it may be packed with."""

    name: str
    cost: int
    numel: int
    group: str


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Items that go to one owner together."""

    names: tuple[str, ...]
    cost: int
    group: str


def assign_owners(
    items: Sequence[WorkItem],
    *,
    shard_size: int,
    replicate_size: int = 1,
    strategy: OwnerStrategy = "lpt",
    column_balance: bool = True,
    pack_small: bool = True,
    max_owners_per_group: int | None = None,
) -> dict[str, Slot]:
    """Give every item one of the ``shard_size * replicate_size`` slots.

    Args:
        items: in model order, names unique.
        strategy: ``lpt`` places parcels from the costliest to the cheapest, each on the least loaded slot (Graham
            1969), and then moves and swaps them as long as that makes the busiest slot less busy; ``round_robin``
            deals them out in model order; ``rank0`` puts all on slot (0, 0).
        column_balance: lpt first balances the shard columns, the ranks of one shard index over all replicas, then the
            slots of each, so that the traffic inside every shard group is even.
        pack_small: merge small items of one group into parcels, as long as a parcel stays below a 64th of an even
            load, so that it cannot be seen in the balance.
        max_owners_per_group: at most this many distinct slots for the items of one group.

    Returns:
        Slot by name, in the order of ``items``.

    Raises:
        ConfigurationError: for sizes below 1, an unknown strategy or duplicate names.
    """
    if shard_size < 1 or replicate_size < 1:
        raise ConfigurationError(
            f"mesh sizes must be at least 1, got shard {shard_size} and replicate {replicate_size}"
        )
    if strategy not in get_args(OwnerStrategy):
        raise ConfigurationError(f"owner_strategy must be one of {get_args(OwnerStrategy)}, got {strategy!r}")
    if max_owners_per_group is not None and max_owners_per_group < 1:
        raise ConfigurationError(f"max_owners_per_group must be at least 1, got {max_owners_per_group}")
    if len({item.name for item in items}) != len(items):
        raise ConfigurationError("names of the items to place must be unique")
    even_load = sum(item.cost for item in items) // (shard_size * replicate_size)
    parcels = _pack(items, cost_limit=even_load // 64) if pack_small else [_parcel([item]) for item in items]
    if strategy == "lpt":
        parcels.sort(key=lambda parcel: (-parcel.cost, parcel.names))
    chooser = _Chooser(shard_size, replicate_size, strategy, column_balance, max_owners_per_group)
    slots = [chooser.place(parcel) for parcel in parcels]
    if strategy == "lpt":
        slots = _improved(parcels, slots, shard_size, replicate_size, column_balance, max_owners_per_group)
    placed = {name: slot for parcel, slot in zip(parcels, slots, strict=True) for name in parcel.names}
    return {item.name: placed[item.name] for item in items}


def imbalance(loads: Iterable[int]) -> float:
    """How much the largest load exceeds the mean: ``max / mean - 1``, 0 for a perfect balance or no load."""
    values = list(loads)
    total = sum(values)
    return max(values) * len(values) / total - 1.0 if total else 0.0


def _parcel(items: Sequence[WorkItem]) -> _Parcel:
    return _Parcel(tuple(item.name for item in items), sum(item.cost for item in items), items[0].group)


def _pack(items: Sequence[WorkItem], *, cost_limit: int) -> list[_Parcel]:
    """Merge small items of a group, in order, into parcels within the size and cost limits."""
    parcels: list[_Parcel] = []
    open_packs: dict[str, list[WorkItem]] = {}
    for item in items:
        if item.numel >= SMALL_NUMEL:
            parcels.append(_parcel([item]))
            continue
        pack = open_packs.setdefault(item.group, [])
        full = sum(other.numel for other in pack) + item.numel > PACKED_NUMEL
        if pack and (full or sum(other.cost for other in pack) + item.cost > cost_limit):
            parcels.append(_parcel(pack))
            pack.clear()
        pack.append(item)
    parcels.extend(_parcel(pack) for pack in open_packs.values() if pack)
    return parcels


class _LeastLoaded:
    """The index with the smallest load, lowest index first, under increasing loads. Stale heap entries are skipped."""

    def __init__(self, count: int) -> None:
        self.loads = [0] * count
        self._heap = [(0, index) for index in range(count)]

    def least(self) -> int:
        while self._heap[0][0] != self.loads[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def add(self, index: int, cost: int) -> None:
        self.loads[index] += cost
        heapq.heappush(self._heap, (self.loads[index], index))

    def take(self, cost: int) -> int:
        """Add ``cost`` to the least loaded index, and return it."""
        index = self.least()
        self.add(index, cost)
        return index


class _Chooser:
    """Places parcels one after the other and remembers the load of every column and slot."""

    def __init__(
        self, shard_size: int, replicate_size: int, strategy: OwnerStrategy, column_balance: bool, cap: int | None
    ) -> None:
        self._shard_size = shard_size
        self._replicate_size = replicate_size
        self._strategy = strategy
        self._by_column = column_balance and replicate_size > 1
        self._cap = cap
        self._dealt = 0
        self._columns = _LeastLoaded(shard_size)
        # Flat slot index replicate * shard_size + shard: equal loads fill the columns before the replicas.
        self._slots = _LeastLoaded(shard_size * replicate_size)
        self._in_column = [_LeastLoaded(replicate_size) for _ in range(shard_size)]
        self._group_slots: dict[str, list[Slot]] = {}

    def place(self, parcel: _Parcel) -> Slot:
        used = self._group_slots.setdefault(parcel.group, [])
        if self._cap is not None and len(used) >= self._cap:
            slot = self._among(used)
        else:
            slot = self._anywhere()
            if slot not in used:
                used.append(slot)
        shard, replicate = slot
        self._columns.add(shard, parcel.cost)
        self._in_column[shard].add(replicate, parcel.cost)
        self._slots.add(replicate * self._shard_size + shard, parcel.cost)
        return slot

    def _anywhere(self) -> Slot:
        if self._strategy == "rank0":
            return (0, 0)
        if self._strategy == "round_robin":
            index, self._dealt = self._dealt, self._dealt + 1
            return (index % self._shard_size, index // self._shard_size % self._replicate_size)
        if self._by_column:
            shard = self._columns.least()
            return (shard, self._in_column[shard].least())
        index = self._slots.least()
        return (index % self._shard_size, index // self._shard_size)

    def _among(self, used: list[Slot]) -> Slot:
        if self._strategy == "round_robin":
            index, self._dealt = self._dealt, self._dealt + 1
            return used[index % len(used)]

        def load(slot: Slot) -> tuple[int, int, Slot]:
            column = self._columns.loads[slot[0]] if self._by_column else 0
            return (column, self._in_column[slot[0]].loads[slot[1]], slot)

        return min(used, key=load)


def _improved(
    parcels: Sequence[_Parcel],
    slots: Sequence[Slot],
    shard_size: int,
    replicate_size: int,
    column_balance: bool,
    cap: int | None,
) -> list[Slot]:
    """The slots of parcels after a local search, over columns first where they are to be balanced."""
    by_column = column_balance and replicate_size > 1
    if by_column and cap is None:
        columns = _search(parcels, [shard for shard, _ in slots], shard_size)
        in_column = [_LeastLoaded(replicate_size) for _ in range(shard_size)]
        slots = [(shard, in_column[shard].take(parcel.cost)) for parcel, shard in zip(parcels, columns, strict=True)]
    # Flat as in `_Chooser`, so that a column is every `shard_size`-th slot.
    flat = [replicate * shard_size + shard for shard, replicate in slots]
    flat = _search(parcels, flat, shard_size * replicate_size, columns=shard_size if by_column else None, cap=cap)
    return [(slot % shard_size, slot // shard_size) for slot in flat]


def _search(
    parcels: Sequence[_Parcel], slots: Sequence[int], count: int, *, columns: int | None = None, cap: int | None = None
) -> list[int]:
    """Slots after a local search over ``count`` of them.

    Columns get at most a 128th more than the busiest of them has, and a group at most ``cap`` slots.
    """
    anywhere: tuple[Place, ...] = tuple((slot,) for slot in range(count))
    placed: list[Place] = [(slot,) for slot in slots]
    loads = [0] * count
    for parcel, slot in zip(parcels, slots, strict=True):
        loads[slot] += parcel.cost
    search = LocalSearch(
        [Job(parcel.cost, anywhere, parcel.group) for parcel in parcels],
        placed,
        loads,
        room=None if columns is None else _room_in_columns(loads, columns),
        may=None if cap is None else _within_cap([parcel.group for parcel in parcels], placed, cap),
    )
    least = least_possible_load([parcel.cost for parcel in parcels], count)
    search.run(enough=least + least // 1024)
    return [slot for (slot,) in placed]


def _room_in_columns(loads: Sequence[int], columns: int) -> Callable[[Place, Place], int]:
    """How much more a slot of another column may get."""
    busiest = max(sum(loads[column::columns]) for column in range(columns))
    most = busiest + busiest // 128

    def room(here: Place, there: Place) -> int:
        column = there[0] % columns
        return loads[here[0]] if here[0] % columns == column else most - sum(loads[column::columns])

    return room


def _within_cap(groups: Sequence[str], placed: Sequence[Place], cap: int) -> Callable[[Mapping[int, Place]], bool]:
    """Whether the groups of parcels that change their place keep to ``cap`` slots."""
    members: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)

    def may(changed: Mapping[int, Place]) -> bool:
        touched = {groups[number] for number in changed}
        return all(len({changed.get(number, placed[number]) for number in members[group]}) <= cap for group in touched)

    return may
