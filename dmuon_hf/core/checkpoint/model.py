"""The state dict of a model: parameters, buffers and extra state."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from dmuon_hf.core.checkpoint.source import Source, check_together
from dmuon_hf.core.checkpoint.whole import begin, device_of, group_of, is_first, whole_of, write_whole
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.grid_group import GridGroup
from dmuon_hf.core.plan import canonical_name
from dmuon_hf.core.runtime.runtime import Runtime

__all__ = ["get_model_state_dict", "set_model_state_dict"]


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
    runtime = begin(model, "get_model_state_dict", timeout)
    keep = not rank0_only or is_first(runtime, model)
    result: dict[str, Any] = {}
    gathered: dict[int, Tensor | None] = {}
    for name, value in _model_state(model, runtime).items():
        if isinstance(value, Tensor) and id(value) not in gathered:
            gathered[id(value)] = whole_of(value, keep=keep, cpu_offload=cpu_offload)
        if keep:
            result[name] = gathered[id(value)] if isinstance(value, Tensor) else copy.deepcopy(value)
    return result


@torch.no_grad()
def set_model_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    timeout: timedelta | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Load a state dict of whole tensors, as `get_model_state_dict` or a single process makes it.

    A collective: every rank calls it, either all with the state dict, or rank 0 with it and others with an empty one,
    which then receive the values. Everything is checked on all ranks before anything is written.

    Args:
        model: with dedicated and FSDP2 parameters, or without either.
        state_dict: names to whole tensors of any device, dtype or memory layout, also with a gradient history; of tied
            names one is enough.
        timeout: how long to wait for ranks that have not called this; as long as it takes unless they are known never
            to come, if left out.
        only: canonical names, the same on every rank, that are loaded and may be in the state dict, such as those of
            adapters; all others stay as they are. ``None`` loads the whole model.

    Raises:
        ConfigurationError: on every rank, if on any a name is missing or unexpected, a shape differs, a dtype is of
            another kind (integers for floating-point numbers), a tensor has no values of its own here (distributed,
            meta, sparse, quantised), or a module refuses its extra state; nothing changed.
        LockstepError: a rank did not call this in time, or waits for another collective.
    """
    runtime = begin(model, "set_model_state_dict", timeout)
    group = group_of(runtime, model)
    targets = _model_state(model, runtime)
    if only is not None:
        targets = {name: target for name, target in targets.items() if name in only}
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
            write_whole(target, source.tensor(name, device_of(model)))


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
