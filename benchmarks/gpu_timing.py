"""Clocks for a CPU and for a GPU that runs behind the host, and what every section of the GPU check reports."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Report", "Setting", "median_seconds", "synchronize"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how thoroughly to check.

    Attributes:
        tiny: Shapes that a CPU gets through in seconds.
        deadline: ``time.monotonic()`` after which no further part starts.
    """

    device: torch.device
    tiny: bool
    deadline: float

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline


@dataclass(slots=True)
class Report:
    """What a section found: failures make the check fail, ``left_out`` says what was not looked at and why."""

    checks: int = 0
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def check(self, holds: bool, message: str) -> None:
        self.checks += 1
        if not holds:
            self.failures.append(message)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """An exception inside fails this part alone; what follows is still looked at."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {error}")


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def median_seconds(
    runs: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int, warmup: int = 2, rotate: bool = True
) -> dict[str, float]:
    """The median time of each of ``runs``, which take turns, from an idle device to an idle device.

    ``rotate`` lets another one begin each round; without it they keep their order.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(warmup + rounds):
        shift = i % len(names) if rotate else 0
        for name in names[shift:] + names[:shift]:
            synchronize(device)
            start = time.perf_counter()
            runs[name]()
            synchronize(device)
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(measured) for name, measured in times.items()}
