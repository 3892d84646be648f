"""What one rank sends, takes in and computes in each bucket: the plan as seen from that rank."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from torch import Tensor

from dmuon_hf.core.sharded.layout import Copy
from dmuon_hf.core.sharded.plan import ShardedEntry, ShardedPlan
from dmuon_hf.core.sharded.runs import Runs, length, placed

__all__ = ["Itinerary", "Leg", "Place", "Stop", "itinerary_of", "lying_whole"]


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
    for number, task in enumerate(plan.tasks):
        stop = stops[task.bucket]
        copies = plan.entries[task.entry].layout.copies()
        mine = task.worker == rank
        if mine:
            stop.work.append(number)
        for copy in task.homes:
            for holder, place, rows, columns in _parts(plan.entries[task.entry], copies[copy], task.entry, task.member):
                is_source = copy == task.source
                if mine:
                    leg = Leg(number, position[holder], rows, columns)
                    stop.gives.append(leg)
                    if is_source:
                        stop.takes.append(leg)
                if holder == rank:
                    leg = Leg(number, position[task.worker], rows, columns)
                    stop.gets.append(leg)
                    stop.places[number] = place
                    if is_source:
                        stop.sends.append(leg)
    for stop in stops:
        for legs in (stop.sends, stop.takes, stop.gives, stop.gets):
            legs.sort(key=lambda leg: (leg.peer, leg.task))
    return Itinerary(stops, tuple(lying_whole(plan, rank)))


def lying_whole(plan: ShardedPlan, rank: int) -> Iterator[Place]:
    """The stored matrices of which this rank holds all."""
    for index, entry in enumerate(plan.entries):
        for copy in entry.layout.copies():
            for holder, held in copy:
                if holder != rank or (length(held[-2]), length(held[-1])) != entry.stored:
                    continue
                if not entry.is_stack:
                    yield Place(index, 0, None)
                    continue
                for inner, outer in placed(held[0]):
                    for local, member in zip(
                        range(inner.start, inner.stop), range(outer.start, outer.stop), strict=True
                    ):
                        yield Place(index, member, local)


def _parts(entry: ShardedEntry, copy: Copy, index: int, member: int) -> Iterator[tuple[int, Place, Runs, Runs]]:
    """Per holder of one stored matrix in a copy: where it keeps its part, and the rows and columns of that."""
    for holder, held in copy:
        if not entry.is_stack:
            yield holder, Place(index, member, None), held[0], held[1]
            continue
        for inner, outer in placed(held[0]):
            if outer.start <= member < outer.stop:
                yield holder, Place(index, member, inner.start + member - outer.start), held[1], held[2]
