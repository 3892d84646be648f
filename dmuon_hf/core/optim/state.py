"""Optimizer state: made for every parameter on every rank at construction, and checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from dmuon_hf.core.checkpoint.hyperparameters import update_rule_problems
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim.normuon import second_moment_shape
from dmuon_hf.core.optim.update import empty_second_moment, momentum_dtype
from dmuon_hf.core.plan import MatrixSpec
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor

__all__ = ["PARAM_NAMES", "check_loadable", "follow_parameters", "fresh_state", "restore_state"]

PARAM_NAMES = "param_names"
"""Key of an optimizer's state dict: the canonical names of the parameters of each group, in order."""


def fresh_state(
    param: Tensor, route: str, dtype: torch.dtype | None = None, *, normalised: MatrixSpec | None = None
) -> dict[str, Tensor]:
    """Zero state of one parameter; tensors have the parameter's own layout, so empty rows off the owner.

    muon: ``momentum_buffer`` in fp32 (fp64 for fp64 parameters). adamw: as ``torch.optim.AdamW``, with ``step`` an fp32
    scalar on the CPU. ``dtype`` is that of the tensors, by default the momentum's own or the parameter's.

    Args:
        normalised: The logical matrices of a parameter whose update rule normalises their rows: it has a
            ``second_moment`` too, one value for each row, in fp32 (fp64) whatever ``dtype`` is.
    """
    with torch.no_grad():
        if route == "muon":
            state = {"momentum_buffer": torch.zeros_like(param, dtype=dtype or momentum_dtype(param))}
            return state if normalised is None else {**state, "second_moment": _fresh_second_moment(param, normalised)}
        return {
            "step": torch.tensor(0.0, dtype=torch.float32),
            "exp_avg": torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format),
        }


