"""Loads, stores, asynchronous copies and address conversions."""

from __future__ import annotations

import numpy as np

from tests.ptx.errors import PtxError, UnsupportedError
from tests.ptx.parser import Address, Immediate, Instruction, Operand, Symbol
from tests.ptx.registry import Machine, operation
from tests.ptx.values import BITS, decode, encode, width

__all__ = ["resolve"]

# Generic addresses from here on mean shared memory; those below are global ones.
_SHARED_WINDOW = 1 << 60

# What a cache keeps and which other threads see an access in time: neither changes the values here.
_CACHE_HINTS = (
    "nc ca cg cs lu cv wb wt weak relaxed volatile cta gpu sys L1::no_allocate L1::evict_last L1::evict_first"
)
_CACHE_HINTS += " L2::64B L2::128B L2::256B"
_SPACES = "param global shared shared::cta"


def resolve(machine: Machine, operand: Operand, kind: str) -> np.ndarray:
    """The addresses that ``[base + offset]`` means in each thread, as int64."""
    if not isinstance(operand, Address):
        raise UnsupportedError(f"{operand} as an address")
    return machine.registers.read(operand.base, kind).astype(np.int64) + operand.offset


def _space(instruction: Instruction, addresses: np.ndarray) -> tuple[str, np.ndarray]:
    if {"shared", "shared::cta"} & set(instruction.modifiers):
        return "shared", addresses
    if "global" in instruction.modifiers or (addresses < _SHARED_WINDOW).all():
        return "global", addresses
    if (addresses < _SHARED_WINDOW).any():
        raise UnsupportedError("generic addresses of both spaces in one instruction")
    return "shared", addresses - _SHARED_WINDOW


def _addressing(instruction: Instruction) -> str:
    """Shared addresses are 32 bits wide."""
    return "u32" if {"shared", "shared::cta"} & set(instruction.modifiers) else "u64"


@operation("ld", modifiers=f"{_SPACES} v2 v4 {_CACHE_HINTS}")
def _load(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    kind, (target, source) = instruction.kind, instruction.operands
    targets = machine.registers.unpack(target)
    size = width(kind) // 8
    threads = np.nonzero(mask)[0]
    if "param" in instruction.modifiers:
        data = np.broadcast_to(_parameter(machine, source, size * len(targets)), (threads.size, size * len(targets)))
    else:
        addresses = resolve(machine, source, _addressing(instruction))[threads]
        space, addresses = _space(instruction, addresses)
        if space == "shared":
            data = machine.shared.read(addresses, size * len(targets), threads)
        else:
            data = machine.memory.read(addresses, size * len(targets))
    for position, register in enumerate(targets):
        bits = np.zeros(machine.threads, dtype=BITS[width(kind)])
        part = np.ascontiguousarray(data[:, position * size : (position + 1) * size])
        bits[threads] = part.view(bits.dtype).reshape(-1)
        machine.registers.write(register, decode(bits, kind), kind, mask)


def _parameter(machine: Machine, source: Operand, size: int) -> np.ndarray:
    if not isinstance(source, Address) or not isinstance(source.base, Symbol):
        raise UnsupportedError(f"{source} as the address of a parameter")
    data = machine.parameters[source.base.name][source.offset : source.offset + size]
    if len(data) != size:
        raise PtxError(f"parameter {source.base.name} has no {size} bytes at {source.offset}")
    return np.frombuffer(data, dtype=np.uint8)


@operation("st", modifiers=f"{_SPACES} v2 v4 {_CACHE_HINTS}")
def _store(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    kind, (target, source) = instruction.kind, instruction.operands
    threads = np.nonzero(mask)[0]
    columns = [
        np.ascontiguousarray(encode(machine.registers.read(element, kind), kind)).view(np.uint8).reshape(mask.size, -1)
        for element in machine.registers.unpack(source)
    ]
    data = np.concatenate(columns, axis=1)[threads]
    space, addresses = _space(instruction, resolve(machine, target, _addressing(instruction))[threads])
    if space == "shared":
        machine.shared.write(addresses, data, threads)
    else:
        machine.memory.write(addresses, data)


@operation(
    "cp",
    modifiers=f"async commit_group wait_group wait_all {_SPACES} {_CACHE_HINTS}",
)
def _copy(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """``cp.async``: ``size`` bytes from global to shared memory, those past the optional ``source size`` zero."""
    if "commit_group" in instruction.modifiers:
        machine.shared.commit(mask)
    elif "wait_all" in instruction.modifiers:
        machine.shared.wait(mask, None)
    elif "wait_group" in instruction.modifiers:
        (count,) = instruction.operands
        machine.shared.wait(mask, _constant(count))
    else:
        _start_copy(machine, instruction, mask)


def _constant(operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise UnsupportedError(f"{operand} where a constant must stand")
    return operand.bits


def _start_copy(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    target, source, count, *rest = instruction.operands
    if len(rest) > 1:
        raise UnsupportedError(instruction.text)
    size = _constant(count)
    if size not in ((16,) if "cg" in instruction.modifiers else (4, 8, 16)):
        raise PtxError(f"cp.async of {size} bytes")
    threads = np.nonzero(mask)[0]
    taken = machine.registers.read(rest[0], "u32")[threads] if rest else np.full(threads.size, size, dtype=np.uint32)
    if (taken > size).any():
        raise PtxError("cp.async: the source size is larger than the copy")
    addresses = resolve(machine, source, "u64")[threads]
    data = np.zeros((threads.size, size), dtype=np.uint8)
    for amount in np.unique(taken[taken > 0]).tolist():
        chosen = np.nonzero(taken == amount)[0]
        if (addresses[chosen] % size).any():
            raise PtxError(f"cp.async of {size} bytes from a misaligned address")
        # Byte by byte: an incomplete copy has no alignment of its own.
        sources = addresses[chosen][:, None] + np.arange(amount)
        data[chosen, :amount] = machine.memory.read(sources.reshape(-1), 1).reshape(chosen.size, amount)
    machine.shared.copy_later(resolve(machine, target, "u32")[threads], data, threads)


@operation("cvta", modifiers="to global shared shared::cta")
def _convert_address(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """Global addresses are generic ones already; shared ones move into a window."""
    target, source = instruction.operands
    values = machine.registers.read(source, instruction.kind)
    if "global" not in instruction.modifiers:
        if instruction.kind != "u64":
            raise UnsupportedError(instruction.text)
        window = np.uint64(_SHARED_WINDOW)
        values = values - window if "to" in instruction.modifiers else values + window
    machine.registers.write(target, values, instruction.kind, mask)


@operation("fence", "membar", "prefetch", modifiers="acq_rel sc cta gpu gl sys global L1 L2")
def _nothing(machine: Machine, instruction: Instruction, mask: np.ndarray) -> None:
    """Instructions run one after the other here, so all memory is in order."""
