"""The frozen plan of matrices that stay sharded: who orthogonalises which, and in which bucket it travels.

Pure: the same entries give the same plan on every rank, which the ranks confirm by comparing digests.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import LinkCosts, MatrixSpec, imbalance, matrix_cost, sharing_is_cheaper
from dmuon_hf.core.plan.local_search import Job, LocalSearch, Place
from dmuon_hf.core.shards.layout import ShardLayout
from dmuon_hf.core.shards.runs import length

__all__ = ["BUCKET_NUMEL", "ShardedEntry", "ShardedPlan", "Task", "make_sharded_plan"]

BUCKET_NUMEL: Final = 1 << 24
"""Most elements that one worker takes in with a bucket; a larger matrix is a bucket of its own."""

Workers: TypeAlias = tuple[int, ...]
"""Ranks that orthogonalise one matrix, each for itself."""


@dataclass(frozen=True, slots=True)
class ShardedEntry:
    """One parameter, ``(out, in)`` or a stack ``(count, out, in)``, and how it lies on its mesh."""

    name: str
    dtype: torch.dtype
    spec: MatrixSpec
    layout: ShardLayout

    def __post_init__(self) -> None:
        if self.spec.folded:
            raise NotImplementedError(
                f"{self.name} is a matrix in three dimensions, which is not built on a tensor-parallel axis: leave it "
                "out of the predicate, so that AdamW trains it"
            )
        if len(self.layout.shape) not in (2, 3) or 0 in self.layout.shape:
            raise ConfigurationError(
                f"{self.name} has shape {self.layout.shape}: Muon takes matrices (out, in) and stacks of them (count, "
                "out, in). Leave it out of the predicate, so that AdamW trains it"
            )
        try:
            self.spec.validate(self.stored)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.name}: {error}") from error

    @property
    def stored(self) -> tuple[int, int]:
        """Shape of one stored matrix."""
        return self.layout.shape[-2], self.layout.shape[-1]

    @property
    def momentum_dtype(self) -> torch.dtype:
        """Momentum and update are computed in fp32, in fp64 for fp64 parameters."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def is_stack(self) -> bool:
        return len(self.layout.shape) == 3

    @property
    def is_cut_inside(self) -> bool:
        """Whether its placements cut rows or columns, even where one rank gets all of them."""
        return any(
            cut is not None and size > 1 and not (self.is_stack and cut.dim == 0)
            for cut, size in zip(self.layout.cuts, self.layout.mesh_shape, strict=True)
        )

    @property
    def count(self) -> int:
        """Stored matrices: members of the stack, or one."""
        return self.layout.shape[0] if self.is_stack else 1

    def describe(self) -> dict[str, Any]:
        """As JSON, for digests and comparisons."""
        return {
            "name": self.name,
            "dtype": str(self.dtype),
            "spec": self.spec.to_json(),
            "layout": asdict(self.layout),
        }


@dataclass(frozen=True, slots=True)
class Task:
    """One stored matrix that lies on several ranks, brought to the rank that orthogonalises it.

    Attributes:
        entry: Index of its parameter in the plan.
        member: Index in the stack; 0 without one.
        worker: Global rank.
        source: The copy whose parts go to the worker, which is one of its ranks.
        homes: The copies that get the update.
        bucket: Tasks of one bucket travel together.
    """

    entry: int
    member: int
    worker: int
    source: int
    homes: tuple[int, ...]
    bucket: int


@dataclass(frozen=True, slots=True)
class ShardedPlan:
    """What every rank must agree on before the first step; equal exactly if the digests are equal.

    Attributes:
        entries: All parameters of all ranks.
        tasks: Matrices that travel, by bucket and worker. Others lie whole on ranks, which orthogonalise them there.
        ranks: Global ranks that take part, which is the order of their group.
        buckets: How many exchanges a step makes.
        loads: Cost per rank, in the order of ``ranks``.
    """

    entries: tuple[ShardedEntry, ...]
    tasks: tuple[Task, ...]
    ranks: tuple[int, ...]
    buckets: int
    loads: tuple[int, ...]

    def imbalance(self) -> float:
        """How much the most loaded rank exceeds the mean, ``max / mean - 1``."""
        return imbalance(self.loads)

    def digest(self) -> str:
        """SHA-256 of entries and tasks, in hex."""
        text = json.dumps(
            [[entry.describe() for entry in self.entries], [asdict(task) for task in self.tasks], self.ranks],
            sort_keys=True,
        )
        return hashlib.sha256(text.encode()).hexdigest()


