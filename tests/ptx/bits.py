"""Instructions on bit patterns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ptx.parser import Instruction
from tests.ptx.registry import Machine, operation
from tests.ptx.values import width

__all__: list[str] = []

_LOGIC: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@operation(*_LOGIC)
def _logic(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    target, *sources = instruction.operands
    x, y = (machine.registers.read(source, instruction.kind) for source in sources)
    machine.registers.write(target, _LOGIC[instruction.name](x, y), instruction.kind, mask)


@operation("not")
def _not(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    target, source = instruction.operands
    machine.registers.write(target, ~machine.registers.read(source, instruction.kind), instruction.kind, mask)


@operation("lop3")
def _lookup(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """Any logic of three inputs: bit ``4a + 2b + c`` of the constant says what inputs ``a, b, c`` give."""
    target, *sources, table = instruction.operands
    a, b, c = (machine.registers.read(source, "b32") for source in sources)
    chosen = machine.registers.read(table, "b32")
    out = np.zeros_like(a)
    for case in range(8):
        minterm = (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        out |= np.where((chosen >> np.uint32(case)) & 1, minterm, 0).astype(np.uint32)
    machine.registers.write(target, out, "b32", mask)


@operation("shl", "shr")
def _shift(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """Shifts by the width or more leave zeros, or the sign."""
    kind, bits = instruction.kind, width(instruction.kind)
    target, source, distance = instruction.operands
    x = machine.registers.read(source, kind)
    amount = np.minimum(machine.registers.read(distance, "u32"), bits)
    within = np.minimum(amount, bits - 1).astype(x.dtype)
    if instruction.name == "shl":
        out = np.where(amount < bits, x << within, 0)
    else:
        out = np.where(amount < bits, x >> within, x >> within if kind[0] == "s" else 0)
    machine.registers.write(target, out.astype(x.dtype), kind, mask)


@operation("shf", modifiers="l r wrap clamp")
def _funnel_shift(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """32 bits out of the 64 that ``high:low`` are: the upper ones after a left shift, the lower after a right one."""
    target, low, high, distance = instruction.operands
    read = machine.registers.read
    amount = read(distance, "u32").astype(np.uint64)
    amount = amount & 31 if "wrap" in instruction.modifiers else np.minimum(amount, 32)
    pair = (read(high, "b32").astype(np.uint64) << 32) | read(low, "b32")
    out = (pair << amount) >> 32 if "l" in instruction.modifiers else pair >> amount
    machine.registers.write(target, (out & 0xFFFFFFFF).astype(np.uint32), "b32", mask)


@operation("bfe")
def _extract(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """``length`` bits from ``position`` on, extended by zeros or, for signed types, by their highest bit."""
    kind, bits = instruction.kind, width(instruction.kind)
    target, *sources = instruction.operands
    read = machine.registers.read
    values = read(sources[0], f"u{bits}").tolist()
    positions, lengths = (np.bitwise_and(read(source, "u32"), 0xFF).tolist() for source in sources[1:])
    out = []
    for value, position, length in zip(values, positions, lengths, strict=True):
        field = (value >> position) & ((1 << length) - 1)
        top = min(position + length - 1, bits - 1)
        if kind[0] == "s" and length and (value >> top) & 1:
            field |= -1 << min(length, bits - position if position < bits else 0)
        out.append(field % 2**bits)
    machine.registers.write(target, np.array(out, dtype=f"u{bits // 8}"), f"u{bits}", mask)


@operation("bfi")
def _insert(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """The low ``length`` bits of the first operand put into the second from ``position`` on."""
    bits = width(instruction.kind)
    target, *sources = instruction.operands
    read = machine.registers.read
    field, base = (read(source, instruction.kind).tolist() for source in sources[:2])
    positions, lengths = (np.bitwise_and(read(source, "u32"), 0xFF).tolist() for source in sources[2:])
    out = []
    for value, into, position, length in zip(field, base, positions, lengths, strict=True):
        hole = ((1 << length) - 1) << position
        out.append(((into & ~hole) | ((value << position) & hole)) % 2**bits)
    machine.registers.write(target, np.array(out, dtype=f"u{bits // 8}"), instruction.kind, mask)


@operation("prmt")
def _permute(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """Each nibble of the third operand picks one of eight bytes; its top bit replicates that byte's sign instead."""
    target, *sources = instruction.operands
    a, b, selector = (machine.registers.read(source, "b32") for source in sources)
    pool = np.stack([a, b], axis=-1).view(np.uint8)
    out = np.zeros((a.size, 4), dtype=np.uint8)
    for position in range(4):
        nibble = (selector >> np.uint32(4 * position)) & 0xF
        byte = np.take_along_axis(pool, (nibble & 7)[:, None].astype(np.int64), axis=1)[:, 0]
        sign = np.where(byte & 0x80, 0xFF, 0)
        out[:, position] = np.where(nibble & 8, sign, byte)
    machine.registers.write(target, out.view(np.uint32).reshape(-1), "b32", mask)


@operation("popc", "clz")
def _count(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    bits = width(instruction.kind)
    target, source = instruction.operands
    values = machine.registers.read(source, instruction.kind).tolist()
    counts = [v.bit_count() if instruction.name == "popc" else bits - v.bit_length() for v in values]
    machine.registers.write(target, np.array(counts, dtype=np.uint32), "b32", mask)
