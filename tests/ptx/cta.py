"""One CTA: which threads execute what next."""

from __future__ import annotations

import numpy as np

from tests.ptx import access, arithmetic, bits, warp
from tests.ptx.errors import PtxError, UnsupportedError
from tests.ptx.memory import GlobalMemory
from tests.ptx.parser import Immediate, Instruction, Kernel, Symbol
from tests.ptx.registers import Registers
from tests.ptx.registry import Machine, handler_of
from tests.ptx.shared import Report, SharedMemory

__all__ = ["run_cta"]

_INSTRUCTIONS = (access, arithmetic, bits, warp)  # Importing them registers their handlers.
_MOST_STEPS = 1_000_000
_CONTROL = ("bra", "ret", "exit", "bar", "barrier")


def run_cta(
    kernel: Kernel,
    memory: GlobalMemory,
    parameters: dict[str, bytes],
    *,
    threads: int,
    block: tuple[int, int, int],
    grid: tuple[int, int, int],
    shared_bytes: int,
    report: Report,
) -> None:
    """Run the threads of one CTA to their end.

    In each step the threads that are furthest behind in the text execute one instruction together, so that threads
    which took different branches meet again. A GPU may run warps in any other order: what that could change is what
    ``Report`` counts.
    """
    shared = SharedMemory(shared_bytes, threads, report)
    machine = Machine(Registers(kernel, threads, block, grid), memory, shared, parameters, threads)
    handlers = [None if i.name in _CONTROL else handler_of(i) for i in kernel.instructions]
    control = _Control(kernel, threads, shared)
    for _ in range(_MOST_STEPS):
        if control.exited.all():
            shared.finish()
            return
        position, mask = control.next()
        if position >= len(kernel.instructions):
            control.exited |= mask
            continue
        report.steps += 1
        instruction = kernel.instructions[position]
        control.counter[mask] = position + 1
        if instruction.guard is not None:
            mask = mask & machine.registers.read(instruction.guard, "pred")
            if not mask.any():
                continue
        handler = handlers[position]
        shared.instruction = instruction.text
        try:
            if handler is None:
                control.execute(instruction, mask)
            else:
                handler(machine, instruction, mask)
        except PtxError as error:
            raise type(error)(f"{error}, in: {instruction.text}") from error
    raise PtxError(f"{kernel.name} has not ended after {_MOST_STEPS} steps")


class _Control:
    """The program counter of every thread, and who has ended or waits at a barrier."""

    def __init__(self, kernel: Kernel, threads: int, shared: SharedMemory) -> None:
        self._labels = kernel.labels
        self._shared = shared
        self.counter = np.zeros(threads, dtype=np.int64)
        self.exited = np.zeros(threads, dtype=bool)
        self._barrier = np.full(threads, -1)

    def next(self) -> tuple[int, np.ndarray]:
        """The next position and the threads that stand there; if all wait at the same barrier, it opens first."""
        running = ~self.exited & (self._barrier < 0)
        if not running.any():
            running = ~self.exited
            if np.unique(self._barrier[running]).size > 1:
                raise PtxError("deadlock: threads wait at different barriers")
            self._barrier[:] = -1
            self._shared.barrier()
        position = int(self.counter[running].min())
        return position, running & (self.counter == position)

    def execute(self, instruction: Instruction, mask: np.ndarray) -> None:
        if instruction.name == "bra":
            (label,) = instruction.operands
            if not isinstance(label, Symbol):
                raise UnsupportedError(f"a branch to {label}")
            self.counter[mask] = self._labels[label.name]
        elif instruction.name in ("ret", "exit"):
            self.exited |= mask
        elif "warp" not in instruction.modifiers:
            # Steps are lockstep, so the lanes of a warp have met already; a barrier of the CTA is waited for.
            self._wait(instruction, mask)

    def _wait(self, instruction: Instruction, mask: np.ndarray) -> None:
        barrier, *count = instruction.operands
        if not isinstance(barrier, Immediate) or not set(instruction.modifiers) <= {"sync", "cta", "aligned"}:
            raise UnsupportedError(instruction.text)
        if count and not (isinstance(count[0], Immediate) and count[0].bits == mask.size):
            raise UnsupportedError("a barrier of some threads of a CTA")
        self._barrier[mask] = barrier.bits
