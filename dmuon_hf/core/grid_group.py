"""All ranks of a grid, reached through the groups of its dimensions."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["GridGroup", "world_group"]


class GridGroup:
    """The ranks of a grid as one group that has no communicator of its own.

    The dimensions are, from the outermost to the innermost, replicas, shards and parts of a tensor; those of one rank
    are left out. A collective of all ranks is one over the group of each dimension in turn. They carry the runtime's
    other traffic too: every rank issues everything in program order, on each group the same. Flat ranks count row by
    row, the innermost dimension fastest.

    Attributes:
        ranks: Global ranks, by flat rank.
        rank: Flat rank of this process.
    """

    def __init__(self, groups: Sequence[ProcessGroup], ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._groups = tuple(groups)
        self._sizes = [dist.get_world_size(group) for group in groups]
        self._place = tuple(dist.get_rank(group) for group in groups)
        self.rank = 0
        for size, at in zip(self._sizes, self._place, strict=True):
            self.rank = self.rank * size + at

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def name(self) -> str:
        """Tells the ranks apart from those of other grids, as long with many ranks as with few."""
        digest = zlib.crc32(",".join(map(str, self.ranks)).encode())
        return f"{self.ranks[0]}-{self.ranks[-1]}-{digest:08x}"

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """Those of the dimensions, from the outermost to the innermost."""
        return self._groups

    @property
    def is_fake(self) -> bool:
        """Whether there are no other processes: one rank plans for a large world."""
        return str(dist.get_backend(self._groups[-1])) == "fake"

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
        *outer, innermost = self._groups
        wait(dist.all_reduce(tensor, op=op, group=innermost, async_op=True))
        for group in reversed(outer):
            if op != dist.ReduceOp.SUM:
                wait(dist.all_reduce(tensor, op=op, group=group, async_op=True))
                continue
            # Lines of ranks add up apart from each other: in the order of ranks, or their roundings could differ.
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            wait(dist.all_gather(parts, tensor, group=group, async_op=True))
            tensor.copy_(torch.stack(parts).sum(dim=0))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give all ranks the values of flat rank ``source``, in place. Collective."""
        place = self._place_of(source)
        for axis, group in enumerate(self._groups):
            if self._place[axis + 1 :] == place[axis + 1 :]:
                dist.broadcast(tensor, group=group, group_src=place[axis])

    def move(self, tensor: Tensor, numel: int, source: int, target: int) -> Tensor | None:
        """Bring a flat tensor of ``numel`` elements from one rank to another. Collective.

        Nothing travels to the others, but for one rank on the way per dimension that the two do not share. The
        communicators are those that there are: no pair of ranks gets one of its own.

        Args:
            tensor: The values on ``source``; elsewhere an empty tensor of that dtype and device.

        Returns:
            The values on ``target``, ``None`` elsewhere.
        """
        start, end, mine = self._place_of(source), self._place_of(target), self._place
        for axis, group in enumerate(self._groups):
            on_the_way = mine[:axis] == end[:axis] and mine[axis + 1 :] == start[axis + 1 :]
            if start[axis] != end[axis] and on_the_way:
                tensor = _move(group, tensor, numel, start[axis], end[axis])
        return tensor if self.rank == target else None

    def all_gather_object(self, value: Any) -> list[Any]:
        """What every rank passes, by flat rank. Collective; the host waits."""
        found = [value]
        for group in reversed(self._groups):
            rows: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(rows, found, group=group)
            found = [item for row in rows for item in row]
        return found

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """What flat rank ``source`` passes, on all ranks; it has to be picklable. Collective; the host waits."""
        place, parcel = self._place_of(source), [value]
        for axis, group in enumerate(self._groups):
            if self._place[axis + 1 :] == place[axis + 1 :]:
                dist.broadcast_object_list(parcel, group=group, group_src=place[axis])
        return parcel[0]

    def _place_of(self, rank: int) -> tuple[int, ...]:
        """Coordinate of a flat rank."""
        place: list[int] = []
        for size in reversed(self._sizes):
            rank, at = divmod(rank, size)
            place.append(at)
        return tuple(reversed(place))


def world_group() -> GridGroup | None:
    """All ranks of the job, in one replica; ``None`` without a process group."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if world is None else GridGroup([world], range(dist.get_world_size(world)))


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
