"""What a step reads from the groups, and what it does to the adamw route."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dmuon_hf.core.optim.adamw import apply_adamw
from dmuon_hf.core.optim.gradients import local_tensor
from dmuon_hf.core.optim.groups import scalar
from dmuon_hf.core.optim.update import MuonRule

__all__ = ["local_grads", "muon_rules", "step_adamw"]

Group = Mapping[str, Any]
State = Mapping[Tensor, Mapping[str, Tensor]]


def local_grads(groups: Iterable[Group]) -> list[Tensor]:
    """Every gradient this rank holds, live local tensors. Call under ``no_grad``."""
    return [
        local_tensor(param.grad, "a gradient")
        for group in groups
        for param in group["params"]
        if param.grad is not None
    ]


def muon_rules(groups: Iterable[Group]) -> dict[int, MuonRule]:
    """The hyperparameters of every parameter of the muon route, one object per group, by the parameter's identity."""
    rules: dict[int, MuonRule] = {}
    for group in groups:
        if group["route"] == "muon":
            rule = MuonRule(
                lr=scalar(group["lr"]),
                momentum=scalar(group["momentum"]),
                nesterov=group["nesterov"],
                ns_steps=group["ns_steps"],
                weight_decay=group["weight_decay"],
                lr_scale=group["lr_scale"],
                update_rule=group["update_rule"],
                normuon_beta2=group["normuon_beta2"],
            )
            rules |= dict.fromkeys(map(id, group["params"]), rule)
    return rules


def step_adamw(group: Group, state: State, params: Iterable[Tensor]) -> None:
    """Update this rank's part of those of ``params``, all of an adamw group, that have a gradient. No communication."""
    params = [param for param in params if param.grad is not None]
    if not params:
        return
    with torch.profiler.record_function(f"dmuon::adamw {group['group_name']}"):
        apply_adamw(
            [local_tensor(param, "a parameter") for param in params],
            [local_tensor(param.grad, "a gradient") for param in params if param.grad is not None],
            [{key: local_tensor(value, f"state {key!r}") for key, value in state[param].items()} for param in params],
            {**group, "lr": scalar(group["lr"])},
        )
