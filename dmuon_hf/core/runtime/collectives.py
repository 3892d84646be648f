"""Collectives of the runtime: issued once, kept alive by their record, waited for where the result is used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _coalescing_manager

from dmuon_hf.core.device import DeviceHandle

__all__ = [
    "InFlight",
    "broadcast_segments",
    "exchange_to_owners",
    "issue_on",
    "reduce_segments_to_owners",
    "device_of_group",
    "uses_nccl",
]


class InFlight:
    """One batch of issued collectives.

    The record owns every tensor the collectives read or write until they have finished. On an accelerator the batch is
    ordered by an event on the side stream and waiting costs the host nothing; on the CPU the work handles are waited
    for. The tensors' memory goes back to the stream that was current at the issue: where another one waits, the
    allocator is told; where nobody does, because the record is dropped with its model, that stream waits itself.
    """

    __slots__ = ("_device", "_event", "_home", "_kept", "_works")

    def __init__(
        self, device: DeviceHandle, works: Sequence[Any], event: Any, kept: Sequence[Tensor], *, home: Any = None
    ) -> None:
        self._device = device
        self._works = list(works)
        self._event = event
        self._home = home
        self._kept = list(kept)

    def wait(self) -> None:
        """Order the current stream (CPU: the host) after the batch. Safe to call twice."""
        works, self._works = self._works, []
        for work in works:
            self._device.host_wait(work)
        if self._event is not None:
            current = self._device.current_stream()
            current.wait_event(self._event)
            if current != self._home:
                for tensor in self._kept:
                    self._device.record_stream(tensor, current)
            self._event = None
        self._kept.clear()

    def __del__(self) -> None:
        if self._event is not None and not sys.is_finalizing():
            self._home.wait_event(self._event)


def issue_on(device: DeviceHandle, stream: Any, kept: Sequence[Tensor], issue: Callable[[], list[Any]]) -> InFlight:
    """Start asynchronous collectives, whose works ``issue`` returns, beside the current stream.

    On an accelerator ``stream`` first waits for the current stream: there the buffers were allocated and filled. Then
    it waits for the collectives, which the backend runs on a stream of its own. Sources that others write, such as
    masters, are copied into the buffers before this call, on the current stream, so that nothing but ``kept`` is used
    beside it; a published copy is read there, and whoever writes it next waits for that.
    """
    if device.is_cpu:
        return InFlight(device, issue(), None, kept)
    home = device.current_stream()
    stream.wait_stream(home)
    with device.stream(stream):
        for work in issue():
            work.wait()
        event = device.record_event(stream)
    return InFlight(device, [], event, kept, home=home)


def uses_nccl(group: ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL carries the tensors of ``device``, whatever string the group was initialised with.

    ``get_backend`` answers ``"undefined"`` for ``init_process_group()`` and ``"cuda:nccl,cpu:gloo"`` for that string.
    """
    return str(group._get_backend(device).name()) == "nccl"


def device_of_group(group: ProcessGroup) -> torch.device:
    """Where small tensors are reduced over ``group``: on the accelerator with NCCL, else on the host."""
    cuda = torch.device("cuda")
    return cuda if cuda in group._device_types and uses_nccl(group, cuda) else torch.device("cpu")


@contextmanager
def _coalesced(group: ProcessGroup, device: torch.device, works: list[Any]) -> Iterator[None]:
    """Fuse the collectives issued inside into one launch where the backend can (NCCL); gloo has no such thing.

    Asynchronous ones: of synchronous ones NCCL records the end on a stream that they do not run on, so that its
    watchdog would not see them hang.
    """
    if not uses_nccl(group, device):
        yield
        return
    with _coalescing_manager(group, device=device, async_ops=True) as manager:
        yield
    works[:] = manager.works


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
