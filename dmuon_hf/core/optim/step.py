"""What a step does to each route, once all ranks have agreed on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim.adamw import apply_adamw
from dmuon_hf.core.optim.gradients import local_tensor
from dmuon_hf.core.optim.groups import scalar
from dmuon_hf.core.optim.interfaces import DedicatedMatrix, OptimizerRuntime
from dmuon_hf.core.optim.sweep import sweep
from dmuon_hf.core.optim.update import MuonRule, Orthogonalize, OwnedMatrix

__all__ = ["local_grads", "muon_rules", "step_adamw", "step_muon"]

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
            )
            rules |= dict.fromkeys(map(id, group["params"]), rule)
    return rules


def step_muon(
    groups: Iterable[Group],
    state: State,
    runtime: OptimizerRuntime,
    reached: Sequence[bool],
    orthogonalize: Orthogonalize,
    *,
    on_batch: Callable[[Sequence[OwnedMatrix]], None] | None = None,
) -> int:
    """Update the matrices of the groups that some rank has a gradient for, as far as this rank owns them.

    Publishes every unit, so that it is collective under HSDP.

    Args:
        groups: The optimizer's groups, of both routes.
        state: The optimizer's state.
        runtime: Runtime of the model.
        reached: Per dedicated matrix, in plan order: some rank has a gradient for it.
        orthogonalize: Newton-Schulz.
        on_batch: Called before each batch with its matrices.

    Returns:
        Logical matrices orthogonalised here.

    Raises:
        ConfigurationError: A gradient is gone; before anything is updated.
    """
    all_rules = muon_rules(groups)
    rules: dict[int, MuonRule] = {}
    mine: dict[int, OwnedMatrix] = {}
    for matrix, has_grad in zip(runtime.dedicated.values(), reached, strict=True):
        key = id(matrix.param)
        if has_grad and key in all_rules:
            rules[key] = all_rules[key]
            if matrix.is_owner:
                mine[key] = _owned_matrix(matrix, state[matrix.param]["momentum_buffer"])
    return sweep(runtime.matrix_units, rules, mine, orthogonalize, on_batch=on_batch)


def _owned_matrix(matrix: DedicatedMatrix, momentum: Tensor) -> OwnedMatrix:
    param = matrix.param
    if param.grad is None:
        raise ConfigurationError(f"the gradient of {matrix.name!r} is gone: set no .grad to None before step()")
    return OwnedMatrix(
        name=matrix.name,
        weight=local_tensor(param, matrix.name),
        grad=local_tensor(param.grad, matrix.name),
        momentum=local_tensor(momentum, matrix.name),
        spec=matrix.spec,
    )


def step_adamw(group: Group, state: State) -> None:
    """Update this rank's part of every parameter of an adamw group that has a gradient. No communication."""
    params = [param for param in group["params"] if param.grad is not None]
    if not params:
        return
    with torch.profiler.record_function(f"dmuon::adamw {group['group_name']}"):
        apply_adamw(
            [local_tensor(param, "a parameter") for param in params],
            [local_tensor(param.grad, "a gradient") for param in params],
            [{key: local_tensor(value, f"state {key!r}") for key, value in state[param].items()} for param in params],
            {**group, "lr": scalar(group["lr"])},
        )
