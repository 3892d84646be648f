"""Momentum and weight decay that follow the number of the step, which is kept in the groups: a resumed run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["MomentumWarmup", "WeightDecayRamp", "scheduled_momentum", "scheduled_weight_decay"]

_MOMENTUM_STEP, _DECAY_STEP = "momentum_step", "weight_decay_step"
"""Keys of a group: steps that its schedule has seen, saved with the group."""
_OWN_DECAY = "own_weight_decay"
"""Key of a group: its weight decay before the factor of the schedule."""

Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MomentumWarmup:
    """Momentum that rises linearly from `start` to `end` over the first `steps` steps, and stays there."""

    start: float = 0.85
    end: float = 0.95
    steps: int = 300

    def __post_init__(self) -> None:
        if not (0.0 <= self.start < 1.0 and 0.0 <= self.end < 1.0 and self.steps >= 1):
            raise ConfigurationError(f"{self} needs start and end in [0, 1) and at least one step")

    def __call__(self, step: int) -> float:
        """Momentum of a step, counted from 0."""
        return _ramp(self.start, self.end, step / self.steps)


@dataclass(frozen=True, slots=True)
class WeightDecayRamp:
    """Factor on weight decay that goes linearly from `start` to `end` over the first `steps` steps, and stays there."""

    start: float = 1.0
    end: float = 0.0
    steps: int = 1000

    def __post_init__(self) -> None:
        if not (_is_factor(self.start) and _is_factor(self.end) and self.steps >= 1):
            raise ConfigurationError(f"{self} needs start and end of at least 0 and at least one step")

    def __call__(self, step: int) -> float:
        """Factor of a step, counted from 0."""
        return _ramp(self.start, self.end, step / self.steps)


def _ramp(start: float, end: float, progress: float) -> float:
    return start + (end - start) * min(1.0, progress)


def _is_factor(value: float) -> bool:
    return 0.0 <= value < math.inf


def scheduled_momentum(optimizer: torch.optim.Optimizer, momentum_of: Callable[[int], float]) -> None:
    """Set the momentum of all muon groups before every step of `optimizer`."""

    def assign(group: Group, step: int) -> None:
        group["momentum"] = float(momentum_of(step))

    _before_each_step(optimizer, _MOMENTUM_STEP, assign, lambda group: group["route"] == "muon")


def scheduled_weight_decay(optimizer: torch.optim.Optimizer, factor_of: Callable[[int], float]) -> None:
    """Set the weight decay of all groups before every step of `optimizer`, to their own times a factor.

    So groups that are not decayed stay so, and the ratios of the others stay what they are.

    Raises:
        ConfigurationError: no group is decayed; or later, in a step, a factor is negative or not finite.
    """
    if not any(group["weight_decay"] for group in optimizer.param_groups):
        raise ConfigurationError(
            "weight_decay_schedule= is a factor on the weight decay of each group, and none is decayed: set "
            "weight_decay, of TrainingArguments or of create_optimizer"
        )
    for group in optimizer.param_groups:
        group[_OWN_DECAY] = group["weight_decay"]

    def assign(group: Group, step: int) -> None:
        factor = float(factor_of(step))
        if not _is_factor(factor):
            raise ConfigurationError(
                f"weight_decay_schedule gives the factor {factor} in step {step}: it is at least 0"
            )
        group["weight_decay"] = group[_OWN_DECAY] * factor

    _before_each_step(optimizer, _DECAY_STEP, assign, lambda group: True)


def _before_each_step(
    optimizer: torch.optim.Optimizer,
    key: str,
    assign: Callable[[Group, int], None],
    takes: Callable[[Group], bool],
) -> None:
    """Call `assign` for the groups that a schedule `takes`, now for the first step, then before every one.

    The number of the step is kept in the groups under `key`, so that a run that is resumed goes on where it was.
    """

    def advance(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in filter(takes, optimizer.param_groups):
            assign(group, group[key])
            group[key] += 1

    for group in filter(takes, optimizer.param_groups):
        group[key] = 0
        assign(group, 0)
    optimizer.register_step_pre_hook(advance)
