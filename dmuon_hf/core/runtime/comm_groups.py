"""What a runtime plans to communicate, by unit: payloads in bytes and whose they are. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dmuon_hf.core.runtime.dedicated import DedicatedParam
from dmuon_hf.core.runtime.unit import Unit

__all__ = ["CommGroup", "ListedParam", "group_of_unit", "listed"]


@dataclass(frozen=True, slots=True)
class ListedParam:
    """A parameter of a group; ``owner`` is ``None`` where nobody owns it."""

    name: str
    shape: tuple[int, ...]
    owner: int | tuple[int, int] | None
    route: str


@dataclass(frozen=True, slots=True)
class CommGroup:
    """Parameters that travel together.

    Attributes:
        name: What errors call it.
        params: Its parameters.
        reshard_after_forward: Whether whole weights are freed between forward and backward.
        gather_bytes: Payload of one gather of its weights on this rank; 0 where every rank keeps them whole.
        reduce_bytes: Payload of one reduction of its gradients over the shard dimension, or of their average.
        publish_bytes: Payload of what a step sends to other replicas of its weights.
        buckets: Bytes of the weights of each owner slot ``(shard, replicate)`` that has some.
    """

    name: str
    params: Sequence[ListedParam]
    reshard_after_forward: bool
    gather_bytes: int
    reduce_bytes: int
    publish_bytes: int
    buckets: Mapping[tuple[int, int], int]


def listed(param: DedicatedParam) -> ListedParam:
    owner = None if param.is_sharded else param.owner_rank
    return ListedParam(param.name, tuple(param.shape), owner, param.route)


def group_of_unit(unit: Unit) -> CommGroup:
    element = unit.weights.buffer.element_size()
    owned = {slot: part.numel * element for slot, part in unit.layout.slot_segments.items() if part.numel}
    return CommGroup(
        name=unit.name,
        params=[listed(param) for param in unit.params],
        reshard_after_forward=unit.reshard_after_forward,
        gather_bytes=unit.gather_bytes,
        reduce_bytes=unit.reduce_bytes,
        publish_bytes=unit.weights.placement.publish_numel * element,
        buckets={} if unit.params[0].is_sharded else owned,
    )
