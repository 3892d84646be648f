"""Global memory: buffers far apart, each with a mask of the bytes that belong to a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.ptx.errors import MisalignedError, OutOfBoundsError

__all__ = ["Buffer", "GlobalMemory", "check_alignment"]

_APART = 1 << 32


def check_alignment(addresses: np.ndarray, size: int) -> None:
    if (addresses % size).any():
        bad = int(addresses[addresses % size != 0][0])
        raise MisalignedError(f"address {bad:#x} of a {size}-byte access")


@dataclass(slots=True)
class Buffer:
    """``data`` is the caller's memory, so that results appear there. ``writes`` counts the stores to each byte."""

    address: int
    data: np.ndarray
    valid: np.ndarray
    writes: np.ndarray


class GlobalMemory:
    """What kernels read and write through 64-bit addresses. Every access must lie in valid bytes of one buffer."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []

    def add(self, data: np.ndarray, *, valid: np.ndarray | None = None, misalignment: int = 0) -> Buffer:
        """Give ``data``, contiguous bytes, an address ``misalignment`` bytes past a multiple of 256."""
        address = (len(self._buffers) + 1) * _APART + misalignment
        everywhere = np.ones(data.size, dtype=bool)
        buffer = Buffer(address, data, everywhere if valid is None else valid, np.zeros(data.size, dtype=np.uint16))
        self._buffers.append(buffer)
        return buffer

    def read(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """``(n, size)`` bytes at ``n`` addresses."""
        out = np.empty((addresses.size, size), dtype=np.uint8)
        for buffer, chosen, offsets in self._locate(addresses, size):
            out[chosen] = buffer.data[offsets]
        return out

    def write(self, addresses: np.ndarray, data: np.ndarray) -> None:
        """Store ``(n, size)`` bytes at ``n`` addresses."""
        for buffer, chosen, offsets in self._locate(addresses, data.shape[1]):
            buffer.data[offsets] = data[chosen]
            np.add.at(buffer.writes, offsets, 1)

    def _locate(self, addresses: np.ndarray, size: int) -> list[tuple[Buffer, np.ndarray, np.ndarray]]:
        check_alignment(addresses, size)
        numbers = addresses // _APART - 1
        parts = []
        for number in np.unique(numbers):
            chosen = np.nonzero(numbers == number)[0]
            if not 0 <= number < len(self._buffers):
                raise OutOfBoundsError(f"no buffer at {int(addresses[chosen[0]]):#x}")
            buffer = self._buffers[number]
            offsets = (addresses[chosen] - buffer.address)[:, None] + np.arange(size)
            inside = (offsets >= 0) & (offsets < buffer.data.size)
            if not (inside.all() and buffer.valid[offsets].all()):
                inside &= buffer.valid[np.clip(offsets, 0, buffer.data.size - 1)]
                bad = int(offsets[~inside][0])
                raise OutOfBoundsError(f"byte {bad} of buffer {number}, which has {buffer.data.size} bytes")
            parts.append((buffer, chosen, offsets))
        return parts
