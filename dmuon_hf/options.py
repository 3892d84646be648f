"""Options of the optimizer that TrainingArguments do not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

import dmuon_hf.core as dmuon
from dmuon_hf.adapters import LoraPolicy, check_lora
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.coefficients import Coefficients, schedule
from dmuon_hf.core.optim.normuon import UPDATE_RULES
from dmuon_hf.qk_clip import check_threshold
from dmuon_hf.rates import RateGroup, rate_groups
from dmuon_hf.schedules import MomentumWarmup, WeightDecayRamp

__all__ = ["DMuonOptions", "options_of"]

Predicate = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class DMuonOptions:
    """Options of the optimizer that TrainingArguments do not have. See `create` for their meaning."""

    muon_lr: float | None = None
    adamw_lr: float | None = None
    embedding_lr: float | None = None
    head_lr: float | None = None
    scalar_lr: float | None = None
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    muon_weight_decay: float | None = None
    momentum: float | None = None
    momentum_schedule: Callable[[int], float] | Mapping[str, Any] | None = None
    weight_decay_schedule: Callable[[int], float] | Mapping[str, Any] | None = None
    nesterov: bool = True
    ns_steps: int = 5
    ns_backend: Literal["gram", "direct", "auto"] | dmuon.NewtonSchulz = "auto"
    coefficients: Coefficients | None = None
    lr_scale: Literal["match_rms_adamw", "original", "spectral", "none"] = "match_rms_adamw"
    update_rule: Literal["muon", "normuon"] = "muon"
    normuon_beta2: float | None = None
    predicate: Predicate | None = None
    routes: Mapping[str, str] | None = None
    layouts: Mapping[str, dmuon.MatrixSpec | str] | None = None
    per_head: bool = False
    lora: LoraPolicy = "adamw"
    replicate_async: bool = True
    qk_clip: float | None = None

    def __post_init__(self) -> None:
        if self.lr_scale != "match_rms_adamw" and self.muon_lr is None:
            raise ConfigurationError(
                f"lr_scale={self.lr_scale!r} measures Muon's learning rate on another scale than AdamW's: pass muon_lr "
                "(only lr_scale='match_rms_adamw' can share the AdamW learning rate)"
            )
        self._check_schedules()
        self._check_update_rule()
        if self.qk_clip is not None:
            check_threshold(self.qk_clip)
        check_lora(self.lora, ["of a model that is not known yet"])
        if self.coefficients is not None:
            schedule(self.coefficients)
            if isinstance(self.ns_backend, dmuon.NewtonSchulz):
                raise ConfigurationError(
                    "coefficients= has no effect beside ns_backend=NewtonSchulz(...), which has its own: "
                    "give them there"
                )
        # Refused now rather than when the model is there.
        self.rate_groups()

    def _check_schedules(self) -> None:
        if self.momentum_schedule is not None:
            if self.momentum is not None:
                raise ConfigurationError("pass either momentum= or momentum_schedule=, which sets it in every step")
            self.momentum_of()(0)
        if self.weight_decay_schedule is not None:
            self.weight_decay_factor()(0)

    def _check_update_rule(self) -> None:
        if self.update_rule not in UPDATE_RULES:
            raise ConfigurationError(f"update_rule is one of {UPDATE_RULES}, not {self.update_rule!r}")
        if self.normuon_beta2 is None:
            return
        if not 0.0 <= self.normuon_beta2 < 1.0:
            raise ConfigurationError(f"normuon_beta2 is in [0, 1), not {self.normuon_beta2!r}")
        rules = {
            self.update_rule,
            *(group.settings.get("update_rule") for group in rate_groups(self.param_groups or ())),
        }
        if "normuon" not in rules:
            raise ConfigurationError("normuon_beta2 has no effect without update_rule='normuon'")

    def rate_groups(self) -> tuple[RateGroup, ...]:
        """`param_groups`, checked."""
        groups = rate_groups(self.param_groups or ())
        if self.momentum_schedule is not None and any("momentum" in group.settings for group in groups):
            raise ConfigurationError("a group of param_groups sets momentum, and so does momentum_schedule=: leave one")
        return groups

    def momentum_of(self) -> Callable[[int], float]:
        """Momentum of every step, counted from 0."""
        if self.momentum_schedule is not None:
            return _schedule("momentum_schedule", self.momentum_schedule, MomentumWarmup)
        constant = 0.95 if self.momentum is None else self.momentum
        return lambda step: constant

    def weight_decay_factor(self) -> Callable[[int], float]:
        """Factor on the weight decay of every group in every step, counted from 0."""
        if self.weight_decay_schedule is not None:
            return _schedule("weight_decay_schedule", self.weight_decay_schedule, WeightDecayRamp)
        return lambda step: 1.0

    def newton_schulz(self) -> Literal["gram", "direct", "auto"] | dmuon.NewtonSchulz:
        """The `ns_backend` of `Muon`."""
        if self.coefficients is None or isinstance(self.ns_backend, dmuon.NewtonSchulz):
            return self.ns_backend
        return dmuon.NewtonSchulz(self.ns_backend, coefficients=self.coefficients)


def options_of(given: Mapping[str, Any]) -> DMuonOptions:
    """The options that a caller gave by name.

    Raises:
        ConfigurationError: an unknown name, which is listed with the known ones, or options that contradict each other.
    """
    return DMuonOptions(**_known(given, DMuonOptions, "options"))


def _schedule(option: str, given: Any, cls: type[MomentumWarmup | WeightDecayRamp]) -> Callable[[int], float]:
    """What a caller gave as a schedule: a function, or the fields of `cls` as a mapping."""
    if isinstance(given, Mapping):
        return cls(**_known(given, cls, f"fields of {option}"))
    if not callable(given):
        raise ConfigurationError(
            f"{option} is a function of the step, or the fields of {cls.__name__} as a mapping; got {given!r}"
        )
    function: Callable[[int], float] = given
    return function


def _known(given: Mapping[str, Any], cls: type, what: str) -> dict[str, Any]:
    known = {field.name for field in fields(cls)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigurationError(f"unknown {what} {unknown}; the {what} are {sorted(known)}")
    return dict(given)
