"""The types of PTX as numpy arrays: registers hold unsigned bit patterns, instructions give them a meaning."""

from __future__ import annotations

import numpy as np

from tests.ptx.errors import UnsupportedError

__all__ = ["BITS", "bfloat16_bits", "bfloat16_values", "decode", "encode", "is_float", "width"]

BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}
_WIDTHS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "pred": 1}
_WIDTHS |= {f"{kind}{bits}": bits for kind in "bus" for bits in BITS}


def width(kind: str) -> int:
    """Bits of the PTX type ``kind``; 1 for predicates."""
    if kind not in _WIDTHS:
        raise UnsupportedError(f"type .{kind}")
    return _WIDTHS[kind]


def is_float(kind: str) -> bool:
    return kind.lstrip("b").startswith("f")


def bfloat16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Round to nearest even. Values wider than float32 are rounded to it first."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded.astype(np.uint16))


def decode(bits: np.ndarray, kind: str) -> np.ndarray:
    """The values that ``bits`` mean as ``kind``: bfloat16 as float32, packed pairs as an array ``(..., 2)``."""
    if kind == "pred":
        return bits
    if kind.endswith("x2"):
        return decode(np.ascontiguousarray(bits).view(np.uint16).reshape(*bits.shape, 2), kind[:-2])
    if kind == "bf16":
        return bfloat16_values(bits)
    if kind[0] == "f":
        return bits.view(_FLOATS[width(kind)])
    if kind[0] == "s":
        return bits.view(_SIGNED[width(kind)])
    return bits


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """The bit patterns of ``values`` as ``kind``: floats rounded to nearest even, integers taken modulo their width."""
    if kind == "pred":
        return values.astype(bool)
    if kind.endswith("x2"):
        halves = np.ascontiguousarray(encode(values, kind[:-2]))
        return halves.view(np.uint32).reshape(values.shape[:-1])
    if kind == "bf16":
        return bfloat16_bits(values)
    with np.errstate(over="ignore"):
        target = _FLOATS[width(kind)] if kind[0] == "f" else BITS[width(kind)]
        return np.ascontiguousarray(values.astype(target)).view(BITS[width(kind)])
