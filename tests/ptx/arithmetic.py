"""Arithmetic, comparisons, selection and conversions. Every thread of the mask computes by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ptx.errors import UnsupportedError
from tests.ptx.parser import Instruction
from tests.ptx.registry import Machine, operation
from tests.ptx.values import decode, encode, is_float, width

__all__: list[str] = []

_SMALLEST_NORMAL = np.finfo(np.float32).tiny


def _flush(values: np.ndarray, instruction: Instruction) -> np.ndarray:
    """``.ftz``: subnormal float32 become zero of the same sign."""
    if "ftz" not in instruction.modifiers or values.dtype != np.float32:
        return values
    return np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def _operands(machine: Machine, instruction: Instruction, kind: str, first: int = 1) -> list[np.ndarray]:
    read = machine.registers.read
    return [_flush(read(operand, kind), instruction) for operand in instruction.operands[first:]]


def _put(machine: Machine, instruction: Instruction, values: np.ndarray, kind: str, mask: np.ndarray) -> None:
    machine.registers.write(instruction.operands[0], _flush(values, instruction), kind, mask)


_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.fmin,
    "max": np.fmax,
}


@operation("add", "sub", "min", "max", modifiers="rn ftz")
def _binary(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    kind = instruction.kind
    x, y = _operands(machine, instruction, kind)
    with np.errstate(all="ignore"):
        _put(machine, instruction, _BINARY[instruction.name](*_exact(kind, x, y)), kind, mask)


def _exact(kind: str, *values: np.ndarray) -> tuple[np.ndarray, ...]:
    """16-bit floats as float64, where their sums and products are exact; the result is rounded once."""
    return tuple(x.astype(np.float64) for x in values) if "f16" in kind else values


@operation("mul", "mad", "fma", modifiers="rn ftz lo hi wide")
def _multiply(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    kind = instruction.kind
    if not is_float(kind):
        _multiply_integers(machine, instruction, mask)
        return
    factors = _operands(machine, instruction, kind)
    with np.errstate(all="ignore"):
        if instruction.name == "mul":
            values = np.multiply(*_exact(kind, *factors))
        else:
            # Products of float32 are exact in float64, so the sum is rounded once there and once back.
            x, y, z = (value.astype(np.float64) for value in factors)
            values = (x * y + z).astype(np.float32 if kind == "f32" else np.float64)
    _put(machine, instruction, values, kind, mask)


def _multiply_integers(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    kind, bits = instruction.kind, width(instruction.kind)
    read = machine.registers.read
    target = kind
    if "wide" in instruction.modifiers:
        target = f"{kind[0]}{2 * bits}"
    if "lo" in instruction.modifiers:
        product = read(instruction.operands[1], kind) * read(instruction.operands[2], kind)
    else:
        # Python integers: a product of 64-bit values fits in nothing else.
        x, y = (read(operand, kind).astype(object) for operand in instruction.operands[1:3])
        whole = x * y >> bits if "hi" in instruction.modifiers else x * y
        product = decode(np.array([int(v) % 2 ** width(target) for v in whole], dtype=f"u{width(target) // 8}"), target)
    if instruction.name == "mad":
        product = product + read(instruction.operands[3], target)
    _put(machine, instruction, product, target, mask)


@operation("div", "rem", modifiers="rn approx full ftz")
def _divide(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    kind = instruction.kind
    x, y = _operands(machine, instruction, kind)
    if is_float(kind):
        with np.errstate(all="ignore"):
            values = x / y
    else:
        # Toward zero; the result of a division by zero is unspecified, here zero.
        wide = np.int64 if kind[0] == "s" else np.uint64
        nonzero = np.where(y == 0, 1, y).astype(wide)
        remainder = np.fmod(x.astype(wide), nonzero)
        values = remainder if instruction.name == "rem" else (x.astype(wide) - remainder) // nonzero
        values = np.where(y == 0, 0, values)
    _put(machine, instruction, values, kind, mask)


_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "rcp": lambda x: np.float32(1) / x,
    "ex2": np.exp2,
    "lg2": np.log2,
}


@operation(*_UNARY, modifiers="rn approx ftz")
def _unary(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    (x,) = _operands(machine, instruction, instruction.kind)
    with np.errstate(all="ignore"):
        _put(machine, instruction, _UNARY[instruction.name](x), instruction.kind, mask)


_COMPARE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_COMPARE |= {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_COMPARISONS = {*_COMPARE, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"}


@operation("setp", modifiers=" ".join([*_COMPARISONS, "and or xor ftz"]))
def _set_predicate(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    comparison, kind = instruction.modifiers[0], instruction.kind
    read = machine.registers.read
    x, y = (_flush(read(operand, kind), instruction) for operand in instruction.operands[1:3])
    holds = _compare(comparison, x, y)
    opposite = ~holds
    if len(instruction.operands) == 4:
        other = read(instruction.operands[3], "pred")
        combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[instruction.modifiers[1]]
        holds, opposite = combine(holds, other), combine(opposite, other)
    for destination, values in zip(machine.registers.unpack(instruction.operands[0]), (holds, opposite), strict=False):
        machine.registers.write(destination, values, "pred", mask)


def _compare(comparison: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """An ordered comparison is false with NaN, except ``ne`` by numpy's rule; PTX's ``ne`` is ordered too."""
    unordered = np.isnan(x) | np.isnan(y) if x.dtype.kind == "f" else np.zeros(x.shape, dtype=bool)
    if comparison in ("num", "nan"):
        return unordered if comparison == "nan" else ~unordered
    if comparison in _COMPARE:
        return _COMPARE[comparison](x, y) & ~unordered
    return _COMPARE[comparison[:-1]](x, y) | unordered


@operation("selp")
def _select(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    kind = instruction.kind
    _, first, second, condition = instruction.operands
    read = machine.registers.read
    _put(machine, instruction, np.where(read(condition, "pred"), read(first, kind), read(second, kind)), kind, mask)


@operation("cvt", modifiers="rn rz rzi rni rmi rpi ftz sat relu")
def _convert(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    target, source = instruction.modifiers[-2:]
    options = instruction.modifiers[:-2]
    if {"sat", "relu", "rz"} & set(options):
        raise UnsupportedError(instruction.text)
    values = [_flush(machine.registers.read(x, source), instruction) for x in instruction.operands[1:]]
    if target.endswith("x2"):
        # The first operand becomes the upper half.
        high, low = values
        _put(machine, instruction, np.stack([low, high], axis=-1), target, mask)
        return
    (x,) = values
    if is_float(source) and not is_float(target):
        x = _to_integer(x, target, options)
    _put(machine, instruction, x, target, mask)


def _to_integer(x: np.ndarray, target: str, options: tuple[str, ...]) -> np.ndarray:
    """Rounded as the modifier says, NaN as zero, and clamped to the range of the target."""
    rounding = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
    chosen = [rounding[option] for option in options if option in rounding]
    if len(chosen) != 1:
        raise UnsupportedError(f"conversion to .{target} with {options}")
    limits = np.iinfo(f"{'i' if target[0] == 's' else 'u'}{width(target) // 8}")
    whole = chosen[0](np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf))
    clamped = [int(min(max(v, limits.min), limits.max)) for v in whole.tolist()]
    return np.array(clamped, dtype=limits.dtype)


@operation("mov")
def _move(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """A copy, or between a register and the vector of its parts, the low one first."""
    registers, kind = machine.registers, instruction.kind
    destinations, sources = (registers.unpack(operand) for operand in instruction.operands)
    if len(destinations) == len(sources) == 1:
        registers.write(destinations[0], registers.read(sources[0], kind), kind, mask)
        return
    part = f"b{width(kind) // max(len(destinations), len(sources))}"
    if len(sources) > 1:
        parts = np.stack([registers.read(source, part) for source in sources], axis=-1)
        whole = parts.view(f"u{width(kind) // 8}").reshape(-1)
        registers.write(destinations[0], whole, kind, mask)
        return
    bits = np.ascontiguousarray(encode(registers.read(sources[0], kind), kind))
    parts = bits.view(f"u{width(part) // 8}").reshape(bits.size, -1)
    for position, destination in enumerate(destinations):
        registers.write(destination, parts[:, position], part, mask)
