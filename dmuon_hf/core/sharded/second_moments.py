"""Second moments of rows that one rank moves on and several keep: told by one small sum at the end of a step.

Each rank that holds some of a matrix keeps the second moments of all its rows, so that any of them can be its worker in
the next run, and any can save them ([Note: told second moments]). A step changes them at the worker alone; the others
take what it has.

[Note: told second moments] A sum of one value and zeros is that value, so all ranks keep the same to the bit. Stacks
that are cut into members alone lie whole, and nothing is told of them. Of several workers of one matrix, each for its
copies, the first one tells all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_hf.core.optim.normuon import second_moment_shape
from dmuon_hf.core.sharded.exchange import Exchange
from dmuon_hf.core.sharded.itinerary import holders_of
from dmuon_hf.core.sharded.plan import ShardedPlan
from dmuon_hf.core.sharded.wire import copy_pairs
from dmuon_hf.core.shards.runs import placed

__all__ = ["SecondMoments"]


@dataclass(frozen=True, slots=True)
class _Told:
    """The second moments of one stored matrix.

    Attributes:
        entry: Index of its parameter in the plan.
        member: Index in the stack; 0 without one.
        author: Global rank that moves them on and tells them.
        rows: How many they are.
        local: Index into what this rank keeps of a stack; ``None`` of a matrix.
        kept: Whether this rank keeps them.
    """

    entry: int
    member: int
    author: int
    rows: int
    local: int | None
    kept: bool


class SecondMoments:
    """What is told of them, in an order that all ranks of the team share.

    Args:
        plan: What all ranks agreed on.
        exchange: That of their team.
    """

    def __init__(self, plan: ShardedPlan, exchange: Exchange) -> None:
        self._plan = plan
        self._exchange = exchange
        self._rank = exchange.team.rank
        self._told: tuple[_Told, ...] | None = None

    def tell(self, kept: Mapping[int, Tensor], normalised: Collection[int], reached: Sequence[Sequence[bool]]) -> None:
        """Bring what this rank keeps up to date, in place. Collective over the team if anything is told.

        Args:
            kept: Per entry that this rank holds some of its local second moments.
            normalised: The entries that have any, equal on all ranks.
            reached: Per entry and member of its stack whether it was updated; equal on all ranks.
        """
        if self._exchange.team.group is None or not normalised:
            return
        if self._told is None:
            self._told = tuple(self._all_told())
        told = [each for each in self._told if each.entry in normalised and reached[each.entry][each.member]]
        if not told:
            return
        dtypes = {self._plan.entries[each.entry].momentum_dtype for each in told}
        values = torch.zeros(
            sum(each.rows for each in told), dtype=max(dtypes, key=lambda dtype: dtype.itemsize), device=self._device
        )
        segments = list(zip(told, values.split([each.rows for each in told]), strict=True))
        copy_pairs([(segment, _rows(kept, each)) for each, segment in segments if each.author == self._rank])
        self._exchange.sum(values)
        copy_pairs(
            [(_rows(kept, each), segment) for each, segment in segments if each.kept and each.author != self._rank]
        )

    @property
    def _device(self) -> torch.device:
        return self._exchange.team.device

    def _all_told(self) -> Iterator[_Told]:
        authors: dict[tuple[int, int], int] = {}
        for task in self._plan.tasks:
            authors.setdefault((task.entry, task.member), task.worker)
        for index, entry in enumerate(self._plan.entries):
            # A matrix of one row lies whole where it is cut, too.
            if entry.is_cut_inside:
                for holder, member in holders_of(entry, index):
                    authors.setdefault((index, member), holder)
        for (index, member), author in sorted(authors.items()):
            entry = self._plan.entries[index]
            (rows,) = second_moment_shape(entry.stored, entry.spec)
            places = self._places(index)
            yield _Told(index, member, author, rows, places.get(member), member in places)

    def _places(self, index: int) -> dict[int, int | None]:
        """The members of an entry of which this rank keeps second moments, with their indices in what it keeps."""
        entry = self._plan.entries[index]
        if self._rank not in entry.layout.ranks:
            return {}
        if not entry.is_stack:
            return {0: None}
        coordinate = entry.layout.coordinates()[entry.layout.ranks.index(self._rank)]
        return {
            member: local
            for inner, outer in placed(entry.layout.held(coordinate)[0])
            for local, member in enumerate(range(outer.start, outer.stop), start=inner.start)
        }


def _rows(kept: Mapping[int, Tensor], each: _Told) -> Tensor:
    return kept[each.entry] if each.local is None else kept[each.entry][each.local]
