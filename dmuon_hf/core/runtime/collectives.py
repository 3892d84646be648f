"""Collectives of the runtime: issued once, kept alive by their record, waited for where the result is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _coalescing_manager

from dmuon_hf.core.device import DeviceHandle

__all__ = ["InFlight", "broadcast_segments", "exchange_to_owners", "issue_on", "reduce_segments_to_owners"]


class InFlight:
    """One batch of issued collectives.

    The record owns every tensor the collectives read or write until they have finished. On an accelerator the batch is
    ordered by an event on the side stream and waiting costs the host nothing; on the CPU the work handles are waited
    for.
    """

    __slots__ = ("_device", "_event", "_kept", "_works")

    def __init__(self, device: DeviceHandle, works: Sequence[Any], event: Any, kept: Sequence[Tensor]) -> None:
        self._device = device
        self._works = list(works)
        self._event = event
        self._kept = list(kept)

    def wait(self) -> None:
        """Order the current stream (CPU: the host) after the batch. Safe to call twice."""
        works, self._works = self._works, []
        for work in works:
            self._device.host_wait(work)
        if self._event is not None:
            self._device.current_stream().wait_event(self._event)
            self._event = None
        self._kept.clear()


def issue_on(
    device: DeviceHandle,
    stream: Any,
    kept: Sequence[Tensor],
    issue: Callable[[], list[Any]],
    *,
    after: Any | None = None,
) -> InFlight:
    """Run ``issue`` (copies, then asynchronous collectives whose works it returns) on a side stream.

    The side stream first waits for the current stream, because the buffers were allocated, and the sources last
    written, there; ``after`` is one more event to wait for.
    """
    if device.is_cpu:
        return InFlight(device, issue(), None, kept)
    stream.wait_stream(device.current_stream())
    if after is not None:
        stream.wait_event(after)
    with device.stream(stream):
        for work in issue():
            work.wait()
        event = device.record_event(stream)
    return InFlight(device, [], event, kept)


@contextmanager
def _coalesced(group: ProcessGroup, device: torch.device, works: list[Any]) -> Iterator[None]:
    """Fuse the collectives issued inside into one launch where the backend can (NCCL); gloo has no such thing."""
    if dist.get_backend(group) != "nccl":
        yield
        return
    with _coalescing_manager(group, device=device, async_ops=True) as manager:
        yield
    works[:] = [manager]


def broadcast_segments(segments: Sequence[Tensor], sources: Sequence[int], group: ProcessGroup) -> list[Any]:
    """Broadcast each contiguous segment from its group rank; returns the work handles. Collective over ``group``."""
    works: list[Any] = []
    if not segments:
        return works
    with _coalesced(group, segments[0].device, works):
        for segment, source in zip(segments, sources, strict=True):
            works.append(dist.broadcast(segment, group=group, group_src=source, async_op=True))
    return [work for work in works if work is not None]


def exchange_to_owners(
    send: Tensor, receive: Tensor, splits: Sequence[int], own: int, group: ProcessGroup
) -> list[Any]:
    """Send every rank's contribution for bucket ``r`` to group rank ``r``: one uneven all-to-all.

    ``send`` holds the buckets one after the other (``splits`` elements each); ``receive`` is ``(group size, own)``. The
    caller adds up the rows, in rank order, so the sum is the same on every run. Fastest form on gloo, whose
    ``reduce_scatter`` moves a whole all-reduce; wasteful for an owner with many peers.
    """
    size = dist.get_world_size(group)
    work = dist.all_to_all_single(
        receive.view(-1),
        send,
        output_split_sizes=[own] * size,
        input_split_sizes=list(splits),
        group=group,
        async_op=True,
    )
    return [work]


def reduce_segments_to_owners(segments: Sequence[Tensor], owners: Sequence[int], group: ProcessGroup) -> list[Any]:
    """Sum each contiguous segment in place onto its owner (group rank). Collective over ``group``."""
    works: list[Any] = []
    if not segments:
        return works
    with _coalesced(group, segments[0].device, works):
        for segment, owner in zip(segments, owners, strict=True):
            works.append(dist.reduce(segment, group=group, group_dst=owner, async_op=True))
    return [work for work in works if work is not None]
