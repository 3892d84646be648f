"""What the hooks on `transformers.Trainer` add to its logs: learning rate and gradient norm of every parameter group.

`learning_rate/<group>` and `grad_norm/<group>` stand beside the Trainer's `learning_rate` and `grad_norm`, which are
those of the first group and of all gradients. With `qk_clip` there are `max_attention_logit`, the largest of all heads,
and `clipped_heads`, how many of them were rescaled. Like the Trainer's own they are of the last step before the entry,
and norms are taken before clipping: their squares add up to that of `grad_norm`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

import dmuon_hf.core as dmuon
from dmuon_hf.core.optim.group_norms import group_norms, local_group_powers
from dmuon_hf.prepare import muon_of
from dmuon_hf.qk_clip import last_qk_clip

__all__ = ["get_grad_norm", "log", "maybe_log_save_evaluate"]


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of the groups, as it was made."""

    number: int
    rates: dict[str, float]
    powers: Tensor
    """This rank's part of the squared norms, of gradients that are clipped already."""
    clip: float
    """What clipping multiplied the gradients by."""


_steps: WeakKeyDictionary[Any, _Step] = WeakKeyDictionary()
_entries: WeakKeyDictionary[Any, dict[str, float]] = WeakKeyDictionary()


def get_grad_norm(original: Callable[..., Any], trainer: Any, model: Any, grad_norm: Any = None) -> Any:
    """`Trainer._get_grad_norm`, the last that a step does before the optimizer: note what a log entry will need.

    Without communication; one pass over the gradients in steps that are logged, nothing in others.
    """
    total = original(trainer, model, grad_norm)
    optimizer = muon_of(trainer.optimizer)
    if optimizer is not None and _will_be_logged(trainer):
        _steps[trainer] = _Step(
            number=trainer.state.global_step + 1,
            rates={group["group_name"]: float(group["lr"]) for group in optimizer.param_groups},
            powers=local_group_powers(optimizer.param_groups, optimizer.runtime),
            clip=1.0 if grad_norm is None else _clipped_by(float(total), trainer.args.max_grad_norm),
        )
    return total


def _will_be_logged(trainer: Any) -> bool:
    """Whether the step that is being made may be logged, by the Trainer's own rules."""
    args, step = trainer.args, trainer.state.global_step + 1
    if args.logging_strategy == "epoch" or (step == 1 and args.logging_first_step):
        return True
    return bool(args.logging_strategy == "steps" and step % trainer.state.logging_steps == 0)


def _clipped_by(total: float, max_norm: float) -> float:
    return min(1.0, max_norm / (total + 1e-6)) if math.isfinite(total) else 1.0


def maybe_log_save_evaluate(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """`Trainer._maybe_log_save_evaluate`: make the entry of the groups where the Trainer makes one. Collective then."""
    optimizer, step = muon_of(trainer.optimizer), _steps.pop(trainer, None)
    is_logged = trainer.control.should_log and trainer.state.global_step > trainer._globalstep_last_logged
    if optimizer is not None and step is not None and step.number == trainer.state.global_step and is_logged:
        _entries[trainer] = _entry(optimizer, step)
    try:
        return original(trainer, *args, **kwargs)
    finally:
        _entries.pop(trainer, None)


def _entry(optimizer: dmuon.Muon, step: _Step) -> dict[str, float]:
    report = last_qk_clip(optimizer)
    seen = {} if report is None else {"max_attention_logit": report.max_logit, "clipped_heads": report.clipped_heads}
    norms = group_norms(step.powers, optimizer.runtime)
    entry = {f"learning_rate/{name}": rate for name, rate in step.rates.items()}
    entry |= {f"grad_norm/{name}": norm / step.clip for name, norm in zip(step.rates, norms, strict=True)}
    return entry | seen


def log(original: Callable[..., Any], trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
    """`Trainer.log`: add the entry of the groups to that of the step, for the history and for every callback."""
    if "loss" in logs and trainer in _entries:
        logs.update(_entries.pop(trainer))
    return original(trainer, logs, *args, **kwargs)
