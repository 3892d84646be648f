"""Parameters that lie in even runs of rows on all ranks, as FSDP2 keeps them: the route ``"sharded_adamw"``.

Very large tensors that AdamW updates, embeddings above all: an owner would keep and update all of one, and every gather
would come from its link alone. Cut into rows (torch's ``Shard(0)``; the replicas of HSDP hold the same) each rank keeps
and updates its part, forward gathers it in one all-gather, backward reduces and scatters its gradient. Each is a unit
of its own, so that rows arrive in their places and nothing is copied besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.runtime.collectives import InFlight, issue_on
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.dedicated import DedicatedParam, Version
from dmuon_hf.core.runtime.layout import Segment
from dmuon_hf.core.runtime.reduction import OwnerStage, Reduction

__all__ = ["RowGather", "RowReduction", "RowSplit"]


@dataclass(frozen=True, slots=True)
class RowSplit:
    """The runs of one parameter's elements, of equal length with what the last ones are padded by.

    Attributes:
        numel: Of the whole parameter.
        chunk: Elements of each run.
        size: Number of runs.
        rank: Whose run this rank has.
    """

    numel: int
    chunk: int
    size: int
    rank: int

    @classmethod
    def of(cls, shape: Sequence[int], topology: Topology) -> RowSplit:
        """How ``Shard(0)`` cuts a tensor over the shard dimension."""
        rows = -(-shape[0] // topology.shard_size)
        return cls(math.prod(shape), rows * math.prod(shape[1:]), topology.shard_size, topology.shard_rank)

    @property
    def padded(self) -> int:
        return self.chunk * self.size

    @property
    def held(self) -> int:
        """Elements of this rank's run that are the parameter's."""
        return min(max(self.numel - self.rank * self.chunk, 0), self.chunk)

    def own(self, buffer: Tensor) -> Tensor:
        """This rank's run of a buffer of all."""
        return buffer[self.rank * self.chunk : (self.rank + 1) * self.chunk]


class RowGather:
    """`WeightPlacement` of one such parameter: an all-gather of the live rows, so that there is nothing to publish."""

    def __init__(self, param: DedicatedParam, topology: Topology, context: DedicatedCommContext) -> None:
        assert topology.shard_group is not None
        self._param = param
        self._split = RowSplit.of(param.shape, topology)
        self._group = topology.shard_group
        self._context = context
        self.buffer_numel = self._split.padded
        self.publish_numel = 0

    @property
    def stream(self) -> Any:
        return self._context.row_stream

    @torch.no_grad()
    def gather(self, buffer: Tensor, versions: tuple[Version, ...]) -> InFlight:
        """In place: each rank's rows are cast into their part of the buffer, from which they are sent."""
        own, held = self._split.own(buffer), self._split.held
        own[:held].copy_(self._param.master.view(-1))
        # Nobody reads the padding, but a communicator that looks for NaN does.
        own[held:].zero_()

        def issue() -> list[Any]:
            if self._split.size == 1:
                return []
            return [dist.all_gather_into_tensor(buffer, own, group=self._group, async_op=True)]

        return issue_on(self._context.device, self.stream, [buffer], issue)

    def publish(self) -> None:
        """Nothing: every replica has updated its own rows alike."""

    def finish_publish(self) -> None:
        """Nothing is published."""


class RowReduction(Reduction):
    """Sums one gradient onto the ranks that have its rows; under HSDP the replicas then add theirs up."""

    def __init__(
        self, param: DedicatedParam, topology: Topology, context: DedicatedCommContext, dtype: torch.dtype
    ) -> None:
        assert topology.shard_group is not None
        self._split = split = RowSplit.of(param.shape, topology)
        self._row = tuple(param.shape[1:])
        second = None if topology.replicate_group is None else _ReplicaSum(topology.replicate_group, context)
        runs = [Segment(rank * split.chunk, split.chunk) for rank in range(split.size)]
        first = _RowStage(topology.shard_group, runs, topology.shard_rank, context, context.reduce_stream)
        super().__init__(split.padded, first, second, topology, dtype)

    def _pack(self, packed: Tensor, grads: Sequence[Tensor | None]) -> None:
        (grad,) = grads
        if grad is None:
            packed.zero_()
            return
        packed[: self._split.numel].view(grad.shape).copy_(grad)
        packed[self._split.numel :].zero_()

    def own_views(self, bucket: Tensor) -> list[Tensor]:
        return [bucket[: self._split.held].view(-1, *self._row)]


class _RowStage(OwnerStage):
    """All runs are as long, so that NCCL reduces and scatters them in one collective."""

    def _reduce(self, buckets: Tensor) -> Callable[[], Tensor]:
        own = buckets.new_empty(self.own.numel)
        flight = self._start(
            [buckets, own], lambda: [dist.reduce_scatter_tensor(own, buckets, group=self._group, async_op=True)]
        )

        def reduced() -> Tensor:
            flight.wait()
            return own

        return reduced


class _ReplicaSum:
    """The second stage: every replica gets the sum, bit for bit the same."""

    def __init__(self, group: dist.ProcessGroup, context: DedicatedCommContext) -> None:
        self._group = group
        self._context = context

    def issue(self, bucket: Tensor) -> Callable[[], Tensor]:
        context = self._context
        flight = issue_on(
            context.device,
            context.replicate_reduce_stream,
            [bucket],
            lambda: [dist.all_reduce(bucket, group=self._group, async_op=True)],
        )

        def summed() -> Tensor:
            flight.wait()
            return bucket

        return summed
