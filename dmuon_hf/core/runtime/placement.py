"""How the weights of a unit become whole on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.runtime.collectives import InFlight, broadcast_segments, issue_on
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.dedicated import DedicatedParam, Version
from dmuon_hf.core.runtime.layout import PackedLayout
from dmuon_hf.core.runtime.publish import ColumnCopy

__all__ = ["OwnerBroadcast", "WeightPlacement"]


class WeightPlacement(Protocol):
    """Fills a unit's packed buffer with whole weights."""

    @property
    def buffer_numel(self) -> int:
        """Elements of the packed buffer: those of the layout at least."""
        ...

    @property
    def publish_numel(self) -> int:
        """Elements of what :meth:`publish` sends to this rank, or from it."""
        ...

    @property
    def stream(self) -> Any:
        """The side stream of the gathers."""
        ...

    def gather(self, buffer: Tensor, versions: tuple[Version, ...]) -> InFlight:
        """Issue what brings the weights named by ``versions`` into ``buffer``. Collective over the shard group."""
        ...

    def publish(self) -> None:
        """Bring updated weights to where :meth:`gather` reads them. Collective over the replicate group."""
        ...

    def finish_publish(self) -> None:
        """Order the reader after the last publish."""
        ...


class OwnerBroadcast:
    """Each owner broadcasts its bucket: from its masters on a 1-D mesh, from the published column copy under HSDP."""

    def __init__(
        self,
        *,
        layout: PackedLayout,
        params: Sequence[DedicatedParam],
        topology: Topology,
        context: DedicatedCommContext,
        column: ColumnCopy | None,
    ) -> None:
        assert topology.shard_group is not None
        self.buffer_numel = layout.numel
        self._layout = layout
        self._topology = topology
        self._context = context
        self._own = layout.owned_by(topology.slot)
        self._own_params = [params[i] for i in self._own]
        self._column = column

    @property
    def publish_numel(self) -> int:
        return 0 if self._column is None else self._layout.shard_segments[self._topology.shard_rank].numel

    @property
    def stream(self) -> Any:
        return self._context.broadcast_stream

    @torch.no_grad()
    def gather(self, buffer: Tensor, versions: tuple[Version, ...]) -> InFlight:
        """On an accelerator the side stream waits for the publish, and computation goes on beside it."""
        layout, topology, column = self._layout, self._topology, self._column
        kept = [buffer]
        if column is None:
            self._copy_in(buffer)
        else:
            column.require(versions)
            kept.append(column.buffer)

        def issue() -> list[object]:
            if column is not None:
                column.read_into(layout.shard_segments[topology.shard_rank].of(buffer))
            if topology.shard_size == 1:
                return []
            sources = [shard for shard, segment in enumerate(layout.shard_segments) if segment.numel]
            segments = [layout.shard_segments[shard].of(buffer) for shard in sources]
            assert topology.shard_group is not None
            return broadcast_segments(segments, sources, topology.shard_group)

        return issue_on(self._context.device, self.stream, kept, issue)

    def publish(self) -> None:
        if self._column is not None:
            self._column.publish()

    def finish_publish(self) -> None:
        if self._column is not None:
            self._column.wait()

    def _copy_in(self, buffer: Tensor) -> None:
        if self._own:
            masters = [param.master for param in self._own_params]
            torch._foreach_copy_(self._layout.views(buffer, self._own), masters)
            gaps = self._layout.gaps(buffer, self._own)
            if gaps:
                torch._foreach_zero_(gaps)
