"""HSDP: bring an updated weight from its owner to the owner's peers in the other replicas.

Every replica gathers inside itself, so the rank at the owner's shard coordinate of each replica keeps a copy of the
newest weight in the compute dtype. The publish is a broadcast over the replicate dimension, issued by ``step()`` and
waited for where the copy is read.

[Note: publish buckets]
One broadcast per unit and replica that owns some of it, or with ``replicate_broadcast_bucket_mb`` one per bucket of
consecutive units: then the weights of one replica lie together in the bucket's buffer. A bucket is sent when the last
of its units is published, or before that when a unit of it is wanted; all of it, so that what is stale in it is known
from the versions alone. Units, their sizes and versions are the same on every rank, and so are buckets and their turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from dmuon_hf.core.lockstep import Channel
from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.runtime.collectives import InFlight, broadcast_segments, issue_on
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.dedicated import DedicatedParam, Version
from dmuon_hf.core.runtime.layout import PackedLayout, Segment

__all__ = ["ColumnCopy", "PublishBucket", "UnitContent", "column_copies"]


class UnitContent:
    """What a column copy is made of: a unit's layout, its parameters in buffer order, and the dtype they travel in.

    ``largest_column`` are the bytes of the largest column by the plan: the same number on every rank.
    """

    def __init__(
        self,
        name: str,
        layout: PackedLayout,
        params: Sequence[DedicatedParam],
        dtype: torch.dtype,
        *,
        largest_column: int,
    ) -> None:
        self.name = name
        self.layout = layout
        self.params = params
        self.dtype = dtype
        self.largest_column = largest_column

    def versions(self) -> tuple[Version, ...]:
        return tuple(param.version for param in self.params)


def column_copies(
    units: Sequence[UnitContent], topology: Topology, context: DedicatedCommContext
) -> dict[str, ColumnCopy]:
    """The column copies of all units, by name, in buckets of as many bytes as ``context`` says, or of one unit.

    Args:
        units: All units, in plan order.
        topology: An HSDP grid.
        context: Of the model; its ``publish_bucket_bytes`` are the most that the largest column of a bucket of several
            units has, 0 for a bucket per unit.
    """
    buckets: list[list[UnitContent]] = []
    filled = 0.0
    for unit in units:
        fits = (
            buckets
            and buckets[-1][-1].dtype is unit.dtype
            and filled + unit.largest_column <= context.publish_bucket_bytes
        )
        if not fits:
            buckets.append([])
            filled = 0.0
        buckets[-1].append(unit)
        filled += unit.largest_column
    copies = (copy for members in buckets for copy in PublishBucket(members, topology, context).copies)
    return {copy.name: copy for copy in copies}


class PublishBucket:
    """Units that are published together: the weights of one replica after the other, in each unit by unit."""

    def __init__(self, members: Sequence[UnitContent], topology: Topology, context: DedicatedCommContext) -> None:
        assert topology.replicate_group is not None
        self._members = list(members)
        self._group = topology.replicate_group
        self._context = context
        self._name = members[0].name if len(members) == 1 else f"{members[0].name} to {members[-1].name}"
        column, offset = topology.shard_rank, 0
        self._segments: list[tuple[int, Segment]] = []
        pieces: list[list[tuple[Segment, Segment]]] = [[] for _ in members]
        for replicate in range(topology.replicate_size):
            start = offset
            for member, found in zip(members, pieces, strict=True):
                segment = member.layout.slot_segments[(column, replicate)]
                origin = member.layout.shard_segments[column].start
                if segment.numel:
                    found.append((Segment(segment.start - origin, segment.numel), Segment(offset, segment.numel)))
                offset += segment.numel
            if offset > start:
                self._segments.append((replicate, Segment(start, offset - start)))
        self.buffer = torch.zeros(offset, dtype=members[0].dtype, device=topology.device)
        self.copies = [
            ColumnCopy(self, member, found, is_last=member is members[-1])
            for member, found in zip(members, pieces, strict=True)
        ]
        own = [self._own(member, found, topology.slot) for member, found in zip(members, pieces, strict=True)]
        self._own_views = [view for views, _ in own for view in views]
        self._own_params = [param for _, params in own for param in params]
        self._published: list[tuple[Version, ...] | None] = [None] * len(members)
        self._in_flight: InFlight | None = None
        self._reads: list[Any] = []

    def _own(
        self, member: UnitContent, pieces: Sequence[tuple[Segment, Segment]], slot: tuple[int, int]
    ) -> tuple[list[Tensor], list[DedicatedParam]]:
        """Where this rank's own weights of a unit go, and which they are."""
        positions = member.layout.owned_by(slot)
        origin = member.layout.shard_segments[slot[0]].start
        start = member.layout.slot_segments[slot].start - origin
        place = next((there for here, there in pieces if here.start == start), Segment(0, 0))
        views = member.layout.views(self.buffer, positions, origin=start + origin - place.start)
        return views, [member.params[i] for i in positions]

    def published(self, member: UnitContent) -> tuple[Version, ...] | None:
        """The versions of a unit that the buffer holds, or will when the publish in flight has arrived."""
        return self._published[self._members.index(member)]

    @property
    def is_current(self) -> bool:
        return all(self.published(member) == member.versions() for member in self._members)

    def issue(self) -> None:
        """Issue the broadcast of the current weights; one in flight is waited for first.

        Collective over the replicate group; a column that owns nothing of these units has nothing to send.
        """
        self.wait()
        device = self._context.device
        for event in self._reads:
            device.current_stream().wait_event(event)
        self._reads.clear()
        self._context.monitor.issue(Channel.REPLICATE, f"publish of unit {self._name}")

        def broadcast() -> list[object]:
            segments: list[Tensor] = [segment.of(self.buffer) for _, segment in self._segments]
            return broadcast_segments(segments, [replicate for replicate, _ in self._segments], self._group)

        with torch.no_grad(), record_function(f"dmuon::publish {self._name}"):
            if self._own_views:
                torch._foreach_copy_(self._own_views, [param.master for param in self._own_params])
            self._in_flight = issue_on(device, self._context.replicate_broadcast_stream, [self.buffer], broadcast)
        self._published = [member.versions() for member in self._members]

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    def note_read(self) -> None:
        """The current stream has read the buffer."""
        if not self._context.device.is_cpu:
            self._reads.append(self._context.device.record_event(self._context.device.current_stream()))

    def wait(self) -> None:
        """Order the current stream (CPU: the host) after the last publish."""
        if self._in_flight is not None:
            with self._context.monitor.at(f"publish of unit {self._name}"):
                self._in_flight.wait()
            self._in_flight = None


