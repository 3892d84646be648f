"""What pipeline stages of ``torch.distributed.pipelining`` must know about dedicated parameters.

A schedule runs a backward pass for each microbatch. What FSDP2 is told on the way (accumulate, then reduce once) units
are told by the same calls (:mod:`fsdp_methods`, :mod:`fsdp_patch`). The rest is here: that a pass goes through one of
the stages of a rank and leaves the others alone, and which pass is the last one where the stage is no FSDP module.

Tested with torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dmuon_hf.core.runtime.fsdp_units import hooks_below

if TYPE_CHECKING:
    from dmuon_hf.core.runtime.schedule import BackwardPass
    from dmuon_hf.core.runtime.unit import Unit

__all__ = ["averagings_of", "follow_pipelining", "lead_through_stages"]

_MODULE = "torch.distributed.pipelining.stage"
_METHOD = "backward_maybe_with_nosync"
_MARK = "_dmuon_follows"
_PART = "_dmuon_part"


class _Averaging(Protocol):
    def averages(self, module: nn.Module) -> bool:
        """Whether it averages gradients of a parameter at or below ``module``."""

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of one backward pass of a stage: it averages in the last one alone."""


_averaging: weakref.WeakSet[_Averaging] = weakref.WeakSet()  # in no order: of one model there is one


def lead_through_stages(averaging: _Averaging) -> None:
    """Tell ``averaging`` of the passes of stages that hold its parameters."""
    _averaging.add(averaging)


def averagings_of(module: nn.Module) -> list[_Averaging]:
    """What averages gradients of parameters at or below ``module``."""
    return [averaging for averaging in _averaging if averaging.averages(module)]


def follow_pipelining() -> None:
    """Follow the stages of this process, if there can be any: nothing while nobody has imported pipelining.

    Called before every forward that may be a stage's; safe to repeat. Importing pipelining here would import compilers.
    """
    module = sys.modules.get(_MODULE)
    stage: Any = getattr(module, "_PipelineStageBase", None)
    if stage is None or hasattr(getattr(stage, _METHOD), _MARK):
        return
    original = getattr(stage, _METHOD)

    @functools.wraps(original)
    def backward(self: Any, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        part = self.__dict__.get(_PART)
        if part is None:
            part = self.__dict__[_PART] = _Part.of(self.submod)
        with part.microbatch(backward_type, last=last_backward):
            return original(self, backward_type, bwd_kwargs, last_backward=last_backward)

    setattr(backward, _MARK, True)
    setattr(stage, _METHOD, backward)


@dataclass(frozen=True, slots=True)
class _Part:
    """What of dedicated models a stage runs.

    Attributes:
        units: Its units, by the backward pass that reduces them.
        averaging: What averages its gradients.
        reduces_by_itself: Whether the stage tells its units when to reduce, as an FSDP module.
    """

    units: Mapping[BackwardPass, Sequence[Unit]]
    averaging: Sequence[_Averaging]
    reduces_by_itself: bool

    @classmethod
    def of(cls, stage: nn.Module) -> _Part:
        units: dict[BackwardPass, list[Unit]] = {}
        for hooks in hooks_below(stage):
            units.setdefault(hooks.backward, []).append(hooks.unit)
        return cls(units, averagings_of(stage), isinstance(stage, FSDPModule))

    @contextlib.contextmanager
    def microbatch(self, kind: str, *, last: bool) -> Iterator[None]:
        """Context of one backward pass through the stage.

        Raises:
            NotImplementedError: The schedule computes gradients of weights apart from those of inputs.
        """
        if not self.units and not self.averaging:
            yield
            return
        if kind != "full":
            raise NotImplementedError(
                "a schedule that splits backward into one for inputs and one for weights (zero bubble) takes gradients "
                "of weights past autograd's hooks, which reduce those of dedicated parameters: use ScheduleGPipe, "
                "Schedule1F1B, ScheduleInterleaved1F1B or ScheduleLoopedBFS"
            )
        with contextlib.ExitStack() as stack:
            for backward, units in self.units.items():
                stack.enter_context(backward.only(units))
                if not self.reduces_by_itself and not last:
                    stack.enter_context(_accumulating(units))
            for averaging in self.averaging:
                stack.enter_context(averaging.microbatch(last=last))
            yield


@contextlib.contextmanager
def _accumulating(units: Sequence[Unit]) -> Iterator[None]:
    """Context in which ``units`` keep gradients on this rank."""
    synchronised = [unit for unit in units if unit.requires_sync]
    for unit in synchronised:
        unit.requires_sync = False
    try:
        yield
    finally:
        for unit in synchronised:
            unit.requires_sync = True
