"""How often, how much and how long units are gathered for forward: ``DMUON_RECORD_FORWARD_PROFILE=1``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from dmuon_hf.core.environment import switch
from dmuon_hf.core.timing import Timer

__all__ = ["ForwardProfile", "empty_profile", "forward_profile"]

_COUNTERS: Final = {"gathers": 0, "bytes": 0, "waits": 0, "gather_ms": 0.0, "wait_ms": 0.0}
# Timings whose events have come are added up when so many are waiting for it.
_MOST_PENDING: Final = 256


def forward_profile(device: torch.device) -> ForwardProfile | None:
    """A profile if the environment asks for one, as it is when the model is dedicated."""
    return ForwardProfile(device) if switch("DMUON_RECORD_FORWARD_PROFILE") else None


def empty_profile() -> dict[str, Any]:
    """What is collected where nothing is recorded."""
    return {"enabled": False, **_COUNTERS, "groups": {}}


class ForwardProfile:
    """Counters by unit. Gathers of backward passes are not counted.

    ``gather_ms`` is the time from the issue of a gather to its end: on the side stream of an accelerator, on the CPU as
    the host that waits sees it. ``wait_ms`` is what the forward stood still for.
    """

    def __init__(self, device: torch.device) -> None:
        self._timer = Timer(device)
        self._device = device
        self._units: dict[str, dict[str, Any]] = {}
        self._issued: dict[str, Any] = {}
        self._pending: list[tuple[str, str, Any, Any]] = []

    @contextmanager
    def gather(self, unit: str, nbytes: int, stream: Any) -> Iterator[None]:
        """Around the issue of a gather, whose end is on ``stream`` then."""
        if _in_backward():
            self._issued.pop(unit, None)
            yield
            return
        counters = self._of(unit)
        counters["gathers"] += 1
        counters["bytes"] += nbytes
        start = self._timer.mark()
        yield
        if self._device.type == "cpu":
            self._issued[unit] = start
        else:
            self._note(unit, "gather_ms", start, self._timer.mark(stream))

    @contextmanager
    def wait(self, unit: str) -> Iterator[None]:
        """Around the wait for a gather."""
        if _in_backward():
            yield
            return
        start = self._timer.mark()
        yield
        end = self._timer.mark()
        self._of(unit)["waits"] += 1
        self._note(unit, "wait_ms", start, end)
        if unit in self._issued:
            self._note(unit, "gather_ms", self._issued.pop(unit), end)

    def collect(self, *, clear: bool, synchronize: bool) -> dict[str, Any]:
        """Totals and counters by unit; timings that the device has not come to yet stay for the next collection."""
        if synchronize and self._device.type != "cpu":
            torch.get_device_module(self._device.type).synchronize(self._device)
        self._settle()
        groups = {name: dict(counters) for name, counters in self._units.items()}
        totals = {key: sum((group[key] for group in groups.values()), zero) for key, zero in _COUNTERS.items()}
        if clear:
            self._units.clear()
        return {"enabled": True, **totals, "groups": groups}

    def _of(self, unit: str) -> dict[str, Any]:
        return self._units.setdefault(unit, dict(_COUNTERS))

    def _note(self, unit: str, what: str, start: Any, end: Any) -> None:
        self._pending.append((unit, what, start, end))
        if len(self._pending) >= _MOST_PENDING:
            self._settle()

    def _settle(self) -> None:
        waiting = []
        for entry in self._pending:
            unit, what, start, end = entry
            if self._timer.is_past(end):
                self._of(unit)[what] += self._timer.between(start, end)
            else:
                waiting.append(entry)
        self._pending = waiting


def _in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) != -1
