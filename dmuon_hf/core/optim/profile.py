"""How long the phases of a step take, where ``Muon(record_step_profile=True)`` asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from dmuon_hf.core.timing import Timer

__all__ = ["PHASES", "StepProfile"]

PHASES: Final = ("prepare", "agreement", "muon", "adamw", "publish")
"""``prepare``: gradients and the model are looked at. ``agreement``: the ranks agree on the step, the one place where
the host waits. ``muon``: the sources, with the issue of their publishes. ``adamw``: the adamw route. ``publish``: what
is waited for, or gathered ahead, at the end of the step."""


class StepProfile:
    """Marks around the phases of the last step; none where it is off."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._timer: Timer | None = None
        self._marks: list[tuple[str, Any, Any]] = []

    def begin(self, device: torch.device) -> None:
        """A step begins: what is known of the one before is forgotten."""
        self._marks.clear()
        self._timer = Timer(device) if self._enabled else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as part of the phase ``name``."""
        if self._timer is None:
            yield
            return
        start = self._timer.mark()
        yield
        self._marks.append((name, start, self._timer.mark()))

    def consume(self) -> dict[str, float] | None:
        """Milliseconds of each phase of the last step and of all of it, once; waits for the device."""
        marks, self._marks = self._marks, []
        if self._timer is None or not marks:
            return None
        result = dict.fromkeys((f"{name}_ms" for name in PHASES), 0.0)
        for name, start, end in marks:
            result[f"{name}_ms"] += self._timer.between(start, end)
        return {**result, "total_ms": self._timer.between(marks[0][1], marks[-1][2])}
