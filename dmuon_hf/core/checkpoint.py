"""Whole state dicts of a dedicated model and its optimizer: the format of a single process, on any topology.

For checkpoints that are written in parallel and never gathered use ``torch.distributed.checkpoint`` with torch's own
``get_model_state_dict`` and ``get_optimizer_state_dict``; owned tensors support both.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon_hf.core.checkpoint_source import Source, check_together, flaw
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.grid_group import GridGroup, world_group
from dmuon_hf.core.lockstep import meet
from dmuon_hf.core.plan import canonical_name
from dmuon_hf.core.runtime.integrity import raise_together
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from dmuon_hf.core.runtime.runtime import Runtime, runtime_of

__all__ = ["get_model_state_dict", "get_optimizer_state_dict", "set_model_state_dict", "set_optimizer_state_dict"]

SECTIONS = ("fsdp", "dedicated", "dedicated_adamw")

StateKey: TypeAlias = tuple[str, str, str]
"""Section, canonical name and state name, such as ``("dedicated", "layers.0.q_proj.weight", "momentum_buffer")``."""


@torch.no_grad()
def get_model_state_dict(
    model: nn.Module, *, cpu_offload: bool = True, rank0_only: bool = True, timeout: timedelta | None = None
) -> dict[str, Any]:
    """The state dict that the model would have in one process: whole plain tensors, buffers and tied names included.

    A collective: every rank calls it. One tensor at a time is gathered, so ranks that keep nothing need little memory.

    Args:
        model: with dedicated and FSDP2 parameters, or without either.
        cpu_offload: give tensors on the CPU.
        rank0_only: give the result on rank 0 and an empty dict on the others.
        timeout: how long to wait for ranks that have not called this; as long as it takes unless they are known never
            to come, if left out.

    Returns:
        Canonical name to tensor, none of which aliases the model. Tied names share one tensor.

    Raises:
        ConfigurationError: on every rank, if on any the model was edited after `dedicate_params`.
        LockstepError: a rank did not call this in time, or waits for another collective.
    """
    runtime = _begin(model, "get_model_state_dict", timeout)
    keep = not rank0_only or _is_first(runtime)
    result: dict[str, Any] = {}
    gathered: dict[int, Tensor | None] = {}
    for name, value in _model_state(model, runtime).items():
        if isinstance(value, Tensor) and id(value) not in gathered:
            gathered[id(value)] = _whole(value, keep=keep, cpu_offload=cpu_offload)
        if keep:
            result[name] = gathered[id(value)] if isinstance(value, Tensor) else copy.deepcopy(value)
    return result


@torch.no_grad()
def set_model_state_dict(model: nn.Module, state_dict: Mapping[str, Any], *, timeout: timedelta | None = None) -> None:
    """Load a state dict of whole tensors, as `get_model_state_dict` or a single process makes it.

    A collective: every rank calls it, either all with the state dict, or rank 0 with it and others with an empty one,
    which then receive the values. Everything is checked on all ranks before anything is written.

    Args:
        model: with dedicated and FSDP2 parameters, or without either.
        state_dict: names to whole tensors of any device, dtype or memory layout, also with a gradient history; of tied
            names one is enough.
        timeout: how long to wait for ranks that have not called this; as long as it takes unless they are known never
            to come, if left out.

    Raises:
        ConfigurationError: on every rank, if on any a name is missing or unexpected, a shape differs, a dtype is of
            another kind (integers for floating-point numbers), a tensor has no values of its own here (distributed,
            meta, sparse, quantised), or a module refuses its extra state; nothing changed.
        LockstepError: a rank did not call this in time, or waits for another collective.
    """
    runtime = _begin(model, "set_model_state_dict", timeout)
    group = _group(runtime)
    targets = _model_state(model, runtime)
    entries = {canonical_name(name, model): value for name, value in state_dict.items()}
    source = Source.open(entries, filled=bool(entries), group=group, extra=None)
    check_together(lambda: [*_deferred(targets), *source.problems(targets, _tied(targets))], "model state dict", group)
    _load_extra_state(
        {
            _extra_state_holder(model, name): source.value(name)
            for name, target in targets.items()
            if name in source and not isinstance(target, Tensor)
        },
        group,
    )
    written: set[int] = set()
    for name, target in targets.items():
        if name in source and isinstance(target, Tensor) and id(target) not in written:
            written.add(id(target))
            _load(target, source.tensor(name, _device(model)))


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
        A dict of four sections. ``"dedicated"``: name to ``{"momentum_buffer"}`` of the muon route. ``"fsdp"``: name to
        ``{"step", "exp_avg", "exp_avg_sq"}`` of AdamW parameters. ``"dedicated_adamw"``: the same for dedicated
        parameters on the adamw route. ``"param_groups"``: per group its hyperparameters and, in ``"params"``, names.

    Raises:
        ConfigurationError: the optimizer has no routes, or holds a parameter that the model has not.
        LockstepError: a rank did not call this in time, or waits for another collective.
    """
    runtime = _begin(model, "get_optimizer_state_dict", timeout)
    keep = not rank0_only or _is_first(runtime)
    result: dict[str, Any] = {section: {} for section in SECTIONS}
    for (section, name, key), value in _values(_optimizer_state(model, optimizer, runtime)).items():
        if isinstance(value, Tensor):
            whole = _whole(value, keep=keep, cpu_offload=cpu_offload)
        else:
            whole = copy.deepcopy(value)
        if keep:
            result[section].setdefault(name, {})[key] = whole
    result["param_groups"] = _described_groups(model, optimizer, runtime) if keep else []
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
    runtime = _begin(model, "set_optimizer_state_dict", timeout)
    group = _group(runtime)
    holders = _optimizer_state(model, optimizer, runtime)
    targets = _values(holders)
    filled = any(state_dict.get(key) for key in (*SECTIONS, "param_groups"))
    entries = _sorted_in(_flattened(state_dict), targets)
    source = Source.open(entries, filled=filled, group=group, extra=state_dict.get("param_groups", []))

    def problems() -> Iterator[str]:
        yield from _route_problems(targets, source)
        yield from source.problems(targets)
        yield from _group_problems(_described_groups(model, optimizer, runtime), source.extra)

    check_together(problems, "optimizer state dict", group)
    for key, holder in holders.items():
        if isinstance(targets[key], Tensor):
            _load(targets[key], source.tensor(key, _device(model)))
        else:
            holder[key[2]] = _option(source.value(key))
    for param_group, saved in zip(optimizer.param_groups, source.extra, strict=True):
        _load_hyperparameters(param_group, saved)


