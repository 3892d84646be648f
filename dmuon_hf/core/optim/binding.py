"""Which model the optimizer belongs to: its runtime, and whether the groups still hold its parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim.groups import trainable_parameters
from dmuon_hf.core.optim.interfaces import OptimizerRuntime
from dmuon_hf.core.runtime import require_runtime, runtime_of
from dmuon_hf.core.runtime.replica_check import check_replicas, debug_enabled

__all__ = ["check_held", "check_rebindable", "check_replicas", "debug_enabled", "is_dedicated", "runtime_with_matrices"]


def is_dedicated(model: nn.Module) -> bool:
    """Whether ``dedicate_params`` was called on the model."""
    return runtime_of(model) is not None


def runtime_with_matrices(model: nn.Module) -> OptimizerRuntime:
    """The runtime of a model with at least one dedicated matrix, or a ``ConfigurationError`` that says what to call."""
    runtime: OptimizerRuntime = require_runtime(model)
    if not runtime.dedicated:
        raise ConfigurationError(
            "dedicate_params() selected no matrix, so Muon would update none: widen its predicate, or use AdamW"
        )
    return runtime


def check_rebindable(
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    by_name: Mapping[str, nn.Parameter],
    muon_names: Collection[str],
) -> None:
    """Raise ``ConfigurationError`` unless groups of ``names`` fit a model with trainable parameters ``by_name``."""
    grouped = {name for group_names in names for name in group_names}
    gone = sorted(grouped - by_name.keys())
    loose = sorted(by_name.keys() - grouped)
    if gone or loose:
        raise ConfigurationError(
            f"the model's trainable parameters changed: not found {gone}, in no group {loose}. Build a new Muon for it."
        )
    moved = [
        name
        for group, group_names in zip(groups, names, strict=True)
        for name in group_names
        if (name in muon_names) != (group["route"] == "muon")
    ]
    if moved:
        raise ConfigurationError(
            f"parameters changed their route: {moved}. Dedicate the model with the predicate that the optimizer was "
            "built with."
        )


def check_held(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], model: nn.Module) -> None:
    """Raise ``ConfigurationError`` unless the groups hold, by identity, exactly what ``model`` trains.

    Frozen parameters may stay in a group.
    """
    held = {id(param) for group in groups for param in group["params"]}
    trainable = trainable_parameters(model)
    loose = [name for name, param in trainable.items() if id(param) not in held]
    stale = [
        name
        for group, group_names in zip(groups, names, strict=True)
        for name, param in zip(group_names, group["params"], strict=True)
        if param.requires_grad and trainable.get(name) is not param
    ]
    if loose or stale:
        raise ConfigurationError(
            f"the optimizer does not hold the model's current parameters (not in a group: {loose}; no longer in the "
            f"model: {stale}): the model was sharded or changed after the optimizer was built. Call "
            "optimizer.rebind(model), or build the optimizer last."
        )
