"""All ranks of the data-parallel grid, reached through the groups of its dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["GridGroup", "world_group"]


class GridGroup:
    """The ranks of a ``replicate x shard`` grid as one group that has no communicator of its own.

    A collective of all ranks is one over the shard group and then, with several replicas, one over the replicate group.
    Both carry the runtime's gathers and reductions too: every rank issues all of them in program order, on each group
    the same. Flat ranks count ``replicate * shard_size + shard``.

    Attributes:
        ranks: Global ranks, by flat rank.
        rank: Flat rank of this process.
    """

    def __init__(self, shard: ProcessGroup, replicate: ProcessGroup | None, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._shard = shard
        self._replicate = replicate
        self._shard_size = dist.get_world_size(shard)
        self._shard_rank = dist.get_rank(shard)
        replica = 0 if replicate is None else dist.get_rank(replicate)
        self.rank = replica * self._shard_size + self._shard_rank

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_fake(self) -> bool:
        """Whether there are no other processes: one rank plans for a large world."""
        return str(dist.get_backend(self._shard)) == "fake"

    @property
    def talks(self) -> bool:
        """Whether there is anybody to agree with."""
        return self.size > 1 and not self.is_fake

    def all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType, *, wait: Callable[[Any], object] | None = None
    ) -> None:
        """Reduce ``tensor`` in place over all ranks, to the same bits on each. Collective.

        Args:
            tensor: Of one shape on all ranks, where the groups communicate.
            op: ``MAX``, ``MIN`` or ``SUM``.
            wait: How to wait for a work handle; its own ``wait()`` by default.
        """
        wait = wait or _wait
        wait(dist.all_reduce(tensor, op=op, group=self._shard, async_op=True))
        if self._replicate is None:
            return
        if op != dist.ReduceOp.SUM:
            wait(dist.all_reduce(tensor, op=op, group=self._replicate, async_op=True))
            return
        # Columns of replicas add up apart from each other: in the order of ranks, or their roundings could differ.
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._replicate))]
        wait(dist.all_gather(parts, tensor, group=self._replicate, async_op=True))
        tensor.copy_(torch.stack(parts).sum(dim=0))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give all ranks the values of flat rank ``source``, in place. Collective."""
        replica, column = divmod(source, self._shard_size)
        if self._replicate is not None and self._shard_rank == column:
            dist.broadcast(tensor, group=self._replicate, group_src=replica)
        dist.broadcast(tensor, group=self._shard, group_src=column)

    def move(self, tensor: Tensor, numel: int, source: int, target: int) -> Tensor | None:
        """Bring a flat tensor of ``numel`` elements from one rank to another. Collective.

        Nothing travels to the others, but for one rank on the way if the two share neither a replica nor a column. The
        communicators are those that there are: no pair of ranks gets one of its own.

        Args:
            tensor: The values on ``source``; elsewhere an empty tensor of that dtype and device.

        Returns:
            The values on ``target``, ``None`` elsewhere.
        """
        row, column = divmod(self.rank, self._shard_size)
        row_from, column_from = divmod(source, self._shard_size)
        row_to, column_to = divmod(target, self._shard_size)
        if row_from != row_to and column == column_from:
            assert self._replicate is not None
            tensor = _move(self._replicate, tensor, numel, row_from, row_to)
        if column_from != column_to and row == row_to:
            tensor = _move(self._shard, tensor, numel, column_from, column_to)
        return tensor if self.rank == target else None

    def all_gather_object(self, value: Any) -> list[Any]:
        """What every rank passes, by flat rank. Collective; the host waits."""
        found: list[Any] = [None] * self._shard_size
        dist.all_gather_object(found, value, group=self._shard)
        if self._replicate is None:
            return found
        rows: list[Any] = [None] * dist.get_world_size(self._replicate)
        dist.all_gather_object(rows, found, group=self._replicate)
        return [item for row in rows for item in row]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """What flat rank ``source`` passes, on all ranks; it has to be picklable. Collective; the host waits."""
        replica, column = divmod(source, self._shard_size)
        parcel = [value]
        if self._replicate is not None and self._shard_rank == column:
            dist.broadcast_object_list(parcel, group=self._replicate, group_src=replica)
        dist.broadcast_object_list(parcel, group=self._shard, group_src=column)
        return parcel[0]


def world_group() -> GridGroup | None:
    """All ranks of the job, in one replica; ``None`` without a process group."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if world is None else GridGroup(world, None, range(dist.get_world_size(world)))


def _move(group: ProcessGroup, tensor: Tensor, numel: int, source: int, target: int) -> Tensor:
    """``tensor`` of ``source`` on ``target``, an empty one elsewhere: an all-to-all in which one rank sends to one."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = [numel if rank == source and peer == target else 0 for peer in range(size)]
    received = [numel if rank == target and peer == source else 0 for peer in range(size)]
    outgoing = tensor if rank == source else tensor.new_empty(0)
    incoming = tensor.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
    return incoming


def _wait(work: Any) -> None:
    work.wait()
