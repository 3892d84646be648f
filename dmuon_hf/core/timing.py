"""Time between points of a program on its device: events of an accelerator, the clock of the host on the CPU."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

__all__ = ["Timer"]


class Timer:
    """Marks on a device, and the milliseconds between two of them.

    On an accelerator a mark is an event on a stream: it costs the host nothing, and the time between two is that of the
    stream. On the CPU a mark is the time at which the host came by.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self, stream: Any = None) -> Any:
        """A mark here, on ``stream`` or the current one."""
        if self._device.type == "cpu":
            return perf_counter()
        module = torch.get_device_module(self._device.type)
        event = module.Event(enable_timing=True)
        event.record(stream if stream is not None else module.current_stream(self._device))
        return event

    def is_past(self, mark: Any) -> bool:
        """Whether the device has come to a mark. Does not wait."""
        return self._device.type == "cpu" or bool(mark.query())

    def between(self, start: Any, end: Any) -> float:
        """Milliseconds from one mark to a later one; waits for the device to come to it."""
        if self._device.type == "cpu":
            return float(1e3 * (end - start))
        end.synchronize()
        return float(start.elapsed_time(end))
