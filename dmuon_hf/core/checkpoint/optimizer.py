"""The state dict of an optimizer: state by section and parameter name, and groups."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dmuon_hf.core.checkpoint.hyperparameters import (
    described_groups,
    group_problems,
    load_hyperparameters,
    plain,
    update_rule_problems,
)
from dmuon_hf.core.checkpoint.source import Source, check_together
from dmuon_hf.core.checkpoint.whole import begin, device_of, group_of, is_first, whole_of, write_whole
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import canonical_name
from dmuon_hf.core.runtime.runtime import Runtime

__all__ = ["get_optimizer_state_dict", "set_optimizer_state_dict"]

SECTIONS = ("fsdp", "dedicated", "dedicated_adamw")

StateKey: TypeAlias = tuple[str, str, str]
"""Section, canonical name and state name, such as ``("dedicated", "layers.0.q_proj.weight", "momentum_buffer")``."""


@torch.no_grad()
def get_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    cpu_offload: bool = True,
    rank0_only: bool = True,
    timeout: timedelta | None = None,
) -> dict[str, Any]:
    """The optimizer's state by parameter name, as whole plain tensors. A collective: every rank calls it.

    Args:
        model: the model that the optimizer trains.
        optimizer: a `Muon`, or a wrapper with its ``param_groups`` and ``state``.
        cpu_offload: give tensors on the CPU.
        rank0_only: give the result on rank 0 and empty sections on the others.
        timeout: how long to wait for ranks that have not called this; as long as it takes unless they are known never
            to come, if left out.

    Returns:
        A dict of four sections. ``"dedicated"``: name to ``{"momentum_buffer"}`` of the muon route, with
        ``"second_moment"`` where the update rule is ``"normuon"``. ``"fsdp"``: name to ``{"step", "exp_avg",
        "exp_avg_sq"}`` of AdamW parameters. ``"dedicated_adamw"``: the same for dedicated parameters on the adamw
        route. ``"param_groups"``: per group its hyperparameters and, in ``"params"``, names.

    Raises:
        ConfigurationError: the optimizer has no routes, or holds a parameter that the model has not.
        LockstepError: a rank did not call this in time, or waits for another collective.
    """
    runtime = begin(model, "get_optimizer_state_dict", timeout)
    keep = not rank0_only or is_first(runtime, model)
    result: dict[str, Any] = {section: {} for section in SECTIONS}
    for (section, name, key), value in _values(_optimizer_state(model, optimizer, runtime)).items():
        if isinstance(value, Tensor):
            whole = whole_of(value, keep=keep, cpu_offload=cpu_offload)
        else:
            whole = copy.deepcopy(value)
        if keep:
            result[section].setdefault(name, {})[key] = whole
    result["param_groups"] = described_groups(optimizer.param_groups, _names(model, runtime)) if keep else []
    return result


@torch.no_grad()
def set_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    *,
    timeout: timedelta | None = None,
) -> None:
    """Load what `get_optimizer_state_dict` gave, on any number of ranks: the state in place, and all hyperparameters.

    A collective: every rank calls it, either all with the state dict, or rank 0 with it and others with an empty one,
    which then receive the values. Everything is checked on all ranks before anything is written.

    Args:
        model: the model that the optimizer trains.
        optimizer: a `Muon` with the groups that the state was saved with.
        state_dict: in the form of `get_optimizer_state_dict`.
        timeout: how long to wait for ranks that have not called this; as long as it takes unless they are known never
            to come, if left out.

    Raises:
        ConfigurationError: on every rank, if on any a parameter has no state, another route, another shape or a tensor
            that `set_model_state_dict` would refuse, or the groups differ; nothing changed.
        LockstepError: a rank did not call this in time, or waits for another collective.
    """
    runtime = begin(model, "set_optimizer_state_dict", timeout)
    group = group_of(runtime, model)
    holders = _optimizer_state(model, optimizer, runtime)
    targets = _values(holders)
    filled = any(state_dict.get(key) for key in (*SECTIONS, "param_groups"))
    entries = _sorted_in(_flattened(state_dict), targets)
    source = Source.open(entries, filled=filled, group=group, extra=state_dict.get("param_groups", []))

    def problems() -> Iterator[str]:
        groups = described_groups(optimizer.param_groups, _names(model, runtime))
        # All that they keep differs then: nothing else is worth a word.
        if other_rules := list(update_rule_problems(groups, source.extra)):
            yield from other_rules
            return
        yield from _route_problems(targets, source)
        yield from source.problems(targets)
        yield from group_problems(groups, source.extra)

    check_together(problems, "optimizer state dict", group)
    for key, holder in holders.items():
        if isinstance(targets[key], Tensor):
            write_whole(targets[key], source.tensor(key, device_of(model)))
        else:
            holder[key[2]] = plain(source.value(key))
    for param_group, saved in zip(optimizer.param_groups, source.extra, strict=True):
        load_hyperparameters(param_group, saved)


def _names(model: nn.Module, runtime: Runtime | None) -> dict[int, str]:
    owned = runtime.owned_behind() if runtime is not None else {}
    return {id(owned.get(id(param), param)): canonical_name(name, model) for name, param in model.named_parameters()}


def _optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, runtime: Runtime | None
) -> dict[StateKey, dict[str, Any]]:
    """Every entry of the optimizer's state, with the live per-parameter dict that holds it."""
    names = _names(model, runtime)
    dedicated = {id(param.param) for param in runtime.dedicated.values()} if runtime is not None else set()
    holders: dict[StateKey, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        if "route" not in group:
            raise ConfigurationError(
                f"{type(optimizer).__name__} has no routes: these functions are for Muon. For other optimizers use "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
            )
        for param in group["params"]:
            name = names.get(id(param))
            if name is None:
                raise ConfigurationError(
                    f"group {group.get('group_name')!r} holds a parameter of shape {tuple(param.shape)} that the model "
                    "does not: build the optimizer after dedicate_params() and fully_shard()"
                )
            section = (
                "dedicated" if group["route"] == "muon" else "dedicated_adamw" if id(param) in dedicated else "fsdp"
            )
            holder = optimizer.state[param]
            holders.update({(section, name, key): holder for key in holder})
    return holders


def _values(holders: Mapping[StateKey, Mapping[str, Any]]) -> dict[StateKey, Any]:
    return {key: holder[key[2]] for key, holder in holders.items()}


def _flattened(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """By `StateKey`; what does not have the form keeps a key that fits nothing, and is reported as unexpected."""
    flat: dict[Any, Any] = {}
    for section, entries in state_dict.items():
        if section == "param_groups":
            continue
        if not isinstance(entries, Mapping):
            flat[(section,)] = entries
            continue
        for name, entry in entries.items():
            if isinstance(entry, Mapping):
                flat.update({(section, name, key): value for key, value in entry.items()})
            else:
                flat[(section, name)] = entry
    return flat


def _sorted_in(flat: Mapping[Any, Any], targets: Mapping[StateKey, Any]) -> dict[Any, Any]:
    """AdamW state under the section that it has here: whether its parameter has an owner depends on the run."""
    adamw = {name: section for section, name, _ in targets if section != "dedicated"}

    def placed(key: Any) -> Any:
        movable = len(key) == 3 and key[0] in ("fsdp", "dedicated_adamw")
        return (adamw.get(key[1], key[0]), *key[1:]) if movable else key

    return {placed(key): value for key, value in flat.items()}


def _route_problems(targets: Mapping[StateKey, Any], source: Source) -> Iterator[str]:
    here = {name: section for section, name, _ in targets}
    there = {key[1]: key[0] for key in source if len(key) == 3}
    for name, section in here.items():
        if name in there and there[name] != section:
            yield f"{name} is in section {there[name]!r} of the state dict, but this optimizer has it in {section!r}"
