"""Packed exchange: parts of many matrices between all ranks, in one uneven all-to-all.

Both ways of a bucket are the same thing, directions to workers and updates home: a list of parts for each peer, laid
out one after the other. Sender and receiver derive the order from the plan, so nothing but values is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon_hf.core.device import DeviceHandle
from dmuon_hf.core.runtime.collectives import InFlight, issue_on
from dmuon_hf.core.scratch import Scratch, Way
from dmuon_hf.core.sharded.ranks import Team

__all__ = ["Exchange", "Parcel", "Shipment"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """A part on its way: the peer's position in the team, and its elements."""

    peer: int
    numel: int


class Shipment:
    """One all-to-all in ``dtype``: buffers, flat views of each parcel in them, and the collective once it is issued.

    What comes in is cast to ``read_as`` as one tensor, where that is another dtype.
    """

    def __init__(
        self,
        exchange: Exchange,
        way: Way,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        dtype: torch.dtype,
        *,
        read_as: torch.dtype | None = None,
    ) -> None:
        self._exchange = exchange
        sizes = [[parcel.numel for parcel in parcels] for parcels in (outgoing, incoming)]
        sent, received = map(sum, sizes)
        self._sent, self._received = exchange.scratch.take(way, sent=sent, received=received, dtype=dtype)
        self.outgoing, self.incoming = _parts(self._sent, sizes[0]), _parts(self._received, sizes[1])
        self._splits = [_splits(parcels, len(exchange.team.ranks)) for parcels in (incoming, outgoing)]
        self._read_as = read_as or dtype
        self._flight: InFlight | None = None

    def send(self) -> None:
        """Issue the exchange of what was written into ``outgoing``. Collective over the team."""
        self._flight = self._exchange.issue(self._received, self._sent, *self._splits)
        del self.outgoing, self._sent

    def wait(self) -> list[Tensor]:
        """What came in, once it is there."""
        if self._flight is None:
            raise RuntimeError("wait() before send()")
        self._flight.wait()
        if self._read_as is self._received.dtype:
            return self.incoming
        return list(self._received.to(self._read_as).split([parcel.numel() for parcel in self.incoming]))


class Exchange:
    """Makes shipments over the group of a team, beside the stream that computes.

    Args:
        team: Who takes part.
        reused: The ways whose buffers are kept.
        wait: How the host waits for a work handle on the CPU.
    """

    def __init__(
        self, team: Team, reused: Collection[Way] = (), *, wait: Callable[[Any], object] | None = None
    ) -> None:
        self.team = team
        self.scratch = Scratch(team.device, reused)
        self._device = DeviceHandle(team.device)
        if wait is not None:
            self._device.host_wait = wait
        self._stream: Any = None

    def issue(self, received: Tensor, sent: Tensor, incoming: list[int], outgoing: list[int]) -> InFlight:
        """Start the all-to-all. Collective over the team."""
        if self._stream is None:
            self._stream = self._device.new_stream(high_priority=True)

        def start() -> list[Any]:
            work = dist.all_to_all_single(received, sent, incoming, outgoing, group=self.team.group, async_op=True)
            return [work]

        return issue_on(self._device, self._stream, [received, sent], start)

    def sum(self, values: Tensor) -> None:
        """Sum a small tensor up over the team, in place, and wait for it. Collective."""
        self._device.host_wait(dist.all_reduce(values, group=self.team.group, async_op=True))


def _parts(buffer: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(buffer.split(sizes)) if sizes else []


def _splits(parcels: Sequence[Parcel], peers: int) -> list[int]:
    splits = [0] * peers
    for parcel in parcels:
        splits[parcel.peer] += parcel.numel
    return splits
