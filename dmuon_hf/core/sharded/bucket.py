"""One bucket of one step: directions to their workers, Newton-Schulz, updates home."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dmuon_hf.core.optim.interfaces import OnBatch
from dmuon_hf.core.optim.update import (
    MuonRule,
    Orthogonalize,
    OwnedMatrix,
    Stack,
    advance_momentum,
    apply_updates,
    orthogonal_updates,
    second_moments,
)
from dmuon_hf.core.plan import MatrixSpec
from dmuon_hf.core.scratch import Way
from dmuon_hf.core.sharded.exchange import Exchange, Parcel, Shipment
from dmuon_hf.core.sharded.itinerary import Leg, Stop
from dmuon_hf.core.sharded.plan import ShardedEntry
from dmuon_hf.core.sharded.wire import copy_pairs, header_numel, read_parts, write_parts

__all__ = ["Bucket", "Part", "alike"]

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a stored matrix, the parameter that it belongs to, and the rule of its group."""

    matrix: OwnedMatrix
    entry: ShardedEntry
    rule: MuonRule

    @property
    def decomposition(self) -> tuple[tuple[int, int], MatrixSpec, MuonRule]:
        """What matrices of one stack have in common."""
        return self.entry.stored, self.entry.spec, self.rule


class Bucket:
    """Used once, in this order on all ranks: directions are sent, orthogonalised, updates sent, applied.

    Args:
        exchange: How parts travel.
        stop: What this rank does, without the matrices that nobody saw a gradient for.
        parts: This rank's part of the matrix of every task of the bucket that it holds some of.
        dtype: What travels.
        wide: What momentum and updates are computed in, one dtype for a bucket.
    """

    def __init__(
        self, exchange: Exchange, stop: Stop, parts: Mapping[int, Part], dtype: torch.dtype, wide: torch.dtype
    ) -> None:
        self._exchange = exchange
        self._stop = stop
        self._parts = parts
        self._dtype = dtype
        self._wide = wide
        self._updates: dict[int, Tensor] = {}
        self._shipment: Shipment | None = None

    def send_directions(self) -> None:
        """Advance the momentum of every part and send directions to their workers. Collective."""
        directions: dict[int, Tensor] = {}
        for rule, tasks in alike(self._parts, lambda task: self._parts[task].rule).items():
            advanced = advance_momentum([self._parts[task].matrix for task in tasks], rule)
            directions.update(zip(tasks, advanced, strict=True))
        header = header_numel(self._dtype)
        shipment = self._ship("gather", self._stop.sends, self._stop.takes, header=header)
        write_parts(shipment.outgoing, [directions[leg.task] for leg in self._stop.sends])
        shipment.send()
        self._shipment = shipment

    def orthogonalize(self, orthogonalize: Orthogonalize, on_batch: OnBatch | None) -> int:
        """Turn the directions that came in into updates; returns how many matrices."""
        if not self._stop.work:
            self._received()
            return 0
        stacks, tasks = self._assembled()
        if on_batch is not None:
            on_batch([self._parts[task].matrix for task in self._stop.work])
        results, count = orthogonal_updates(stacks, orthogonalize)
        for members, result in zip(tasks, results, strict=True):
            self._updates.update(zip(members, result.unbind(0), strict=True))
        return count

    def send_updates(self) -> None:
        """Send updates home to everyone who holds some of their matrix. Collective."""
        shipment = self._ship("scatter", self._stop.gives, self._stop.gets, read_as=self._wide)
        copy_pairs(
            [
                block
                for leg, segment in zip(self._stop.gives, shipment.outgoing, strict=True)
                for block in leg.blocks(segment.view(leg.shape), self._updates[leg.task])
            ]
        )
        self._updates.clear()
        shipment.send()
        self._shipment = shipment

    def apply(self) -> None:
        """Apply the updates that came home to this rank's parts."""
        received = self._received()
        updates = {
            leg.task: segment.view(leg.shape).to(self._parts[leg.task].matrix.weight.device)
            for leg, segment in zip(self._stop.gets, received, strict=True)
        }
        groups = alike(self._parts, lambda task: (self._parts[task].rule, self._parts[task].matrix.weight.dtype))
        for (rule, _), tasks in groups.items():
            apply_updates([self._parts[task].matrix for task in tasks], [updates[task] for task in tasks], rule)

    def _assembled(self) -> tuple[list[Stack], list[list[int]]]:
        """Stacks of whole directions, one for each stored shape, decomposition and rule, and the tasks in them."""
        place = {task: number for number, task in enumerate(self._stop.work)}
        received = read_parts(self._received(), [place[leg.task] for leg in self._stop.takes])
        groups = alike(self._stop.work, lambda task: self._parts[task].decomposition)
        stacks: list[Stack] = []
        target: dict[int, Tensor] = {}
        for (stored, spec, rule), tasks in groups.items():
            stack = torch.empty((len(tasks), *stored), dtype=self._dtype, device=self._exchange.team.device)
            kept = second_moments([self._parts[task].matrix for task in tasks])
            stacks.append(Stack(stack, spec, rule, kept))
            target.update(zip(tasks, stack.unbind(0), strict=True))
        copy_pairs(
            [
                (whole, part)
                for leg, segment in zip(self._stop.takes, received, strict=True)
                for part, whole in leg.blocks(segment.view(leg.shape), target[leg.task])
            ]
        )
        return stacks, list(groups.values())

    def _ship(
        self,
        way: Way,
        outgoing: Sequence[Leg],
        incoming: Sequence[Leg],
        *,
        header: int = 0,
        read_as: torch.dtype | None = None,
    ) -> Shipment:
        parcels = _parcels(outgoing, header), _parcels(incoming, header)
        return Shipment(self._exchange, way, *parcels, self._dtype, read_as=read_as)

    def _received(self) -> list[Tensor]:
        if self._shipment is None:
            raise RuntimeError("nothing was sent yet")
        shipment, self._shipment = self._shipment, None
        return shipment.wait()


def alike(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by what they have in common, in order of first appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _parcels(legs: Sequence[Leg], header: int) -> list[Parcel]:
    return [Parcel(leg.peer, leg.numel + header) for leg in legs]
