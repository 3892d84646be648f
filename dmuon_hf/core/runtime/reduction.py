"""How the gradients of a unit get home, averaged over all data-parallel ranks: most of them to owners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.runtime.collectives import (
    InFlight,
    exchange_to_owners,
    issue_on,
    reduce_segments_to_owners,
    uses_nccl,
)
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.layout import PackedLayout, Segment

__all__ = ["OwnerReduction", "OwnerStage", "PendingReduction", "Reduction"]


class Stage(Protocol):
    """One collective of a reduction."""

    def issue(self, buckets: Tensor) -> Callable[[], Tensor]:
        """Start on ``buckets``; the result function waits and gives this rank's part of the sum."""
        ...


class OwnerStage:
    """Sum buckets over one group, each onto its member.

    NCCL reduces every bucket to its owner (pipelined, so an owner with many peers is not flooded). gloo exchanges all
    buckets in one uneven all-to-all and the owner adds the rows up in rank order, in fp32 at least.
    """

    def __init__(
        self, group: ProcessGroup, segments: Sequence[Segment], me: int, context: DedicatedCommContext, stream: Any
    ) -> None:
        self._group = group
        self._segments = list(segments)
        self._me = me
        self._context = context
        self._stream = stream
        self._exchange = not uses_nccl(group, context.device.device)

    @property
    def own(self) -> Segment:
        return self._segments[self._me]

    def issue(self, buckets: Tensor) -> Callable[[], Tensor]:
        """Start on ``buckets`` (all segments, from the first one's start); the result function gives the own bucket."""
        size = len(self._segments)
        if size == 1:
            return lambda: buckets
        if self._exchange:
            received = buckets.new_empty((size, self.own.numel))
            splits = [segment.numel for segment in self._segments]
            flight = self._start(
                [buckets, received], lambda: exchange_to_owners(buckets, received, splits, self.own.numel, self._group)
            )

            def summed() -> Tensor:
                flight.wait()
                return received.sum(dim=0, dtype=torch.promote_types(received.dtype, torch.float32))

            return summed
        return self._reduce(buckets)

    def _reduce(self, buckets: Tensor) -> Callable[[], Tensor]:
        origin = self._segments[0].start
        owners = [rank for rank, segment in enumerate(self._segments) if segment.numel]
        pieces = [Segment(self._segments[r].start - origin, self._segments[r].numel).of(buckets) for r in owners]
        flight = self._start([buckets], lambda: reduce_segments_to_owners(pieces, owners, self._group))

        def reduced() -> Tensor:
            flight.wait()
            # A copy, so that the buffer with everybody's buckets can be freed.
            return Segment(self.own.start - origin, self.own.numel).of(buckets).clone()

        return reduced

    def _start(self, kept: list[Tensor], issue: Callable[[], list[Any]]) -> InFlight:
        return issue_on(self._context.device, self._stream, kept, issue)


class PendingReduction:
    """A unit's gradients on the way: shard stage, then (HSDP) replicate stage, then the mean on the owner."""

    def __init__(self, first: Callable[[], Tensor], second: Stage | None, *, wire: torch.dtype, divisor: float) -> None:
        self._first: Callable[[], Tensor] | None = first
        self._second = second
        self._second_result: Callable[[], Tensor] | None = None
        self._wire = wire
        self._divisor = divisor

    def finish_first_stage(self) -> None:
        """Free the packed send buffer; start the replicate stage if there is one. Safe to call twice."""
        if self._first is None:
            return
        bucket = self._first()
        self._first = None
        if self._second is None:
            self._second_result = lambda: bucket
        else:
            self._second_result = self._second.issue(bucket.to(self._wire))

    def finish(self) -> Tensor:
        """The mean gradients of this rank's own matrices, packed as the layout's slot segment, in fp32 at least."""
        self.finish_first_stage()
        assert self._second_result is not None
        total = self._second_result()
        return total.to(torch.promote_types(total.dtype, torch.float32)).div_(self._divisor)


class Reduction(ABC):
    """Packs a unit's gradients into ``numel`` elements and sends them home through one stage or two.

    ``dtype`` is that of the wire. In fp16 a sum of many ranks can overflow, so part of the mean is taken before it: the
    smallest power of two that leaves no more to divide by after it, as in FSDP2. That part is exact.

    Attributes:
        numel: Elements of the packed buffer.
        divide_factor: What the sums are divided by; ``None`` is the number of ranks.
    """

    def __init__(self, numel: int, first: Stage, second: Stage | None, topology: Topology, dtype: torch.dtype) -> None:
        self.numel = numel
        self.divide_factor: float | None = None
        self._first, self._second = first, second
        self._topology = topology
        self._dtype = dtype
        self._divisor_before = _power_near_root(topology.size) if dtype is torch.float16 else 1

    @property
    def spans_replicas(self) -> bool:
        """Whether there is a stage over replicas."""
        return self._second is not None

    @torch.no_grad()
    def launch(self, grads: Sequence[Tensor | None]) -> PendingReduction:
        """Start reducing this rank's gradients (buffer order; ``None`` is zero). Collective over the shard group."""
        packed = torch.empty(self.numel, dtype=self._dtype, device=self._topology.device)
        self._pack(packed, grads)
        if self._divisor_before != 1:
            packed.div_(self._divisor_before)
        return PendingReduction(
            self._first.issue(packed),
            self._second,
            wire=self._dtype,
            divisor=(self.divide_factor or self._topology.size) / self._divisor_before,
        )

    @abstractmethod
    def _pack(self, packed: Tensor, grads: Sequence[Tensor | None]) -> None:
        """Write the gradients, and zeros wherever none is."""

    @abstractmethod
    def own_views(self, bucket: Tensor) -> list[Tensor]:
        """This rank's gradients in what :meth:`PendingReduction.finish` returned, in buffer order."""


class OwnerReduction(Reduction):
    """Reduces the gradients of a unit to the owners."""

    def __init__(
        self, *, layout: PackedLayout, topology: Topology, context: DedicatedCommContext, dtype: torch.dtype
    ) -> None:
        assert topology.shard_group is not None
        self._layout = layout
        second = None
        if topology.replicate_group is not None:
            slots = [layout.slot_segments[(topology.shard_rank, r)] for r in range(topology.replicate_size)]
            second = OwnerStage(
                topology.replicate_group, slots, topology.replicate_rank, context, context.replicate_reduce_stream
            )
        first = OwnerStage(
            topology.shard_group, layout.shard_segments, topology.shard_rank, context, context.reduce_stream
        )
        super().__init__(layout.numel, first, second, topology, dtype)

    def _pack(self, packed: Tensor, grads: Sequence[Tensor | None]) -> None:
        present = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        missing = [i for i, grad in enumerate(grads) if grad is None]
        if present:
            torch._foreach_copy_(self._layout.views(packed, [i for i, _ in present]), [grad for _, grad in present])
        blank = self._layout.views(packed, missing) + self._layout.gaps(packed, range(len(grads)))
        if blank:
            torch._foreach_zero_(blank)

    def own_views(self, bucket: Tensor) -> list[Tensor]:
        slot = self._topology.slot
        return self._layout.views(bucket, self._layout.owned_by(slot), origin=self._layout.slot_segments[slot].start)


def _power_near_root(size: int) -> int:
    """The smallest power of two that divides ``size`` and is no smaller than what remains of it, or the largest."""
    power = 1
    while size % (2 * power) == 0 and size / power > power:
        power *= 2
    return power
