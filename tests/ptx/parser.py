"""PTX text to a list of instructions with parsed operands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.ptx.errors import PtxError, UnsupportedError
from tests.ptx.values import width

__all__ = ["Address", "Immediate", "Instruction", "Kernel", "Operand", "Register", "Sink", "Symbol", "Vector", "parse"]


@dataclass(frozen=True, slots=True)
class Register:
    """A register or, by its name, a special register. ``negated`` is the ``!`` before a predicate."""

    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant, kept as bits. ``width`` is that of a floating-point constant; 0 for an integer, which fits any."""

    bits: int
    width: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """A label, a parameter or a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: the result is not kept."""


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``."""

    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ...}``, or ``p|q`` as the two results of one instruction."""

    elements: tuple[Operand, ...]


Operand = Register | Immediate | Symbol | Sink | Address | Vector


@dataclass(frozen=True, slots=True)
class Instruction:
    """``@guard name.modifier.modifier operands``."""

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    text: str

    @property
    def kind(self) -> str:
        """The last modifier: for most instructions the type of their operands."""
        return self.modifiers[-1]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry function. ``parameters`` maps names to sizes in bytes, in order."""

    name: str
    parameters: dict[str, int]
    registers: dict[str, str]
    shared: dict[str, int]
    static_shared_bytes: int
    labels: dict[str, int]
    instructions: tuple[Instruction, ...]

    def register_type(self, name: str) -> str:
        """The declared type of ``%name``; ``%r<10>`` declares ``%r0`` to ``%r9``."""
        found = self.registers.get(name) or self.registers.get(name.rstrip("0123456789"))
        if found is None:
            raise PtxError(f"register {name} is not declared")
        return found


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?[^{]*\{", re.DOTALL)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*;")
_PARAMETER = re.compile(r"\.param\b.*?\.((?:[busf])\d+)\b.*?([\w$]+)(?:\[(\d+)\])?\s*$", re.DOTALL)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_STATEMENT = re.compile(
    r"\s*(?:(?P<scope>[{}])|(?P<label>[\w$]+)\s*:(?!:)|(?P<line>\.(?:loc|file)\b[^\n]*)|(?P<text>[^;{}]*(?:\{[^;{}]*\}[^;{}]*)*);)"
)
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s*(.*)", re.DOTALL)


def parse(ptx: str, entry: str | None = None) -> Kernel:
    """The entry function called ``entry``, or the only one."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx, flags=re.DOTALL)
    found = [match for match in _ENTRY.finditer(text) if entry in (None, match[1])]
    if len(found) != 1:
        raise PtxError(f"{len(found)} entry functions match {entry!r}")
    registers: dict[str, str] = {}
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    for match in _statements(text, found[0].end()):
        if match["label"]:
            if match["label"] in labels:
                raise PtxError(f"label {match['label']} stands twice")
            labels[match["label"]] = len(instructions)
        elif match["text"]:
            statement = " ".join(match["text"].split())
            if statement.startswith(".reg"):
                _declare(statement, registers)
            elif statement and not statement.startswith((".pragma", ".shared")):
                instructions.append(_instruction(statement))
    shared, static = _shared_symbols(text)
    parameters = dict(_parameter(p) for p in (found[0][2] or "").split(",") if p.strip())
    return Kernel(found[0][1], parameters, registers, shared, static, labels, tuple(instructions))


def _statements(text: str, position: int) -> Iterator[re.Match[str]]:
    """The statements of a body, up to the brace that closes it."""
    depth = 1
    while depth:
        match = _STATEMENT.match(text, position)
        if match is None:
            raise PtxError(f"cannot be parsed: {text[position : position + 80]!r}")
        position = match.end()
        if match["scope"]:
            depth += 1 if match["scope"] == "{" else -1
        yield match


def _declare(statement: str, registers: dict[str, str]) -> None:
    match = _REGISTERS.match(statement)
    if match is None:
        raise PtxError(f"cannot be parsed: {statement}")
    for name in match[2].split(","):
        name = name.strip().split("<")[0]
        # Scopes are flattened, so equal names must agree.
        if registers.setdefault(name, match[1]) != match[1]:
            raise UnsupportedError(f"register {name} with two types")


def _parameter(text: str) -> tuple[str, int]:
    match = _PARAMETER.match(text.strip())
    if match is None:
        raise PtxError(f"parameter cannot be parsed: {text.strip()!r}")
    return match[2], width(match[1]) // 8 * int(match[3] or 1)


def _shared_symbols(text: str) -> tuple[dict[str, int], int]:
    """Offsets of the shared variables; those of unknown size, the dynamic ones, begin where the static ones end."""
    offsets: dict[str, int] = {}
    dynamic: list[tuple[str, int]] = []
    end = 0
    for alignment, kind, name, count in _SHARED.findall(text):
        align = int(alignment or width(kind) // 8)
        if not count and f"{name}[" in text:
            dynamic.append((name, align))
            continue
        end = -(-end // align) * align
        offsets[name] = end
        end += width(kind) // 8 * int(count or 1)
    for name, align in dynamic:
        offsets[name] = -(-end // align) * align
    return offsets, max([end, *offsets.values()])


def _instruction(text: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(text)
    if match is None:
        raise PtxError(f"cannot be parsed: {text}")
    negated, guard, name, modifiers, operands = match.groups()
    return Instruction(
        name=name,
        modifiers=tuple(modifiers.split(".")[1:]),
        operands=tuple(_operand(part) for part in _split(operands)),
        guard=Register(guard, bool(negated)) if guard else None,
        text=text,
    )


def _split(text: str) -> Iterator[str]:
    """The parts between the commas that stand in no bracket."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            yield text[start:position].strip()
            start = position + 1
    if text[start:].strip():
        yield text[start:].strip()


def _operand(text: str) -> Operand:
    if text.startswith("["):
        return _address(text[1:-1])
    if text.startswith("{"):
        return Vector(tuple(_operand(part) for part in _split(text[1:-1])))
    if "|" in text:
        return Vector(tuple(_operand(part.strip()) for part in text.split("|")))
    if text == "_":
        return Sink()
    if text.startswith("!"):
        return Register(text[1:].strip(), negated=True)
    return _plain(text)


def _plain(text: str) -> Register | Immediate | Symbol:
    if text.startswith("%"):
        return Register(text)
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Immediate(int(text[2:], 16), 32)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Immediate(int(text[2:], 16), 64)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return Immediate(int(text.rstrip("U"), 0))
    if re.fullmatch(r"-?\d*\.\d+([eE][-+]?\d+)?", text):
        return Immediate(int(np.float64(text).view(np.uint64)), 64)
    if re.fullmatch(r"[A-Za-z_$][\w$]*", text):
        return Symbol(text)
    raise UnsupportedError(f"operand {text!r}")


def _address(text: str) -> Address:
    match = re.fullmatch(r"\s*([%\w$.]+)\s*(?:([-+])\s*(-?\w+))?\s*", text)
    if match is None:
        raise UnsupportedError(f"address [{text}]")
    offset = int(match[3], 0) if match[3] else 0
    return Address(_plain(match[1]), -offset if match[2] == "-" else offset)