# Ranks and devices


def _begin(model: nn.Module, what: str, timeout: timedelta | None) -> Runtime | None:
    """Meet the other ranks, refuse an edited model on all of them, and drain what is in flight."""
    runtime = runtime_of(model)
    meet(what, _group(runtime), monitor=None if runtime is None else runtime.context.monitor, timeout=timeout)
    if runtime is not None:
        raise_together(runtime, runtime.misplaced(model))
        runtime.finish_publish()
    return runtime


def _group(runtime: Runtime | None) -> GridGroup | None:
    """The ranks that hold the model: those of its grid, or all; ``None`` in one process without a process group."""
    grid = None if runtime is None else runtime.topology.grid
    return world_group() if grid is None else grid


def _is_first(runtime: Runtime | None) -> bool:
    group = _group(runtime)
    return group is None or group.rank == 0


def _device(model: nn.Module) -> torch.device:
    """A device that the model's process groups can send from."""
    return next((param.device for param in model.parameters()), torch.device("cpu"))


# Whole tensors and local ones


def _whole(value: Tensor, *, keep: bool, cpu_offload: bool) -> Tensor | None:
    """The plain whole of any tensor, aliasing nothing; ``None`` where it is not kept. A collective if distributed."""
    whole = value.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
        if isinstance(whole, AsyncCollectiveTensor):
            whole = whole.wait()
    if not keep:
        return None
    if cpu_offload and whole.device.type != "cpu":
        return whole.cpu()
    return whole if _has_storage_of_its_own(whole, value) else whole.clone()


