"""What one rank sends, takes in and computes in each bucket: the plan as seen from that rank."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from torch import Tensor

from dmuon_hf.core.sharded.plan import ShardedEntry, ShardedPlan
from dmuon_hf.core.shards.runs import Runs, length, placed

__all__ = ["Itinerary", "Leg", "Place", "Stop", "holders_of", "itinerary_of", "lying_whole"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank keeps its part of a stored matrix: the parameter, and the index in the local stack if it is one."""

    entry: int
    member: int
    local: int | None


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of one task's matrix that travels between this rank and a peer, by the peer's position in the team."""

    task: int
    peer: int
    rows: Runs
    columns: Runs

    @property
    def shape(self) -> tuple[int, int]:
        return length(self.rows), length(self.columns)

    @property
    def numel(self) -> int:
        return length(self.rows) * length(self.columns)

    def blocks(self, part: Tensor, matrix: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The rectangles that a part ``(rows, columns)`` consists of, each with its place in the whole matrix."""
        for inner_rows, outer_rows in placed(self.rows):
            for inner_columns, outer_columns in placed(self.columns):
                yield part[inner_rows, inner_columns], matrix[outer_rows, outer_columns]


@dataclass(frozen=True, slots=True)
class Stop:
    """One bucket on one rank; every list is ordered by peer, then task, as the plan is.

    Attributes:
        work: Tasks that this rank orthogonalises.
        sends: Parts of directions that go from here to workers.
        takes: The same as workers see it: parts that come in for ``work``.
        gives: Parts of updates that go from here to everyone who holds some of a matrix of ``work``.
        gets: The same as holders see it: parts of updates that come home.
        places: Where this rank keeps its part of each task's matrix.
    """

    work: list[int] = field(default_factory=list)
    sends: list[Leg] = field(default_factory=list)
    takes: list[Leg] = field(default_factory=list)
    gives: list[Leg] = field(default_factory=list)
    gets: list[Leg] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)

    def only(self, tasks: Set[int]) -> Stop:
        """The same for some of the tasks."""
        if self.places.keys() <= tasks:
            return self

        def kept(legs: list[Leg]) -> list[Leg]:
            return [leg for leg in legs if leg.task in tasks]

        return Stop(
            work=[task for task in self.work if task in tasks],
            sends=kept(self.sends),
            takes=kept(self.takes),
            gives=kept(self.gives),
            gets=kept(self.gets),
            places={task: place for task, place in self.places.items() if task in tasks},
        )


@dataclass(frozen=True, slots=True)
class Itinerary:
    """All buckets of one rank, and the matrices that lie whole on it."""

    stops: tuple[Stop, ...]
    whole: tuple[Place, ...]


def itinerary_of(plan: ShardedPlan, rank: int) -> Itinerary:
    """The plan as seen from a rank."""
    position = {member: number for number, member in enumerate(plan.ranks)}
    stops = tuple(Stop() for _ in range(plan.buckets))
    holdings = _Holdings(plan, rank)
    for number, task in enumerate(plan.tasks):
        stop = stops[task.bucket]
        for copy in task.homes:
            part = holdings.mine(task.entry, copy, task.member)
            if part is not None:
                leg = Leg(number, position[task.worker], part.rows, part.columns)
                stop.places[number] = part.place
                stop.gets.append(leg)
                if copy == task.source:
                    stop.sends.append(leg)
            if task.worker == rank:
                legs = [
                    Leg(number, position[part.holder], part.rows, part.columns)
                    for part in holdings.all(task.entry, copy, task.member)
                ]
                stop.gives.extend(legs)
                if copy == task.source:
                    stop.takes.extend(legs)
        if task.worker == rank:
            stop.work.append(number)
    for stop in stops:
        for kind in (stop.sends, stop.takes, stop.gives, stop.gets):
            kind.sort(key=lambda leg: (leg.peer, leg.task))
    return Itinerary(stops, tuple(lying_whole(plan, rank)))


def lying_whole(plan: ShardedPlan, rank: int) -> Iterator[Place]:
    """The stored matrices of which this rank holds all."""
    for index, entry in enumerate(plan.entries):
        for copy in entry.layout.copies():
            for holder, held in copy:
                if holder == rank and (length(held[-2]), length(held[-1])) == entry.stored:
                    yield from (part.place for part in _parts_of(entry, index, holder, held))


def holders_of(entry: ShardedEntry, index: int) -> Iterator[tuple[int, int]]:
    """Rank and member for whatever a rank holds some of in the first copy."""
    for holder, held in entry.layout.copies()[0]:
        yield from ((holder, part.place.member) for part in _parts_of(entry, index, holder, held))


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank holds of one stored matrix."""

    holder: int
    place: Place
    rows: Runs
    columns: Runs


def _parts_of(entry: ShardedEntry, index: int, holder: int, held: tuple[Runs, ...]) -> Iterator[_Part]:
    """What one rank holds of every stored matrix of a parameter."""
    *stack, rows, columns = held
    if not stack:
        yield _Part(holder, Place(index, 0, None), rows, columns)
        return
    for inner, outer in placed(stack[0]):
        for local, member in enumerate(range(outer.start, outer.stop), start=inner.start):
            yield _Part(holder, Place(index, member, local), rows, columns)


class _Holdings:
    """Who holds which stored matrix, looked up by parameter, copy and member; made when first asked for."""

    def __init__(self, plan: ShardedPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._mine: dict[tuple[int, int], dict[int, _Part]] = {}
        self._all: dict[tuple[int, int], dict[int, list[_Part]]] = {}

    def mine(self, index: int, copy: int, member: int) -> _Part | None:
        """What this rank holds."""
        if (index, copy) not in self._mine:
            entry = self._plan.entries[index]
            parts = (
                part
                for holder, held in entry.layout.copies()[copy]
                if holder == self._rank
                for part in _parts_of(entry, index, holder, held)
            )
            self._mine[index, copy] = {part.place.member: part for part in parts}
        return self._mine[index, copy].get(member)

    def all(self, index: int, copy: int, member: int) -> list[_Part]:
        """What every rank of a copy holds."""
        if (index, copy) not in self._all:
            entry = self._plan.entries[index]
            by_member: dict[int, list[_Part]] = {}
            for holder, held in entry.layout.copies()[copy]:
                for part in _parts_of(entry, index, holder, held):
                    by_member.setdefault(part.place.member, []).append(part)
            self._all[index, copy] = by_member
        return self._all[index, copy].get(member, [])
