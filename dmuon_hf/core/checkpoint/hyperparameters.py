"""The groups of an optimizer in a state dict: names in place of parameters, and hyperparameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon_hf.core.checkpoint.source import flaw

__all__ = [
    "described_groups",
    "group_problems",
    "load_hyperparameters",
    "other_update_rule",
    "plain",
    "update_rule_problems",
]


def described_groups(groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The groups with names, given by identity, in place of parameters, sharing nothing with the optimizer."""
    return [
        {
            key: [names[id(param)] for param in value]
            if key == "params"
            else value.detach().cpu().clone()
            if isinstance(value, Tensor)
            else copy.deepcopy(value)
            for key, value in group.items()
        }
        for group in groups
    ]


def group_problems(groups: Sequence[Mapping[str, Any]], saved: Any) -> Iterator[str]:
    """Why saved groups do not fit ``groups``, which are described as :func:`described_groups` does."""
    described = [group.get("group_name") for group in groups]
    if not isinstance(saved, (list, tuple)) or not all(isinstance(group, Mapping) for group in saved):
        yield "param_groups is not a list of dicts"
    elif [group.get("group_name") for group in saved] != described:
        yield f"param_groups are {[group.get('group_name') for group in saved]}, but {described} here"
    else:
        for group, other in zip(groups, saved, strict=True):
            if difference := set(group["params"]) ^ set(other.get("params", ())):
                yield f"group {group.get('group_name')!r} differs in {sorted(map(str, difference))}"
            for option, value in other.items():
                if option in group and not _is_alike(group[option], value):
                    yield f"group {group.get('group_name')!r} has {option}={value!r}, but {group[option]!r} here"


def update_rule_problems(groups: Sequence[Mapping[str, Any]], saved: Any) -> Iterator[str]:
    """Why the state of saved groups is not that of ``groups``, by name: their update rules keep other tensors."""
    listed = saved if isinstance(saved, (list, tuple)) else ()
    there = {group.get("group_name"): group for group in listed if isinstance(group, Mapping)}
    for group in groups:
        name = group.get("group_name")
        if group.get("route") == "muon" and name in there:
            rules = group["update_rule"], there[name].get("update_rule", "muon")
            if rules[0] != rules[1]:
                yield other_update_rule(f"group {name!r}", *rules)


def other_update_rule(what: str, here: str, there: str) -> str:
    """That the state of ``what`` is of update rule ``there``, and what to do about it."""
    return (
        f"{what} was saved with update_rule={there!r}, but has {here!r} here, which keeps other state: build the "
        f"optimizer with update_rule={there!r} to go on with it, or load the weights alone and begin with {here!r} and "
        "fresh state"
    )


def _is_alike(current: Any, saved: Any) -> bool:
    """Whether a hyperparameter can take a saved value: a number is one, as a tensor without dimensions is."""
    if isinstance(saved, Tensor):
        return saved.ndim == 0 and not flaw(saved) and isinstance(current, (int, float, Tensor))
    if isinstance(current, Tensor):
        return current.ndim == 0 and isinstance(saved, (int, float))
    if isinstance(current, (int, float)):
        return isinstance(saved, (int, float))
    if isinstance(current, (list, tuple)) and current and isinstance(saved, (list, tuple)):
        return len(current) == len(saved) and all(map(_is_alike, current, saved))
    return True


def load_hyperparameters(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give a group what a saved one has, in place where it is a tensor."""
    for key, value in saved.items():
        if key == "params":
            continue
        if isinstance(group.get(key), Tensor):
            group[key].copy_(torch.as_tensor(value))
        else:
            group[key] = plain(value)


def plain(value: Any) -> Any:
    """A copy; a number of a tensor without dimensions."""
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else copy.deepcopy(value)
