"""The registers of all threads of a CTA: one numpy array of bits per name, one element per thread."""

from __future__ import annotations

import numpy as np

from tests.ptx.errors import PtxError, UnsupportedError
from tests.ptx.parser import Immediate, Kernel, Operand, Register, Sink, Symbol, Vector
from tests.ptx.values import BITS, decode, encode, width

__all__ = ["WARP", "Registers"]

WARP = 32


class Registers:
    """Reads give one value per thread; writes touch only the threads of a mask."""

    def __init__(self, kernel: Kernel, threads: int, block: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        self._kernel = kernel
        self._threads = threads
        self._arrays: dict[str, np.ndarray] = {}
        self._constants: dict[tuple[Immediate | Symbol, str], np.ndarray] = {}
        thread = np.arange(threads, dtype=np.uint32)
        numbers = {"%tid.x": thread, "%laneid": thread % WARP, "%warpid": thread // WARP, "%ntid.x": threads}
        numbers |= {"%tid.y": 0, "%tid.z": 0, "%ntid.y": 1, "%ntid.z": 1}
        for axis, index, count in zip("xyz", block, grid, strict=True):
            numbers |= {f"%ctaid.{axis}": index, f"%nctaid.{axis}": count}
        self._special = {name: np.broadcast_to(np.uint32(value), threads) for name, value in numbers.items()}

    def read(self, operand: Operand, kind: str) -> np.ndarray:
        """``operand`` in every thread, as values of the PTX type ``kind``; not to be written to."""
        if isinstance(operand, Register):
            values = decode(self._bits(operand.name, kind), kind)
            return ~values if operand.negated else values
        if isinstance(operand, (Immediate, Symbol)):
            key = (operand, kind)
            if key not in self._constants:
                self._constants[key] = self._constant(operand, kind)
            return self._constants[key]
        raise UnsupportedError(f"{operand} as a value")

    def write(self, operand: Operand, values: np.ndarray, kind: str, mask: np.ndarray) -> None:
        """Give ``operand`` the ``values`` of type ``kind`` where ``mask``; signs fill a wider register."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register):
            raise UnsupportedError(f"{operand} as a destination")
        array = self._array(operand.name)
        bits = encode(values, kind)
        if bits.dtype != array.dtype:
            if array.dtype == bool or bits.dtype == bool or bits.dtype.itemsize > array.dtype.itemsize:
                raise PtxError(f"{operand.name} is too narrow for .{kind}")
            bits = (decode(bits, kind) if kind[0] == "s" else bits).astype(array.dtype)
        np.copyto(array, bits, where=mask)

    def unpack(self, operand: Operand) -> tuple[Operand, ...]:
        """The elements of a vector operand, or the operand itself."""
        return operand.elements if isinstance(operand, Vector) else (operand,)

    def _array(self, name: str) -> np.ndarray:
        array = self._arrays.get(name)
        if array is None:
            kind = self._kernel.register_type(name)
            dtype = bool if kind == "pred" else BITS[width(kind)]
            array = self._arrays[name] = np.zeros(self._threads, dtype)
        return array

    def _bits(self, name: str, kind: str) -> np.ndarray:
        array = self._special.get(name)
        if array is None:
            array = self._array(name)
        if kind == "pred":
            if array.dtype != bool:
                raise PtxError(f"{name} is no predicate")
            return array
        wanted = BITS[width(kind)]
        if array.dtype == wanted:
            return array
        if array.dtype == bool:
            raise PtxError(f"{name} is a predicate")
        # A wider register gives its low bits (stores and conversions may do so); a narrower one is extended by zeros,
        # which only special registers are.
        return array.astype(wanted)

    def _constant(self, operand: Immediate | Symbol, kind: str) -> np.ndarray:
        if isinstance(operand, Symbol):
            if operand.name not in self._kernel.shared:
                raise UnsupportedError(f"the address of {operand.name}")
            bits = self._kernel.shared[operand.name]
        elif kind == "pred":
            return np.full(self._threads, bool(operand.bits))
        elif operand.width == 64 and width(kind) == 32:
            bits = int(np.float32(np.uint64(operand.bits).view(np.float64)).view(np.uint32))
        else:
            bits = operand.bits
        # A constant for a packed pair or a half is its bit pattern.
        wanted = BITS[width(kind)]
        return decode(np.full(self._threads, bits & int(np.iinfo(wanted).max), wanted), kind)
