"""Which ranks share sharded matrices, and what they tell each other about them before the first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dmuon_hf.core.covering import cover_of, meshes_of
from dmuon_hf.core.device import device_of_mesh
from dmuon_hf.core.errors import ConfigurationError, LockstepError
from dmuon_hf.core.process_groups import clone_group
from dmuon_hf.core.sharded.plan import ShardedEntry
from dmuon_hf.core.shards.layout import ShardLayout, SplitOrder, holds_shape

__all__ = ["Team", "agree_on_entries", "join"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks that step together: global ranks in the order of ``group``, which is ``None`` for one rank."""

    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    group: ProcessGroup | None = None

    def gather(self, value: T) -> list[T]:
        """What each rank passes, in the order of ``ranks``. Collective."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType, wait: Callable[[Any], object]) -> Tensor:
        """A small tensor reduced over the team, waited for with ``wait``. Collective."""
        if self.group is None:
            return values
        result = values.detach().to(self.device, copy=True)
        wait(dist.all_reduce(result, op=op, group=self.group, async_op=True))
        return result


def join(tensors: Sequence[Tensor]) -> Team:
    """The ranks of all meshes that ``tensors`` lie on, with a group of their own. Collective over them.

    They are those of :func:`~dmuon_hf.core.covering.cover_of`. Plain tensors belong to this rank alone.
    """
    cover, links = cover_of(tensors)
    ranks = sorted(cover)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks:
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        return Team((rank,), rank, device)
    device = device_of_mesh(meshes_of(tensors)[0])
    if len(ranks) == 1:
        return Team((rank,), rank, device)
    return Team(tuple(ranks), rank, device, clone_group(ranks, like=links[0], purpose="sharded", across=links))


def agree_on_entries(
    entries: Sequence[ShardedEntry], locals_: Sequence[tuple[int, ...]], team: Team
) -> list[ShardedEntry]:
    """What all ranks of the team have, in one order, each with the split order that its local tensors tell. Collective.

    Args:
        entries: This rank's parameters.
        locals_: Shapes of their local tensors.
        team: Who takes part.

    Raises:
        LockstepError: Ranks of one mesh have different parameters.
        ConfigurationError: Local tensors are no part of the global one as placements say.
    """
    fits = [_fitting_orders(entry.layout, shape, team.rank) for entry, shape in zip(entries, locals_, strict=True)]
    described = [entry.describe() for entry in entries]
    text = json.dumps([described, fits], sort_keys=True)
    if len(set(team.gather(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return [_settled(entry, fit) for entry, fit in zip(entries, fits, strict=True)]
    return _merged(team.gather(list(zip(entries, fits, strict=True))), team)


def _fitting_orders(layout: ShardLayout, local: tuple[int, ...], rank: int) -> tuple[SplitOrder, ...]:
    """Split orders by which this rank holds a tensor of shape ``local``; see [Note: split order]."""
    if rank not in layout.ranks:
        raise ConfigurationError(f"rank {rank} is not in the mesh of ranks {layout.ranks}")
    coordinate = layout.coordinates()[layout.ranks.index(rank)]
    nested = layout.nested()
    orders: list[SplitOrder] = []
    if holds_shape(layout, coordinate, local):
        orders.append("listed")
    if nested is not None and holds_shape(nested, coordinate, local):
        orders.append("nested")
    return tuple(orders)


def _settled(entry: ShardedEntry, fits: tuple[SplitOrder, ...]) -> ShardedEntry:
    if not fits:
        raise ConfigurationError(
            f"{entry.name}: the local tensors do not have the sizes that its placements give a tensor of shape "
            f"{entry.layout.shape}. Make it with distribute_tensor, fully_shard or parallelize_module"
        )
    return replace(entry, layout=replace(entry.layout, order=fits[0]))


def _merged(
    gathered: Sequence[Sequence[tuple[ShardedEntry, tuple[SplitOrder, ...]]]], team: Team
) -> list[ShardedEntry]:
    """The parameters of all ranks: those of one name and mesh are one, and all of the mesh must have it."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, tuple[ShardedEntry, tuple[SplitOrder, ...]]]] = {}
    for rank, listed in zip(team.ranks, gathered, strict=True):
        for entry, fits in listed:
            found.setdefault((entry.name, entry.layout.ranks), {})[rank] = (entry, fits)
    entries: list[ShardedEntry] = []
    for (name, ranks), by_rank in found.items():
        missing = [rank for rank in ranks if rank not in by_rank]
        if missing:
            raise LockstepError(
                f"{name} is a Muon matrix on ranks {sorted(by_rank)} but not on {missing} of the same mesh: give every "
                "rank the same model and predicate"
            )
        first, fits = by_rank[ranks[0]]
        for rank, (entry, others) in by_rank.items():
            if entry != first:
                raise LockstepError(
                    f"{name} is {entry.describe()} on rank {rank} and {first.describe()} on rank {ranks[0]}: give "
                    "every rank the same model, predicate and matrix_spec_fn"
                )
            fits = tuple(order for order in fits if order in others)
        entries.append(_settled(first, fits))
    return entries
