"""Memory for the buffers of an exchange: fresh for each, or kept from bucket to bucket and from step to step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["Scratch", "Way", "reused_ways"]

Way: TypeAlias = Literal["gather", "scatter"]
"""Directions to their workers, and updates home."""

# How many shipments of one way are under way at once: directions of the next bucket leave before those of this one are
# read, updates of the last one are applied before those of this one leave.
_AT_ONCE: Final = {"gather": 2, "scatter": 1}


def reused_ways(value: bool | str) -> frozenset[Way]:
    """What ``tp_buffer_reuse`` asks for.

    Raises:
        ConfigurationError: It is none of the values that there are.
    """
    ways: dict[bool | str, frozenset[Way]] = {
        False: frozenset(),
        True: frozenset(("gather", "scatter")),
        "all": frozenset(("gather", "scatter")),
        "gather": frozenset(("gather",)),
        "scatter": frozenset(("scatter",)),
    }
    if not isinstance(value, (bool, str)) or value not in ways:
        raise ConfigurationError(f"tp_buffer_reuse must be False, True, 'gather', 'scatter' or 'all', got {value!r}")
    return ways[value]


class Scratch:
    """Buffers of shipments, each of two: what is sent and what is received.

    A kept buffer is taken again when its last shipment was waited for and read, on the stream that takes it: what wrote
    or read it is ordered before. It grows to the largest that was asked for, and stays.
    """

    def __init__(self, device: torch.device, reused: Collection[Way] = ()) -> None:
        self._device = device
        self._kept: dict[Way, list[dict[str, Tensor]]] = {way: [{} for _ in range(_AT_ONCE[way])] for way in reused}
        self._turn: dict[Way, int] = dict.fromkeys(reused, 0)

    def take(self, way: Way, *, sent: int, received: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two flat buffers of so many elements, without values."""
        if way not in self._kept:
            return self._fresh(sent, dtype), self._fresh(received, dtype)
        place = self._kept[way][self._turn[way]]
        self._turn[way] = (self._turn[way] + 1) % len(self._kept[way])
        return self._grown(place, "sent", sent, dtype), self._grown(place, "received", received, dtype)

    def _grown(self, place: dict[str, Tensor], end: str, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        if end not in place or place[end].numel() < nbytes:
            place.pop(end, None)
            place[end] = self._fresh(nbytes, torch.uint8)
        return place[end][:nbytes].view(dtype)

    def _fresh(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)