def _fresh_second_moment(param: Tensor, spec: MatrixSpec) -> Tensor:
    """Where the parameter has an owner, there; else with every rank that holds members of a stack, or a matrix.

    So a rank that holds some of a matrix has the second moments of all its rows.
    """
    if not isinstance(param, DTensor):
        return empty_second_moment(param, spec).zero_()
    shape, dtype = torch.Size(second_moment_shape(param.shape, spec)), momentum_dtype(param)
    local = param.to_local()
    members = () if spec.folded else local.shape[:-2]
    placements = [_of_members(placement, 2 if spec.folded else param.ndim) for placement in param.placements]
    if isinstance(param, OwnedTensor):
        beside = {axis: placements[axis] for axis in range(len(placements)) if axis not in param.owned_axes}
        values = local.new_zeros((*members, shape[-1]) if param.is_owner else (0, *shape[1:]), dtype=dtype)
        return OwnedTensor.from_local(
            values, param.device_mesh, owner=param.owner, shape=shape, unowned=beside, origin=param.origin
        )
    values = local.new_zeros((*members, shape[-1]), dtype=dtype)
    stride = (shape[-1], 1)[-len(shape) :]
    return DTensor.from_local(values, param.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _of_members(placement: Placement, ndim: int) -> Placement:
    """The placement of second moments: where it cuts a stack into members as it is, else of all rows on every rank."""
    dim: int | None = getattr(placement, "dim", None)
    return placement if ndim == 3 and dim is not None and dim % ndim == 0 else Replicate()


def follow_parameters(state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Move state to the device of its parameter, where ``model.to(device)`` came after the construction.

    ``step`` stays on the CPU.
    """
    for param, entry in state.items():
        for key, value in entry.items():
            if key != "step" and isinstance(value, Tensor) and value.device != param.device:
                # State of a model on meta has no values, and is zero.
                entry[key] = torch.zeros_like(value, device=param.device) if value.is_meta else value.to(param.device)


def check_loadable(
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    state_dict: Mapping[str, Any],
    layouts: Mapping[int, Tensor],
    normalised: Mapping[int, MatrixSpec],
) -> None:
    """Refuse a state dict that does not fit, before anything is changed.

    Args:
        groups: The optimizer's own groups.
        names: Canonical names of their parameters.
        state_dict: In the form of ``torch.optim.Optimizer.state_dict()``.
        layouts: What the state of a parameter is laid out like, by its identity, where not like the parameter.
        normalised: The logical matrices of parameters whose rows are normalised, by their identity.

    Raises:
        ConfigurationError: Other groups, another update rule, or state that is missing, of another shape, or whole for
        a distributed parameter.
    """
    saved_groups = state_dict["param_groups"]
    ours = [(group["group_name"], len(group["params"])) for group in groups]
    theirs = [(saved.get("group_name"), len(saved["params"])) for saved in saved_groups]
    fits = len(ours) == len(theirs) and all(
        count == saved_count and saved_name in (None, name)
        for (name, count), (saved_name, saved_count) in zip(ours, theirs, strict=True)
    )
    if not fits:
        raise ConfigurationError(
            f"the state dict has groups {theirs} of (group_name, parameters), this optimizer has {ours}: build it with "
            "the param_groups and the dedicate_params predicate that the state was saved with"
        )
    for problem in update_rule_problems(groups, saved_groups):
        raise ConfigurationError(f"the state dict does not fit: {problem}")
    _check_names(groups, names, state_dict.get(PARAM_NAMES))
    saved_state = state_dict["state"]
    for group, group_names, saved in zip(groups, names, saved_groups, strict=True):
        for param, name, key in zip(group["params"], group_names, saved["params"], strict=True):
            if param.requires_grad or key in saved_state:
                wanted = _layouts_of(layouts.get(id(param), param), group["route"], normalised.get(id(param)))
                _check_entry(wanted, name, group["route"], saved_state.get(key))


def _check_names(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], saved: Sequence[Sequence[str]] | None
) -> None:
    for group, here, there in zip(groups, names, names if saved is None else saved, strict=True):
        for place, (name, other) in enumerate(zip(here, there, strict=True)):
            if name != other:
                raise ConfigurationError(
                    f"the state dict has {other!r} at place {place} of group {group['group_name']!r}, where this "
                    f"optimizer has {name!r}: state goes by place, so it would go to another parameter. Build the "
                    "optimizer in the order that the state was saved in, or load with set_optimizer_state_dict(), "
                    "which goes by name"
                )


def _layouts_of(layout: Tensor, route: str, normalised: MatrixSpec | None) -> dict[str, Tensor | None]:
    """What each entry of the state of a parameter is laid out like, ``None`` for a number."""
    if route == "adamw":
        return {"step": None, "exp_avg": layout, "exp_avg_sq": layout}
    rows = {} if normalised is None else {"second_moment": _fresh_second_moment(layout, normalised)}
    return {"momentum_buffer": layout, **rows}


def _check_entry(layouts: Mapping[str, Tensor | None], name: str, route: str, entry: Mapping[str, Any] | None) -> None:
    if entry is None:
        raise ConfigurationError(f"the state dict holds no optimizer state of {name!r}")
    for key, layout in layouts.items():
        if key not in entry:
            raise ConfigurationError(f"the state dict has no {key!r} for {name!r}, which is on the {route} route")
        value = entry[key]
        if layout is None:
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ConfigurationError(f"{key!r} of {name!r} is {kind}, wanted a floating-point tensor")
        if value.shape != layout.shape:
            raise ConfigurationError(
                f"{key!r} of {name!r} has shape {tuple(value.shape)}, wanted {tuple(layout.shape)}"
            )
        if not _same_layout(layout, value):
            raise ConfigurationError(
                f"{key!r} of {name!r} is a {_layout(value)}, here it is a {_layout(layout)}: load it with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which distributes it"
            )


def _same_layout(param: Tensor, value: Tensor) -> bool:
    """Whether ``value`` can be the state of ``param`` without moving data; the answer is the same on all ranks."""
    if isinstance(param, OwnedTensor) or isinstance(value, OwnedTensor):
        both = isinstance(param, OwnedTensor) and isinstance(value, OwnedTensor)
        return both and param.owner == value.owner and param.placements == value.placements  # type: ignore[attr-defined]
    if isinstance(param, DTensor) and isinstance(value, DTensor):
        return param.placements == value.placements and param.device_mesh == value.device_mesh
    return not isinstance(param, DTensor) and not isinstance(value, DTensor)


def _layout(tensor: Tensor) -> str:
    if isinstance(tensor, OwnedTensor) and tensor.owner >= 0:
        return f"matrix owned by rank {tensor.owner}"
    if isinstance(tensor, DTensor):
        return f"DTensor with placements {tensor.placements}"
    return "plain tensor"


def restore_state(
    groups: Sequence[Mapping[str, Any]],
    state: MutableMapping[Tensor, dict[str, Any]],
    state_dict: Mapping[str, Any],
    previous: Mapping[Tensor, dict[str, Any]],
    dtypes: Mapping[int, torch.dtype],
) -> None:
    """Correct ``state`` as ``torch.optim.Optimizer.load_state_dict`` left it after loading ``state_dict``.

    It casts floating-point state to the parameter's dtype, which would round the fp32 momentum of a bf16 parameter, and
    leaves ``step`` on whichever device it was saved from, where reading it would synchronise. A parameter that was
    frozen since, and so has no entry, keeps its ``previous`` state. ``dtypes`` are those that the policy of a parameter
    asks for, by its identity.
    """
    keys = chain.from_iterable(saved["params"] for saved in state_dict["param_groups"])
    for group in groups:
        for param in group["params"]:
            saved = state_dict["state"].get(next(keys))
            if saved is None:
                state[param] = previous[param]
                continue
            entry = state[param]
            if group["route"] == "muon":
                wanted = dtypes.get(id(param)) or momentum_dtype(param)
                entry["momentum_buffer"] = saved["momentum_buffer"].to(device=param.device, dtype=wanted)
                if "second_moment" in saved:
                    rows = saved["second_moment"]
                    entry["second_moment"] = rows.to(device=param.device, dtype=momentum_dtype(param))
            else:
                if id(param) in dtypes:
                    for key in ("exp_avg", "exp_avg_sq"):
                        entry[key] = saved[key].to(device=param.device, dtype=dtypes[id(param)])
                entry["step"] = torch.as_tensor(saved["step"], dtype=torch.float32, device="cpu")
