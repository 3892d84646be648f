"""What FSDP2 must know about dedicated parameters, and what the lockstep monitor must know about FSDP2.

The patches do nothing for models without dedicated parameters. Tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed.fsdp._fully_shard._fsdp_init as _fsdp_init
import torch.distributed.fsdp._fully_shard._fsdp_param_group as _param_group_module
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from dmuon_hf.core.lockstep import note_foreign
from dmuon_hf.core.runtime.dedicated import without_values
from dmuon_hf.core.runtime.fsdp_partial import check_order, check_reduced
from dmuon_hf.core.runtime.fsdp_units import group_units
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from dmuon_hf.core.runtime.watch import Inputs

__all__ = ["install_patch", "uninstall_patch"]

SYNC_LISTENER = "_dmuon_set_requires_sync"
ZERO_LISTENER = "_dmuon_grads_zeroed"

# The functions that it imports are no declared part of it.
_fsdp_param_group: Any = _param_group_module
_originals: dict[str, Callable[..., Any]] = {}


def install_patch() -> None:
    """Make ``fully_shard`` skip dedicated parameters. Runs on import of :mod:`dmuon_hf.core`; safe to repeat.

    Also lets ``FSDPModule.set_requires_gradient_sync`` reach the units at or below the module, so that whoever
    accumulates gradients through FSDP2's own switch (Accelerate does) accumulates dedicated ones in the same way; lets
    ``FSDPModule.zero_grad`` reach the gradients that FSDP2 keeps elsewhere than on the parameters it shows; has FSDP2's
    gathers and reductions noted for the comparison of ranks that wait for each other; has ranks meet before one of them
    differs; and words FSDP2's refusal of weights on meta as the runtime does its own.
    """
    if _originals:
        return
    managed = _fsdp_init._get_managed_states
    validate = _fsdp_param_group.FSDPParamGroup._validate_no_meta_params
    set_sync = FSDPModule.set_requires_gradient_sync
    prefetch, post = FSDPParamGroup._backward_prefetch, FSDPParamGroup.post_backward
    all_gather, reduce = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce
    watch_inputs = _fsdp_param_group.FSDPParamGroup._register_post_backward_hook

    def get_managed_states(
        modules: list[nn.Module], ignored_params: set[nn.Parameter] | None = None
    ) -> tuple[list[nn.Parameter], list[Any]]:
        dedicated = {
            parameter
            for module in modules
            for parameter in module.parameters(recurse=False)
            if isinstance(parameter, OwnedTensor)
        }
        return managed(modules, (ignored_params or set()) | dedicated if dedicated else ignored_params)

    def set_requires_gradient_sync(self: FSDPModule, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        set_sync(self, requires_gradient_sync, recurse=recurse)
        assert isinstance(self, nn.Module)
        for module in self.modules() if recurse else (self,):
            listener = module.__dict__.get(SYNC_LISTENER)
            if listener is not None:
                listener(requires_gradient_sync)

    def zero_grad(self: FSDPModule, set_to_none: bool = True) -> None:
        super(FSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]
        assert isinstance(self, nn.Module)
        for module in self.modules():
            listener = module.__dict__.get(ZERO_LISTENER)
            if listener is not None:
                listener(set_to_none)

    def register_post_backward_hook(group: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not torch.is_grad_enabled() or not _stands_for_units(group):
            return cast(tuple[Any, Any], watch_inputs(group, args, kwargs))
        return _watch_keeping_containers(watch_inputs, group, args, kwargs)

    def foreach_all_gather(fsdp_params: list[Any], group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        note_foreign(group, f"FSDP2 all-gather of {_subject(fsdp_params)}")
        return all_gather(fsdp_params, group, *args, **kwargs)

    def foreach_reduce(
        fsdp_params: list[Any], grads: list[Any], group: ProcessGroup | None, *args: Any, **kwargs: Any
    ) -> Any:
        if group is not None:
            note_foreign(group, f"FSDP2 gradient reduction of {_subject(fsdp_params)}")
        return reduce(fsdp_params, grads, group, *args, **kwargs)

    def validate_no_meta_params(self: Any) -> None:
        if any(isinstance(param, OwnedTensor) for module in self.modules for param in module.parameters()):
            for fsdp_param in self.fsdp_params:
                if fsdp_param.sharded_param.is_meta and self.device.type != "meta":
                    raise without_values(fsdp_param._param_fqn, self.device)
        validate(self)

    def backward_prefetch(self: FSDPParamGroup) -> None:
        check_order(self)
        prefetch(self)

    def post_backward(self: FSDPParamGroup, *unused: Any) -> None:
        check_reduced(self)
        post(self, *unused)

    _originals["prefetch"] = prefetch
    _originals["post_backward"] = post
    FSDPParamGroup._backward_prefetch = torch.compiler.disable(backward_prefetch)  # type: ignore[method-assign]
    FSDPParamGroup.post_backward = torch.compiler.disable(post_backward)  # type: ignore[method-assign]
    _originals["managed"] = managed
    _originals["validate"] = validate
    _originals["set_sync"] = set_sync
    _originals["all_gather"] = all_gather
    _originals["reduce"] = reduce
    _originals["watch_inputs"] = watch_inputs
    _fsdp_init._get_managed_states = get_managed_states
    FSDPModule.set_requires_gradient_sync = set_requires_gradient_sync  # type: ignore[method-assign]
    FSDPModule.zero_grad = zero_grad  # type: ignore[attr-defined]
    _fsdp_param_group.foreach_all_gather = foreach_all_gather
    _fsdp_param_group.foreach_reduce = foreach_reduce
    _fsdp_param_group.FSDPParamGroup._validate_no_meta_params = validate_no_meta_params
    _fsdp_param_group.FSDPParamGroup._register_post_backward_hook = register_post_backward_hook


def uninstall_patch() -> None:
    """Give torch its own functions back. Models dedicated before keep working as long as they are not sharded again."""
    if not _originals:
        return
    _fsdp_init._get_managed_states = _originals.pop("managed")
    FSDPModule.set_requires_gradient_sync = _originals.pop("set_sync")  # type: ignore[method-assign]
    del FSDPModule.zero_grad  # type: ignore[attr-defined]
    _fsdp_param_group.foreach_all_gather = _originals.pop("all_gather")
    _fsdp_param_group.foreach_reduce = _originals.pop("reduce")
    _fsdp_param_group.FSDPParamGroup._validate_no_meta_params = _originals.pop("validate")
    _fsdp_param_group.FSDPParamGroup._register_post_backward_hook = _originals.pop("watch_inputs")
    FSDPParamGroup._backward_prefetch = _originals.pop("prefetch")  # type: ignore[method-assign]
    FSDPParamGroup.post_backward = _originals.pop("post_backward")  # type: ignore[method-assign]


def _stands_for_units(group: Any) -> bool:
    """Whether an FSDP2 parameter group has owned weights beside its own; asked once, when the model has been built."""
    if not hasattr(group, "_dmuon_stands_for_units"):
        group._dmuon_stands_for_units = bool(group_units(group.modules))
    return bool(group._dmuon_stands_for_units)


def _watch_keeping_containers(watch: Callable[..., Any], group: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """FSDP2 learns that autograd has left the module without replacing a list, dict or cache of the caller.

    It copies every container with a tensor that requires a gradient, so that what the module appends is lost. The
    tensors that are arguments themselves are enough for it; without any, hooks on those in containers tell it (see
    [Note: leaving a module] in watch.py).
    """
    bare = tuple(value if isinstance(value, Tensor) else None for value in args)
    named = {key: value for key, value in kwargs.items() if isinstance(value, Tensor)}
    if any(value is not None and value.requires_grad for value in (*bare, *named.values())):
        watched, watched_named = watch(group, bare, named)
        merged = tuple(new if old is not None else arg for old, new, arg in zip(bare, watched, args, strict=True))
        return merged, {**kwargs, **watched_named}

    def on_leave(grad: Tensor) -> None:
        if group._training_state is TrainingState.PRE_BACKWARD:
            group.post_backward()

    Inputs(args, kwargs).on_leave(on_leave)
    return args, kwargs


def _subject(fsdp_params: list[Any]) -> str:
    """What FSDP2 gathers or reduces, by the first of its parameters."""
    name = getattr(fsdp_params[0], "_param_fqn", None)
    return f"{name} and what is with it" if name else "its parameters"
