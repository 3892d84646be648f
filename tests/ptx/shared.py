"""Shared memory of one CTA, with the order that barriers and waits give to its accesses.

Between two barriers nothing orders the warps of a CTA, so two warps must not touch the same byte there unless both
read, or both write the same value. A byte that a ``cp.async`` will fill must not be touched until the thread that
issued the copy has waited for it; to the other warps it is written at that wait.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tests.ptx.errors import OutOfBoundsError
from tests.ptx.memory import check_alignment
from tests.ptx.registers import WARP

__all__ = ["Report", "SharedMemory"]


@dataclass(slots=True)
class Report:
    """What the interpreter saw that gives wrong results on a GPU, if not here: instruction -> how often.

    ``in_flight``: touched bytes that a ``cp.async`` was still filling. ``unordered``: touched bytes that another warp
    touched since the last barrier. ``uninitialized``: read shared bytes that nothing had written. ``unfinished``:
    copies that no thread had waited for when its CTA ended.
    """

    in_flight: Counter[str] = field(default_factory=Counter)
    unordered: Counter[str] = field(default_factory=Counter)
    uninitialized: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0
    steps: int = 0

    @property
    def clean(self) -> bool:
        return not (self.in_flight or self.unordered or self.uninitialized or self.unfinished)


@dataclass(slots=True)
class _Copy:
    """One ``cp.async`` of several threads. ``group`` counts the groups that its thread had committed before."""

    threads: np.ndarray
    offsets: np.ndarray
    data: np.ndarray
    group: np.ndarray
    landed: np.ndarray


class SharedMemory:
    """Bytes, the warps that touched them since the last barrier (as bit sets), and the copies in flight."""

    def __init__(self, size: int, threads: int, report: Report) -> None:
        self.report = report
        self.instruction = ""
        self._data = np.zeros(size, dtype=np.uint8)
        self._initialized = np.zeros(size, dtype=bool)
        self._in_flight = np.zeros(size, dtype=np.int16)
        self._readers = np.zeros(size, dtype=np.uint32)
        self._writers = np.zeros(size, dtype=np.uint32)
        self._committed = np.zeros(threads, dtype=np.int64)
        self._copies: list[_Copy] = []

    def read(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> np.ndarray:
        """``(n, size)`` bytes at ``n`` addresses, for the threads with those numbers."""
        offsets = self._locate(addresses, size)
        if not self._initialized[offsets].all():
            self.report.uninitialized[self.instruction] += 1
        for warp, chosen in _by_warp(threads):
            touched = offsets[chosen]
            self._note_order(self._writers[touched], warp)
            self._readers[touched] |= np.uint32(1 << warp)
        return self._data[offsets]

    def write(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        """Store ``(n, size)`` bytes at ``n`` addresses, for the threads with those numbers."""
        offsets = self._locate(addresses, data.shape[1])
        self._order_writes(offsets, data, threads)
        self._data[offsets] = data
        self._initialized[offsets] = True

    def copy_later(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        """``cp.async``: fill the bytes at some time before the wait that names their group."""
        offsets = self._locate(addresses, data.shape[1])
        self._order_writes(offsets, data, threads)
        np.add.at(self._in_flight, offsets, 1)
        landed = np.zeros(threads.size, dtype=bool)
        self._copies.append(_Copy(threads, offsets, data, self._committed[threads], landed))

    def commit(self, mask: np.ndarray) -> None:
        """``cp.async.commit_group`` of the threads in ``mask``."""
        self._committed += mask

    def wait(self, mask: np.ndarray, unfinished: int | None) -> None:
        """``cp.async.wait_group``: all groups but the newest ``unfinished``; ``None``: also what is not committed."""
        for copy in self._copies:
            ready = mask[copy.threads] & ~copy.landed
            if unfinished is not None:
                ready &= copy.group < self._committed[copy.threads] - unfinished
            offsets = copy.offsets[ready]
            self._data[offsets] = copy.data[ready]
            self._initialized[offsets] = True
            np.subtract.at(self._in_flight, offsets, 1)
            for warp, chosen in _by_warp(copy.threads[ready]):
                self._writers[offsets[chosen]] |= np.uint32(1 << warp)
            copy.landed |= ready
        self._copies = [copy for copy in self._copies if not copy.landed.all()]

    def barrier(self) -> None:
        """All warps have met: what they did so far comes before what they do next."""
        self._readers[:] = 0
        self._writers[:] = 0

    def finish(self) -> None:
        """The CTA ends."""
        self.report.unfinished += sum(int((~copy.landed).sum()) for copy in self._copies)

    def _locate(self, addresses: np.ndarray, size: int) -> np.ndarray:
        check_alignment(addresses, size)
        if addresses.size and (addresses.min() < 0 or addresses.max() + size > self._data.size):
            bad = int(addresses[(addresses < 0) | (addresses + size > self._data.size)][0])
            raise OutOfBoundsError(f"byte {bad} of {self._data.size} bytes of shared memory")
        offsets: np.ndarray = addresses[:, None] + np.arange(size)
        if self._in_flight[offsets].any():
            self.report.in_flight[self.instruction] += 1
        return offsets

    def _order_writes(self, offsets: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        for warp, chosen in _by_warp(threads):
            touched = offsets[chosen]
            changed = (self._data[touched] != data[chosen]) | ~self._initialized[touched]
            self._note_order((self._readers[touched] | self._writers[touched]) * changed, warp)
            self._writers[touched] |= np.uint32(1 << warp)

    def _note_order(self, warps: np.ndarray, warp: int) -> None:
        if (warps & np.uint32(~(1 << warp) & 0xFFFFFFFF)).any():
            self.report.unordered[self.instruction] += 1


def _by_warp(threads: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """The warps among ``threads``, each with the positions of its threads."""
    warps = threads // WARP
    return [(int(warp), np.nonzero(warps == warp)[0]) for warp in np.unique(warps)]
