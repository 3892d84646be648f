"""The order of collectives: which unit is gathered ahead, and in which order gradients leave.

[Note: one order on every rank]
Gradients leave in reverse plan order, one reduction per unit and pass, whatever order autograd visits the modules in
and whether or not a module ran on this rank: a unit that is ready early waits for its turn, and the end of the pass
sends the rest, with zeros for what is missing. A unit is ready when autograd has left its module, not when all of its
weights have a gradient: which of them took part (experts with tokens, branches taken) is data, and may differ between
ranks. So the sequence of collectives follows from the program, not from what it computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch.autograd import Variable

from dmuon_hf.core.errors import DMuonError
from dmuon_hf.core.runtime.states import GradState
from dmuon_hf.core.runtime.unit import Unit

__all__ = ["BackwardPass", "Prefetcher", "graph_task"]


def graph_task() -> int:
    """Id of the backward pass this thread is executing, -1 outside of one."""
    return int(torch._C._current_graph_task_id())


class Prefetcher:
    """Issues the gather of the units that come next.

    Forward follows the order of the model's last forward, and the plan before there was one; backward follows it in
    reverse. A unit that the last forward passed over is not gathered ahead, and what comes after it is taken from the
    plan.

    [Note: prefetch and one order]
    A unit enters the order with the first forward since its weights were freed, for which they are gathered. Every
    gather is in the record that the ranks compare in each step and whenever one stands still, so ranks whose orders
    differ end with the error that names the two gathers; nothing has to be agreed on beforehand.

    Attributes:
        forward_depth: How many units are gathered ahead in forward; one in backward, none where this is 0.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._order = list(units)
        self._position = {unit.index: place for place, unit in enumerate(units)}
        self._running: dict[int, Unit] = {}
        self.forward_depth = 1

    def begin_forward(self) -> None:
        """The model's forward begins: gather the unit that comes first."""
        self._running.clear()
        if self.forward_depth > 0:
            for unit in self._order[:1]:
                unit.weights.gather()

    def begin_forward_with(self, count: int) -> None:
        """Gather the first ``count`` units of the next forward now, which finds them here or on their way."""
        for unit in self._order[:count]:
            unit.weights.gather()

    def end_forward(self) -> None:
        """The model's forward has ended: its order is the one to follow from now on."""
        if self._running:
            self._order = list(self._running.values())
            self._position = {unit.index: place for place, unit in enumerate(self._order)}
            self._running.clear()

    def before_forward(self, unit: Unit) -> None:
        self._running.setdefault(unit.index, unit)
        order, place = self._around(unit)
        ahead = unit.forward_prefetch
        for following in order[place + 1 : place + 1 + self.forward_depth] if ahead is None else ahead:
            following.weights.gather()

    def begin_backward(self) -> None:
        """The model's backward begins, with what follows the last unit: its weights are gathered beside that."""
        if self.forward_depth > 0:
            for unit in self._order[-1:]:
                if unit.unshard_in_backward:
                    unit.weights.gather()

    def before_backward(self, unit: Unit) -> None:
        order, place = self._around(unit)
        ahead = unit.backward_prefetch
        if ahead is None:
            ahead = list(order[place - 1 : place]) if self.forward_depth > 0 and place > 0 else []
        for following in ahead:
            if following.unshard_in_backward:
                following.weights.gather()

    def _around(self, unit: Unit) -> tuple[Sequence[Unit], int]:
        place = self._position.get(unit.index)
        return (self._units, unit.index) if place is None else (self._order, place)


class BackwardPass:
    """One backward pass over the model, from its first hook to autograd's final callback.

    Attributes:
        active: Whether a pass has begun and not ended.
        interrupted: Whether a pass was abandoned since the last :meth:`reset`.
        synchronised: Passes that reduced gradients since the last :meth:`reset`.
    """

    def __init__(self, units: Sequence[Unit], *, delay_second_stage: bool) -> None:
        self._units = units
        self._delay_second_stage = delay_second_stage
        self._cursor = -1
        self._draining: Unit | None = None
        self._left_alone: Collection[Unit] = ()
        self.active = False
        self.interrupted = False
        self.synchronised = 0

    def begin(self) -> bool:
        """Called by every backward hook; the first one of a pass, which is told so, arranges for :meth:`_end`."""
        if self.active:
            return False
        if graph_task() == -1:
            raise DMuonError("a backward hook ran outside of a backward pass")
        self.active = True
        self._cursor = len(self._units) - 1
        Variable._execution_engine.queue_callback(self._end)
        return True

    def advance(self) -> None:
        """Launch every reduction whose turn has come. See [Note: one order on every rank]."""
        while self._cursor >= 0 and self._units[self._cursor].grads.state is GradState.READY:
            self._launch(self._units[self._cursor])
            self._cursor -= 1

    def _launch(self, unit: Unit) -> None:
        if unit.requires_sync:
            # One packed buffer in flight: the previous one is freed before the next is filled.
            if self._draining is not None:
                self._finish_first(self._draining)
            unit.launch_reduction()
            self._draining = unit
        unit.reshard_after_pass()

    def _finish_first(self, unit: Unit) -> None:
        unit.grads.finish_first_stage()
        if not self._delay_second_stage:
            unit.finish_reduction()

    def _end(self) -> None:
        while self._cursor >= 0:
            if self._units[self._cursor] not in self._left_alone:
                self._launch(self._units[self._cursor])
            self._cursor -= 1
        self._finish([unit for unit in reversed(self._units) if unit not in self._left_alone])
        self.active = False

    def _finish(self, units: Sequence[Unit]) -> None:
        if self._draining is not None:
            self._finish_first(self._draining)
            self._draining = None
        synchronised = False
        for unit in units:
            if unit.requires_sync:
                unit.finish_reduction()
                synchronised = True
            else:
                unit.keep_grads()
            unit.end_pass()
        self.synchronised += synchronised

    @contextlib.contextmanager
    def only(self, units: Collection[Unit]) -> Iterator[None]:
        """Context of a pass through a part of the model alone, known before: the other units are not reduced in it."""
        self._left_alone = [unit for unit in self._units if unit not in units]
        try:
            yield
        finally:
            self._left_alone = ()

    def reduce_kept(self, units: Collection[Unit]) -> None:
        """Reduce what passes under ``no_sync`` have kept of ``units``, outside of a pass. Collective (shard group)."""
        waiting = [unit for unit in reversed(self._units) if unit in units]
        waiting = [unit for unit in waiting if unit.requires_sync and unit.grads.has_unreduced_passes]
        for unit in waiting:
            self._launch(unit)
        self._finish(waiting)

    def abandon(self) -> None:
        """Drop a pass that an exception ended midway, if there was one. Does nothing inside a pass."""
        if not self.active or graph_task() != -1:
            return
        self.active = False
        self.interrupted = True
        self._cursor = -1
        self._draining = None
        for unit in self._units:
            unit.discard_grads()
            unit.end_pass()
            unit.reshard()

    def reset(self) -> None:
        """Start over: gradients were zeroed."""
        self.interrupted = False
        self.synchronised = 0