def _has_storage_of_its_own(whole: Tensor, value: Tensor) -> bool:
    """Whether ``whole`` fills its storage and shares it with nothing that ``value`` holds on this rank."""
    if not isinstance(value, DTensor):
        return False
    storage, local = whole.untyped_storage(), value.to_local().untyped_storage()
    return storage.nbytes() == whole.nbytes and storage.data_ptr() != local.data_ptr()


def _load(target: Tensor, whole: Tensor) -> None:
    """Write the whole into a tensor of any layout, which every rank knows in full: no communication."""
    if isinstance(target, DTensor) and not isinstance(target, OwnedTensor):
        local = whole.to(device=target.device, dtype=target.dtype)
        target.copy_(distribute_tensor(local, target.device_mesh, target.placements, src_data_rank=None))
    else:
        target.copy_(whole)


# The model's side


def _model_state(model: nn.Module, runtime: Runtime | None) -> dict[str, Any]:
    """Canonical name to live value, in the order of ``model.state_dict()``; tied names give the same object."""
    # Between forward and backward a module may hold the gathered weight instead. By identity: modules may have moved.
    owned = runtime.owned_behind() if runtime is not None else {}
    return {
        canonical_name(name, model): owned.get(id(value), value)
        for name, value in model.state_dict(keep_vars=True).items()
    }


def _deferred(targets: Mapping[str, Any]) -> Iterator[str]:
    for name, target in targets.items():
        if isinstance(target, Tensor) and target.is_meta:
            yield f"the model's {name} is on the meta device: call model.to_empty(device=...) first"
            return


def _tied(state: Mapping[str, Any]) -> list[tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _load_extra_state(states: Mapping[nn.Module, Any], group: GridGroup | None) -> None:
    """Load what is no tensor; if a module of some rank refuses it, all get back what they had. A collective."""
    before: dict[nn.Module, Any] = {}

    def problem(module: nn.Module, state: Any) -> str:
        try:
            before[module] = copy.deepcopy(module.get_extra_state())
            module.set_extra_state(copy.deepcopy(state))
        except Exception as error:
            return f"the extra state of a {type(module).__name__} is refused with {type(error).__name__}: {error}"
        return ""

    def problems() -> list[str]:
        return [found for module, state in states.items() if (found := problem(module, state))]

    try:
        check_together(problems, "model state dict", group)
    except ConfigurationError:
        for module, state in before.items():
            with contextlib.suppress(Exception):
                module.set_extra_state(state)
        raise


def _extra_state_holder(model: nn.Module, name: str) -> nn.Module:
    suffix = "_extra_state"
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for path, module in modules.items():
        if canonical_name(f"{path}.{suffix}" if path else suffix, model) == name:
            return module
    raise ConfigurationError(f"{name} of the state dict belongs to no module")


# The optimizer's side


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


def _described_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, runtime: Runtime | None
) -> list[dict[str, Any]]:
    """The groups with names in place of parameters, sharing nothing with the optimizer."""
    names = _names(model, runtime)
    return [
        {
            key: [names[id(param)] for param in value]
            if key == "params"
            else value.detach().cpu().clone()
            if isinstance(value, Tensor)
            else copy.deepcopy(value)
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]


def _group_problems(groups: Sequence[Mapping[str, Any]], saved: Any) -> Iterator[str]:
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


def _load_hyperparameters(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for option, value in saved.items():
        if option == "params":
            continue
        if isinstance(group.get(option), Tensor):
            group[option].copy_(torch.as_tensor(value))
        else:
            group[option] = _option(value)


def _option(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else copy.deepcopy(value)
