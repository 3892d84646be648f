"""HSDP: bring an updated weight from its owner to the owner's peers in the other replicas.

Every replica gathers inside itself, so the rank at the owner's shard coordinate of each replica keeps a copy of the
newest weight in the compute dtype. The publish is a broadcast over the replicate dimension, issued by ``step()`` and
waited for where the copy is read.
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

__all__ = ["ColumnCopy"]


class ColumnCopy:
    """The published weights of one unit that belong to this rank's shard coordinate."""

    def __init__(
        self,
        *,
        name: str,
        layout: PackedLayout,
        params: Sequence[DedicatedParam],
        topology: Topology,
        context: DedicatedCommContext,
        dtype: torch.dtype,
    ) -> None:
        assert topology.replicate_group is not None
        column = topology.shard_rank
        bucket = layout.shard_segments[column]
        self.buffer = torch.zeros(bucket.numel, dtype=dtype, device=topology.device)
        self._group = topology.replicate_group
        self._context = context
        self._name = name
        own = layout.owned_by(topology.slot)
        self._own_views = layout.views(self.buffer, own, origin=bucket.start)
        self._own_params = [params[i] for i in own]
        self._slots: list[tuple[int, Segment]] = []
        for replicate in range(topology.replicate_size):
            segment = layout.slot_segments[(column, replicate)]
            if segment.numel:
                self._slots.append((replicate, Segment(segment.start - bucket.start, segment.numel)))
        self._published: tuple[Version, ...] | None = None
        self._in_flight: InFlight | None = None
        self._last_read: Any = None

    def is_current(self, versions: tuple[Version, ...]) -> bool:
        return self._published == versions

    def publish(self, versions: tuple[Version, ...]) -> None:
        """Issue the broadcast of the weights that ``versions`` names; a publish in flight is waited for first.

        Collective over the replicate group; a column that owns nothing of this unit has nothing to send.
        """
        self.wait()
        device = self._context.device
        if self._last_read is not None:
            device.current_stream().wait_event(self._last_read)
            self._last_read = None
        self._context.monitor.issue(Channel.REPLICATE, f"publish of unit {self._name}")

        def issue() -> list[object]:
            segments: list[Tensor] = [segment.of(self.buffer) for _, segment in self._slots]
            return broadcast_segments(segments, [replicate for replicate, _ in self._slots], self._group)

        with torch.no_grad(), record_function(f"dmuon::publish {self._name}"):
            if self._own_views:
                torch._foreach_copy_(self._own_views, [param.master for param in self._own_params])
            self._in_flight = issue_on(device, self._context.replicate_broadcast_stream, [self.buffer], issue)
        self._published = versions

    def read_into(self, bucket: Tensor) -> None:
        """Copy the published weights on the current stream, which alone waits for them."""
        self.wait()
        bucket.copy_(self.buffer)
        if not self._context.device.is_cpu:
            self._last_read = self._context.device.record_event(self._context.device.current_stream())

    def wait(self) -> None:
        """Order the current stream (CPU: the host) after the last publish."""
        if self._in_flight is not None:
            with self._context.monitor.at(f"publish of unit {self._name}"):
                self._in_flight.wait()
            self._in_flight = None
