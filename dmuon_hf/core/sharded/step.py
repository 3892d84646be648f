"""One optimizer step on sharded matrices: what lies whole is updated in place, the rest goes bucket by bucket."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from dmuon_hf.core.optim.interfaces import OnBatch
from dmuon_hf.core.optim.update import MuonRule, Orthogonalize, OwnedMatrix, apply_muon
from dmuon_hf.core.sharded.bucket import Bucket, Part, alike
from dmuon_hf.core.sharded.exchange import Exchange
from dmuon_hf.core.sharded.itinerary import Itinerary, Place
from dmuon_hf.core.sharded.plan import ShardedPlan
from dmuon_hf.core.sharded.second_moments import SecondMoments
from dmuon_hf.core.sharded.wire import wire_dtype

__all__ = ["LocalParameter", "ShardedStep"]


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """What this rank holds of one parameter: local tensors of one shape, and the rule of its group.

    The second moments are those of all rows of whatever members of a stack it holds.
    """

    weight: Tensor
    grad: Tensor
    momentum: Tensor
    rule: MuonRule
    second_moment: Tensor | None = None


class ShardedStep:
    """The work of one step on one rank.

    Args:
        plan: What all ranks agreed on.
        itinerary: The plan as seen from this rank.
        exchange: How parts travel.
        local: Per entry of the plan, by index, what this rank holds of it.
        reached: Per entry and member of its stack whether some rank saw a gradient; equal on all ranks.
        second_moments: How those of rows are told.
        normalised: The entries that have any, equal on all ranks.
        orthogonalize: Newton-Schulz.
        on_batch: Called before each batch that is orthogonalised.
    """

    def __init__(
        self,
        plan: ShardedPlan,
        itinerary: Itinerary,
        exchange: Exchange,
        *,
        local: Mapping[int, LocalParameter],
        reached: Sequence[Sequence[bool]],
        second_moments: SecondMoments,
        normalised: Collection[int],
        orthogonalize: Orthogonalize,
        on_batch: OnBatch | None,
    ) -> None:
        self._plan = plan
        self._itinerary = itinerary
        self._exchange = exchange
        self._local = local
        self._reached = reached
        self._second_moments = second_moments
        self._normalised = normalised
        self._orthogonalize = orthogonalize
        self._on_batch = on_batch

    def run(self) -> int:
        """Update everything; returns how many logical matrices this rank orthogonalised. Collective.

        While one bucket is orthogonalised, the directions of the next one travel out and the updates of the last one
        travel home, so that besides it buffers of two halves of buckets exist. What lies whole is computed while the
        first one travels.
        """
        active = {number for number, task in enumerate(self._plan.tasks) if self._reached[task.entry][task.member]}
        numbers = sorted({self._plan.tasks[task].bucket for task in active})
        count = 0
        current = self._sent(numbers[0], active) if numbers else None
        count += self._update_whole()
        last: Bucket | None = None
        for following in [*numbers[1:], None] if numbers else []:
            assert current is not None
            coming = None if following is None else self._sent(following, active)
            count += current.orthogonalize(self._orthogonalize, self._on_batch)
            if last is not None:
                last.apply()
            current.send_updates()
            last, current = current, coming
        if last is not None:
            last.apply()
        kept = {index: local.second_moment for index, local in self._local.items() if local.second_moment is not None}
        self._second_moments.tell(kept, self._normalised, self._reached)
        return count

    def _sent(self, number: int, active: set[int]) -> Bucket:
        """A bucket whose directions are on their way."""
        stop = self._itinerary.stops[number].only(active)
        parts = {task: self._part(place) for task, place in stop.places.items()}
        entry = next(self._plan.entries[task.entry] for task in self._plan.tasks if task.bucket == number)
        dtype = wire_dtype(self._orthogonalize, entry.momentum_dtype, self._exchange.team.device)
        bucket = Bucket(self._exchange, stop, parts, dtype, entry.momentum_dtype)
        bucket.send_directions()
        return bucket

    def _update_whole(self) -> int:
        parts = [self._part(place) for place in self._itinerary.whole if self._reached[place.entry][place.member]]
        return sum(
            apply_muon([part.matrix for part in members], rule, self._orthogonalize, on_batch=self._on_batch)
            for rule, members in alike(parts, lambda part: part.rule).items()
        )

    def _part(self, place: Place) -> Part:
        """This rank's part of a stored matrix."""
        local, entry = self._local[place.entry], self._plan.entries[place.entry]
        matrix = OwnedMatrix(
            name=entry.name,
            weight=local.weight,
            grad=local.grad,
            momentum=local.momentum,
            spec=entry.spec,
            second_moment=local.second_moment,
        )
        if place.local is not None:
            matrix = replace(matrix.member(place.local), name=f"{entry.name}[{place.member}]")
        return Part(matrix, entry, local.rule)
