"""Kernels that take as long as they are told to, by a clock that moves only when they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dmuon_hf.core.ns.autotune import Choice, tuner
from dmuon_hf.core.ns.autotune.candidates import build
from dmuon_hf.core.ns.autotune.product import Product
from dmuon_hf.core.ns.library import LibraryKernel

CPU = torch.device("cpu")


class VirtualTime:
    """Seconds that pass only where somebody adds them."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self, run: Callable[[], object], repeat: int) -> float:
        start = self.now
        for _ in range(repeat):
            run()
        return (self.now - start) / repeat


@dataclass
class TimedKernel:
    """The library product, which takes ``seconds`` (of each call in turn, the last one for good) and may be spoilt."""

    time: VirtualTime
    seconds: float | list[float] = 1.0
    spoil: Callable[[Tensor], Tensor] = lambda result: result
    calls: int = 0
    library: LibraryKernel = field(default_factory=LibraryKernel)
    name: str = "cublas"

    def gram(self, X: Tensor) -> Tensor:
        return self._timed(self.library.gram(X))

    def symmetric(self, A: Tensor, B: Tensor, C: Tensor | None = None, **scalars: float) -> Tensor:
        return self._timed(self.library.symmetric(A, B, C, **scalars))

    def one_by_one(self, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        return self.library.one_by_one(rows, dtype, device)

    def symmetric_share(self, rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> float:
        return self.library.symmetric_share(rows, depth, dtype, device)

    def _timed(self, result: Tensor) -> Tensor:
        seconds = self.seconds if isinstance(self.seconds, list) else [self.seconds]
        self.time.now += seconds[min(self.calls, len(seconds) - 1)]
        self.calls += 1
        return self.spoil(result)


class Bench:
    """Every candidate of the tuner as a ``TimedKernel``: of ``seconds`` where that names it, else of one second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.time = VirtualTime()
        self.seconds: Mapping[Choice, float] = {}
        self.spoils: dict[Choice, Callable[[Tensor], Tensor]] = {}
        self.built: dict[Choice, list[TimedKernel]] = {}
        monkeypatch.setenv("DMUON_CACHE_DIR", str(folder))
        monkeypatch.delenv("DMUON_NS_KERNEL", raising=False)
        monkeypatch.delenv("DMUON_NS_AUTOTUNE", raising=False)
        monkeypatch.setattr(tuner, "clock_of", lambda device: self.time.clock)
        monkeypatch.setattr(tuner.Autotuner, "_build", lambda _, choice: self.build(choice))

    def build(self, choice: Choice) -> TimedKernel:
        library = build(choice)
        assert isinstance(library, LibraryKernel)
        kernel = TimedKernel(self.time, self.seconds.get(choice, 1.0), library=library)
        kernel.spoil = self.spoils.get(choice, kernel.spoil)
        self.built.setdefault(choice, []).append(kernel)
        return kernel

    def calls(self, choice: Choice) -> int:
        return sum(kernel.calls for kernel in self.built.get(choice, []))

    @property
    def total(self) -> int:
        return sum(kernel.calls for kernels in self.built.values() for kernel in kernels)


def product(**changes: object) -> Product:
    """A small Gram product on the CPU."""
    values = {
        "gram": True,
        "rows": 64,
        "depth": 96,
        "batch": None,
        "dtype": torch.float32,
        "device": "cpu",
        "row_major": True,
        "fused": False,
    }
    return Product(**{**values, **changes})  # type: ignore[arg-type]
