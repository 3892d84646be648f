"""Weights that become whole by one all-gather of even shards, which the owners fill after each update.

An owner keeps and updates the whole matrix as ever. ``step()`` cuts what was updated: every rank of a replica gets an
even, contiguous part of the unit's packed weights, in the compute dtype, by one all-to-all; under HSDP the ranks of one
shard coordinate then exchange their parts over the replicas. A forward gathers the parts in one collective in which
all links carry the same load, whoever owns how much of the unit. The price is a shard of the weights on every rank, and
the all-to-all in ``step()``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from dmuon_hf.core.lockstep import Channel
from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.runtime.collectives import InFlight, broadcast_segments, issue_on
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.dedicated import Version
from dmuon_hf.core.runtime.layout import Segment
from dmuon_hf.core.runtime.publish import UnitContent

__all__ = ["ShardGather"]

_ALIGNMENT = 8


class ShardGather:
    """`WeightPlacement` of one unit. ``buffer_numel`` is what its packed buffer has to hold: equal shards."""

    def __init__(self, unit: UnitContent, topology: Topology, context: DedicatedCommContext) -> None:
        assert topology.shard_group is not None
        self._unit = unit
        self._topology = topology
        self._context = context
        self._shard_group = topology.shard_group
        size, layout = topology.shard_size, unit.layout
        length = -(-layout.numel // (size * _ALIGNMENT)) * _ALIGNMENT
        self.buffer_numel = length * size
        self._shard_numel = length
        chunks = [Segment(rank * length, length) for rank in range(size)]
        mine, replicate = chunks[topology.shard_rank], topology.replicate_rank
        slots = layout.slot_segments
        self._sends = [_common(slots[topology.slot], chunk).numel for chunk in chunks]
        self._receives = [_common(slots[(shard, replicate)], mine).numel for shard in range(size)]
        # The shard as it arrives: replica by replica, in each owner by owner; and where the pieces belong.
        self._pieces: list[tuple[Segment, Segment]] = []
        self._parts: list[Segment] = []
        offset = 0
        for replica in range(topology.replicate_size):
            start = offset
            for shard in range(size):
                piece = _common(slots[(shard, replica)], mine)
                if piece.numel:
                    place = Segment(piece.start - mine.start, piece.numel)
                    self._pieces.append((place, Segment(offset, piece.numel)))
                offset += piece.numel
            self._parts.append(Segment(start, offset - start))
        self._arrived = torch.zeros(length, dtype=unit.dtype, device=topology.device)
        self._published: tuple[Version, ...] | None = None
        self._in_flight: InFlight | None = None
        self._read: Any = None

    @property
    def publish_numel(self) -> int:
        return self._shard_numel

    @property
    def stream(self) -> Any:
        return self._context.broadcast_stream

    def publish(self) -> None:
        """Send the owners' weights to the shards, unless these have them. Collective over both groups."""
        versions = self._unit.versions()
        if self._published != versions:
            self._issue(versions)

    @torch.no_grad()
    def gather(self, buffer: Tensor, versions: tuple[Version, ...]) -> InFlight:
        """On an accelerator the side stream waits for the publish, and computation goes on beside it."""
        if self._published != versions:
            self._issue(versions)
        device, stream = self._context.device, self.stream
        shard = self._arrived if self._topology.replicate_size == 1 else torch.zeros_like(self._arrived)

        def issue() -> list[object]:
            self.finish_publish()
            if shard is not self._arrived and self._pieces:
                here = [place.of(shard) for place, _ in self._pieces]
                torch._foreach_copy_(here, [part.of(self._arrived) for _, part in self._pieces])
            work = dist.all_gather_into_tensor(buffer, shard, group=self._shard_group, async_op=True)
            if device.is_cpu:
                return [work]
            work.wait()
            self._read = device.record_event(stream)
            return []

        return issue_on(device, stream, [buffer, shard], issue)

    def finish_publish(self) -> None:
        """Order the current stream (CPU: the host) after the last publish."""
        if self._in_flight is not None:
            with self._context.monitor.at(f"publish of unit {self._unit.name}"):
                self._in_flight.wait()
            self._in_flight = None

    @torch.no_grad()
    def _issue(self, versions: tuple[Version, ...]) -> None:
        self.finish_publish()
        device, monitor, name = self._context.device, self._context.monitor, self._unit.name
        if self._read is not None:
            device.current_stream().wait_event(self._read)
            self._read = None
        outgoing = self._outgoing()
        incoming = self._parts[self._topology.replicate_rank].of(self._arrived)
        monitor.issue(Channel.SHARD, f"publish of unit {name}")
        if self._topology.replicate_group is not None:
            monitor.issue(Channel.REPLICATE, f"publish of unit {name}")

        def scatter() -> list[object]:
            work = dist.all_to_all_single(
                incoming, outgoing, self._receives, self._sends, group=self._shard_group, async_op=True
            )
            if self._topology.replicate_group is None:
                return [work]
            if device.is_cpu:
                with monitor.at(f"publish of unit {name}"):
                    device.host_wait(work)
            else:
                work.wait()
            sources = [replica for replica, part in enumerate(self._parts) if part.numel]
            segments = [self._parts[replica].of(self._arrived) for replica in sources]
            return broadcast_segments(segments, sources, self._topology.replicate_group)

        with record_function(f"dmuon::publish {name}"):
            self._in_flight = issue_on(
                device, self._context.replicate_broadcast_stream, [outgoing, self._arrived], scatter
            )
        self._published = versions

    def _outgoing(self) -> Tensor:
        """This rank's own weights, packed as its slot of the layout."""
        layout, slot = self._unit.layout, self._topology.slot
        segment, positions = layout.slot_segments[slot], layout.owned_by(slot)
        packed = torch.zeros(segment.numel, dtype=self._unit.dtype, device=self._topology.device)
        if positions:
            views = layout.views(packed, positions, origin=segment.start)
            torch._foreach_copy_(views, [self._unit.params[i].master for i in positions])
        return packed


def _common(first: Segment, second: Segment) -> Segment:
    """What two runs of elements have in common."""
    start = max(first.start, second.start)
    end = min(first.start + first.numel, second.start + second.numel)
    return Segment(start, max(0, end - start))
