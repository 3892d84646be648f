"""What FSDP2 does to the arguments of a module, so that a list, dict or cache stays the caller's own.

FSDP2 copies containers twice: all of them to cast tensors to the dtype of its mixed-precision policy, and those with a
tensor that requires a gradient to watch it. What the module leaves in a copy is lost. Here a container is copied only
where a tensor in it is cast, and what the module has changed in that copy is brought back when its forward ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from dmuon_hf.core.runtime.fsdp_units import in_dedicated_model
from dmuon_hf.core.runtime.schedule import graph_task
from dmuon_hf.core.runtime.watch import Inputs

__all__ = ["bringing_back", "casting", "forget_uses", "watching"]

Arguments = tuple[Any, Any]
_COPIES = "_dmuon_copies"
# Forwards of a group since its last backward.
_USES = "_dmuon_uses"


def casting(original: Callable[..., Arguments]) -> Callable[..., Arguments]:
    """In place of ``FSDPState._cast_forward_inputs``."""

    def cast_forward_inputs(state: Any, args: Any, kwargs: Any) -> Arguments:
        policy = state._mp_policy
        if policy.cast_forward_inputs and policy.param_dtype and in_dedicated_model(state, state._modules):
            cast = _Cast(policy.param_dtype)
            args, kwargs = tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}
            state.__dict__[_COPIES] = cast.copies
            return args, kwargs
        return original(state, args, kwargs)

    return cast_forward_inputs


def bringing_back(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of ``FSDPState._cast_output_dtype``, which ends a forward."""

    def cast_output_dtype(state: Any, output: Any) -> Any:
        for copy in state.__dict__.pop(_COPIES, ()):
            copy.bring_back()
        return original(state, output)

    return cast_output_dtype


class _Cast:
    """Casts floating-point tensors in the containers that FSDP2 looks into, and keeps what it had to copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.copies: list[_Copy] = []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._dtype) if value.is_floating_point() else value
        keys, children = _children(value)
        cast = [self(child) for child in children]
        if all(new is old for new, old in zip(cast, children, strict=True)):
            return value
        copy = _rebuilt(value, keys, cast)
        if not isinstance(value, tuple):
            self.copies.append(_Copy(value, copy, dict(zip(map(id, cast), children, strict=True)), cast))
        return copy


class _Copy:
    """A container of the caller that the module got a copy of."""

    def __init__(self, own: Any, copy: Any, origins: dict[int, Any], cast: list[Any]) -> None:
        self._own, self._copy, self._origins, self._cast = own, copy, origins, cast

    def bring_back(self) -> None:
        """Give the caller's container what the module added, replaced or removed; the rest stays uncast."""
        keys, children = _children(self._copy)
        if len(children) == len(self._cast) and all(map(lambda a, b: a is b, children, self._cast)):
            return
        final = [self._origins.get(id(child), child) for child in children]
        if isinstance(self._own, list):
            self._own[:] = final
        elif isinstance(self._own, set):
            self._own.clear()
            self._own.update(final)
        elif isinstance(self._own, dict):
            self._own.clear()
            self._own.update(zip(keys, final, strict=True))
        else:
            for key, value in zip(keys, final, strict=True):
                setattr(self._own, key, value)


def _children(value: Any) -> tuple[list[Any], list[Any]]:
    """Keys and values of a container that FSDP2 looks into; of anything else, none."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        keys = [field.name for field in dataclasses.fields(value)]
        return keys, [getattr(value, key) for key in keys]
    if isinstance(value, dict):
        return list(value), list(value.values())
    if isinstance(value, (list, tuple, set)):
        return [], list(value)
    return [], []


def _rebuilt(value: Any, keys: list[Any], children: list[Any]) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **dict(zip(keys, children, strict=True)))
    if isinstance(value, dict):
        return type(value)(zip(keys, children, strict=True))
    return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)


def forget_uses(group: Any) -> None:
    """Before ``FSDPParamGroup.post_backward``, with which every pass through the module ends."""
    group.__dict__[_USES] = 0


def watching(original: Callable[..., Arguments]) -> Callable[..., Arguments]:
    """In place of ``FSDPParamGroup._register_post_backward_hook``.

    FSDP2 learns that autograd has left the module from the tensors that are arguments themselves; without any that
    require a gradient, from hooks on those in containers (see [Note: leaving a module] in watch.py). After several
    forwards it cannot tell which is left last, as where one reads what another put into a cache: the end of the pass
    tells.
    """

    def register_post_backward_hook(group: Any, args: Any, kwargs: Any) -> Arguments:
        if not torch.is_grad_enabled() or not in_dedicated_model(group, group.modules):
            return original(group, args, kwargs)
        if graph_task() == -1:
            group.__dict__[_USES] = group.__dict__.get(_USES, 0) + 1
        bare = tuple(value if isinstance(value, Tensor) else None for value in args)
        named = {key: value for key, value in kwargs.items() if isinstance(value, Tensor)}
        if any(value is not None and value.requires_grad for value in (*bare, *named.values())):
            watched, watched_named = original(group, bare, named)
            merged = tuple(new if old is not None else arg for old, new, arg in zip(bare, watched, args, strict=True))
            return merged, {**kwargs, **watched_named}

        def on_leave(grad: Tensor) -> None:
            if group._training_state is TrainingState.PRE_BACKWARD and group.__dict__[_USES] == 1:
                group.post_backward()

        Inputs(args, kwargs).on_leave(on_leave)
        return args, kwargs

    return register_post_backward_hook