def make_sharded_plan(
    entries: Sequence[ShardedEntry],
    ranks: Sequence[int],
    *,
    bucket_numel: int = BUCKET_NUMEL,
    links: LinkCosts | None = None,
) -> ShardedPlan:
    """Give every matrix that lies on several ranks a worker among them, and every worker's tasks buckets.

    A matrix that lies whole on a rank, also on several, is orthogonalised there; the others go from the costliest to
    the cheapest to whichever of their ranks has least to do (Graham 1969), and are then moved and swapped as long as
    that makes the busiest rank less busy. A matrix of several copies has one worker, or one in each copy, whichever the
    cost model finds cheaper (:func:`sharing_is_cheaper`).

    Args:
        entries: Parameters of all ranks, in an order that all ranks share.
        ranks: Global ranks that take part.
        bucket_numel: Most elements that a worker takes in with one bucket.
        links: Costs of the wire.
    """
    links = links or LinkCosts()
    loads = dict.fromkeys(ranks, 0)
    pending: list[_Pending] = []
    # Equal choices as one object, by which matrices that may swap their workers are known.
    known: dict[tuple[Workers, ...], tuple[Workers, ...]] = {}
    for index, entry in enumerate(entries):
        cost = matrix_cost(entry.stored, entry.spec)
        if _lies_whole(entry):
            for rank, (*stack, _, _) in itertools.chain(*entry.layout.copies()):
                loads[rank] += cost * (length(stack[0]) if stack else 1)
            continue
        for member, copies in enumerate(_holders(entry)):
            choices = _choices(copies, cost, entry, links)
            pending.append(_Pending(cost, index, member, known.setdefault(choices, choices)))
    pending.sort(key=lambda item: (-item.cost, item.entry, item.member))
    least = _LeastLoaded(loads)
    workers = _improved(pending, [least.take(item.choices, item.cost) for item in pending], loads)
    chosen = zip(pending, workers, strict=True)
    tasks, buckets = _in_buckets(entries, _tasks(entries, chosen), ranks, bucket_numel)
    return ShardedPlan(tuple(entries), tasks, tuple(ranks), buckets, tuple(loads.values()))


@dataclass(frozen=True, slots=True)
class _Pending:
    """A matrix without a worker yet, and who may be: one of ``choices``."""

    cost: int
    entry: int
    member: int
    choices: tuple[Workers, ...]


def _lies_whole(entry: ShardedEntry) -> bool:
    """Whether each stored matrix lies whole on the ranks that hold some of it; all of a stack do, or none."""
    _, held = entry.layout.copies()[0][0]
    return (length(held[-2]), length(held[-1])) == entry.stored


def _holders(entry: ShardedEntry) -> list[list[tuple[int, ...]]]:
    """Per stored matrix and copy the ranks that hold some of it."""
    copies = entry.layout.copies()
    if not entry.is_stack:
        return [[tuple(rank for rank, _ in copy) for copy in copies]]
    holders: list[list[list[int]]] = [[[] for _ in copies] for _ in range(entry.count)]
    for number, copy in enumerate(copies):
        for rank, (members, *_) in copy:
            for start, stop in members:
                for member in range(start, stop):
                    holders[member][number].append(rank)
    return [[tuple(of_copy) for of_copy in of_member] for of_member in holders]


def _choices(
    copies: Sequence[tuple[int, ...]], cost: int, entry: ShardedEntry, links: LinkCosts
) -> tuple[Workers, ...]:
    """Who may work: any one rank, or the same one of every copy; of equals the first ones of all copies come first.

    So ranks that work for all copies are the same ones in each, and leave those that work in every copy their own.
    """
    rows, columns = entry.stored
    alike = tuple(zip(*copies, strict=True))
    if len(copies) == 1 or sharing_is_cheaper(cost, rows * columns, len(copies), links):
        return tuple((rank,) for ranks in alike for rank in ranks)
    return alike