class ColumnCopy:
    """The published weights of one unit that belong to this rank's shard coordinate; see [Note: publish buckets]."""

    def __init__(
        self, bucket: PublishBucket, unit: UnitContent, pieces: Sequence[tuple[Segment, Segment]], *, is_last: bool
    ) -> None:
        self.name = unit.name
        self.buffer = bucket.buffer
        self._bucket = bucket
        self._unit = unit
        self._pieces = list(pieces)
        self._is_last = is_last

    def publish(self) -> None:
        """The unit's weights are as they are to be read: send the bucket if it waited for them alone. Collective."""
        if self._is_last and not self._bucket.is_current:
            self._bucket.issue()

    def require(self, versions: tuple[Version, ...]) -> None:
        """The unit is wanted with these versions: send the bucket unless it holds them. Collective."""
        if self._bucket.published(self._unit) != versions:
            self._bucket.issue()

    @property
    def in_flight(self) -> bool:
        """Whether a publish has been issued and not waited for."""
        return self._bucket.in_flight

    def read_into(self, bucket: Tensor) -> None:
        """Copy the published weights on the current stream, which alone waits for them."""
        self.wait()
        if self._pieces:
            here = [to.of(bucket) for to, _ in self._pieces]
            torch._foreach_copy_(here, [there.of(self.buffer) for _, there in self._pieces])
        self._bucket.note_read()

    def wait(self) -> None:
        """Order the current stream (CPU: the host) after the last publish."""
        self._bucket.wait()
