"""The states of a unit's weights and of its gradients, and the moves between them.

[Note: generations and epochs]
Freshness is a number. Every owned tensor carries a content version that all ranks bump together (an in-place
operation, a load, an optimizer step). A gathered or published copy records the versions it was made from and may be
read only while they are the current ones; nobody sets or clears a "dirty" flag. Gradients belong to the backward pass
that produced them: a reduction is launched and finished inside one pass, and a pass that did not finish (an exception)
is dropped whole.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from dmuon_hf.core.errors import DMuonError

__all__ = ["GradState", "IllegalTransitionError", "StateMachine", "WeightState", "grad_machine", "weight_machine"]


class IllegalTransitionError(DMuonError):
    """A unit was asked to do what its state does not allow: a fault of the runtime, or a hook that was bypassed."""


class WeightState(enum.Enum):
    """Where the whole weights of a unit are on this rank."""

    SHARDED = "only the owners hold them"
    GATHERING = "a gather is in flight into the packed buffer"
    GATHERED = "the packed buffer holds them"


class GradState(enum.Enum):
    """Where the gradients of a unit are during a backward pass."""

    IDLE = "no backward pass has reached this unit"
    COLLECTING = "autograd is accumulating into the unsharded parameters"
    READY = "complete on this rank, waiting for their turn"
    REDUCING = "on the way to the owners"
    REDUCED = "with the owners, while the pass goes on"


S = TypeVar("S", bound=enum.Enum)

_WEIGHT_MOVES: Mapping[WeightState, frozenset[WeightState]] = {
    WeightState.SHARDED: frozenset({WeightState.GATHERING}),
    WeightState.GATHERING: frozenset({WeightState.GATHERED}),
    WeightState.GATHERED: frozenset({WeightState.SHARDED, WeightState.GATHERING}),
}

# A move to IDLE ends a pass: from REDUCED after a reduction, from the others without communication or in a pass that
# was dropped.
_GRAD_MOVES: Mapping[GradState, frozenset[GradState]] = {
    GradState.IDLE: frozenset({GradState.COLLECTING, GradState.REDUCING}),
    GradState.COLLECTING: frozenset({GradState.READY, GradState.REDUCING, GradState.IDLE}),
    GradState.READY: frozenset({GradState.REDUCING, GradState.IDLE}),
    GradState.REDUCING: frozenset({GradState.REDUCED, GradState.IDLE}),
    GradState.REDUCED: frozenset({GradState.IDLE}),
}


class StateMachine(Generic[S]):
    """One state and its legal moves; any other move raises and names the unit."""

    __slots__ = ("_moves", "_owner", "state")

    def __init__(self, owner: str, initial: S, moves: Mapping[S, frozenset[S]]) -> None:
        self._owner = owner
        self._moves = moves
        self.state = initial

    def to(self, target: S) -> None:
        if target not in self._moves[self.state]:
            raise IllegalTransitionError(f"unit {self._owner!r} cannot go from {self.state.name} to {target.name}")
        self.state = target


def weight_machine(owner: str) -> StateMachine[WeightState]:
    return StateMachine(owner, WeightState.SHARDED, _WEIGHT_MOVES)


def grad_machine(owner: str) -> StateMachine[GradState]:
    return StateMachine(owner, GradState.IDLE, _GRAD_MOVES)
