"""Which function executes which instruction, and which modifiers it understands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.errors import UnsupportedError
from tests.ptx.parser import Instruction
from tests.ptx.registers import Registers
from tests.ptx.values import width

if TYPE_CHECKING:
    from tests.ptx.memory import GlobalMemory
    from tests.ptx.shared import SharedMemory

__all__ = ["Handler", "Machine", "handler_of", "operation"]


@dataclass(slots=True)
class Machine:
    """What an instruction may read and change."""

    registers: Registers
    memory: GlobalMemory
    shared: SharedMemory
    parameters: dict[str, bytes]
    threads: int


Handler = Callable[[Machine, Instruction, np.ndarray], None]

_HANDLERS: dict[str, tuple[Handler, frozenset[str]]] = {}


def operation(*names: str, modifiers: str = "") -> Callable[[Handler], Handler]:
    """Register the function that executes ``names``. Types are always allowed, other modifiers only if listed."""

    def register(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = (handler, frozenset(modifiers.split()))
        return handler

    return register


def handler_of(instruction: Instruction) -> Handler:
    """The function that executes ``instruction``; an unknown name or modifier is an error, never ignored."""
    if instruction.name not in _HANDLERS:
        raise UnsupportedError(f"instruction {instruction.text}")
    handler, understood = _HANDLERS[instruction.name]
    for modifier in instruction.modifiers:
        if modifier not in understood:
            try:
                width(modifier)
            except UnsupportedError:
                raise UnsupportedError(f".{modifier} in {instruction.text}") from None
    return handler