class _LeastLoaded:
    """Hands out work to those whose busiest rank has least to do, the first of equals."""

    def __init__(self, loads: dict[int, int]) -> None:
        self._loads = loads
        self._heaps: dict[tuple[Workers, ...], list[tuple[int, int]]] = {}

    def take(self, choices: tuple[Workers, ...], cost: int) -> Workers:
        heap = self._heaps.get(choices)
        if heap is None:
            heap = self._heaps[choices] = [(self._load(workers), index) for index, workers in enumerate(choices)]
            heapq.heapify(heap)
        # Loads only grow, so an entry that is out of date is too small, and comes up to be corrected.
        while heap[0][0] != self._load(choices[heap[0][1]]):
            heapq.heapreplace(heap, (self._load(choices[heap[0][1]]), heap[0][1]))
        workers = choices[heap[0][1]]
        for rank in workers:
            self._loads[rank] += cost
        return workers

    def _load(self, workers: Workers) -> int:
        return max(self._loads[rank] for rank in workers)


def _improved(pending: Sequence[_Pending], workers: Sequence[Workers], loads: dict[int, int]) -> list[Workers]:
    """The workers of each matrix after a local search, which brings ``loads`` up to date."""
    position = {rank: number for number, rank in enumerate(loads)}
    options = {
        id(choices): tuple(tuple(position[rank] for rank in choice) for choice in choices)
        for choices in {id(item.choices): item.choices for item in pending}.values()
    }
    placed: list[Place] = [tuple(position[rank] for rank in of_item) for of_item in workers]
    values = list(loads.values())
    search = LocalSearch([Job(item.cost, options[id(item.choices)]) for item in pending], placed, values)
    mean = -(-sum(values) // len(values))
    search.run(enough=mean + mean // 1024)
    ranks = list(loads)
    loads.update(zip(ranks, values, strict=True))
    return [tuple(ranks[number] for number in place) for place in placed]


def _tasks(entries: Sequence[ShardedEntry], chosen: Iterable[tuple[_Pending, Workers]]) -> list[Task]:
    """One task per worker, all in bucket 0."""
    copy_of = [
        {rank: number for number, copy in enumerate(entry.layout.copies()) for rank, _ in copy} for entry in entries
    ]
    tasks: list[Task] = []
    for item, workers in chosen:
        everywhere = tuple(range(len(entries[item.entry].layout.copies())))
        for worker in workers:
            source = copy_of[item.entry][worker]
            homes = (source,) if len(workers) > 1 else everywhere
            tasks.append(Task(item.entry, item.member, worker, source, homes, 0))
    return tasks


def _in_buckets(
    entries: Sequence[ShardedEntry], tasks: Sequence[Task], ranks: Sequence[int], bucket_numel: int
) -> tuple[tuple[Task, ...], int]:
    """Fill buckets worker by worker, the costliest first and equal shapes together; one precision in each bucket."""
    position = {rank: number for number, rank in enumerate(ranks)}

    def key(task: Task) -> tuple[Any, ...]:
        rows, columns = entries[task.entry].stored
        return -rows * columns, rows, columns, task.entry, task.member

    placed: list[Task] = []
    first = 0
    for wide in (False, True):
        filled: Counter[int] = Counter()
        bucket = dict.fromkeys(ranks, first)
        mine = [task for task in tasks if (entries[task.entry].dtype == torch.float64) == wide]
        for task in sorted(mine, key=key):
            rows, columns = entries[task.entry].stored
            if filled[task.worker] and filled[task.worker] + rows * columns > bucket_numel:
                bucket[task.worker] += 1
                filled[task.worker] = 0
            filled[task.worker] += rows * columns
            placed.append(Task(task.entry, task.member, task.worker, task.source, task.homes, bucket[task.worker]))
        first = 1 + max((task.bucket for task in placed), default=-1)
    placed.sort(key=lambda task: (task.bucket, position[task.worker], key(task)))
    return tuple(placed), first
