"""What FSDP2 must know about dedicated parameters, and what the lockstep monitor must know about FSDP2.

The patches do nothing for models without dedicated parameters. Tested with torch 2.13.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed.fsdp._fully_shard._fsdp_collectives as _fsdp_collectives
import torch.distributed.fsdp._fully_shard._fsdp_init as _fsdp_init
import torch.distributed.fsdp._fully_shard._fsdp_param_group as _param_group_module
import torch.distributed.fsdp._fully_shard._fsdp_state as _fsdp_state
import torch.distributed.fsdp._fully_shard._fully_shard as _fully_shard
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.lockstep import note_foreign
from dmuon_hf.core.runtime import fsdp_inputs, fsdp_methods
from dmuon_hf.core.runtime.compiling import untraced_once_called
from dmuon_hf.core.runtime.dedicated import without_values
from dmuon_hf.core.runtime.fsdp_grads import follow_requires_grad, refuse_converted
from dmuon_hf.core.runtime.fsdp_partial import check_order, check_reduced
from dmuon_hf.core.runtime.fsdp_units import group_hooks, in_dedicated_model, monitor_of_part
from dmuon_hf.core.runtime.fsdp_waits import WatchedCollectives, awaiting_gathers
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from dmuon_hf.core.runtime.schedule import BackwardPass, graph_task
from dmuon_hf.core.runtime.unit import NO_COPY, Unit

__all__ = ["install_patch", "uninstall_patch"]

# The functions that it imports are no declared part of it.
_fsdp_param_group: Any = _param_group_module
_ABSENT = object()
_FINAL_CALLBACK = "_root_post_backward_final_callback"
# What was replaced: (owner, attribute, original), in order.
_replaced: list[tuple[Any, str, Any]] = []
_register_forward_method = types.FunctionType(register_fsdp_forward_method.__code__, _fully_shard.__dict__)
_REGISTER_CODE = register_fsdp_forward_method.__code__


def install_patch() -> None:
    """Make FSDP2 know owned weights. Runs on import of :mod:`dmuon_hf.core`; safe to repeat.

    ``fully_shard`` skips them; the public methods of ``FSDPModule`` and ``register_fsdp_forward_method`` act on them
    (:mod:`fsdp_methods`); the containers of a caller stay its own (:mod:`fsdp_inputs`); FSDP2's gathers and reductions
    are noted for the comparison of ranks that wait for each other, and waited for as the runtime's own
    (:mod:`fsdp_waits`); ranks meet before one of them differs; the end of a pass that a pipeline schedule calls for
    reduces owned gradients too; and FSDP2's refusals of
    weights on meta and of copies are worded as the runtime does its own.
    """
    if _replaced:
        return
    for name, wrap in {**fsdp_methods.ACTING, **fsdp_methods.REFUSED}.items():
        _replace(FSDPModule, name, wrap(getattr(FSDPModule, name, _absent_method)))
    # In place, since callers may have imported the function before this package.
    register_fsdp_forward_method.__code__ = _register_stub.__code__
    _replace(_fsdp_init, "_get_managed_states", _without_owned(_fsdp_init._get_managed_states))
    group = _fsdp_param_group.FSDPParamGroup
    _replace(group, "_register_post_backward_hook", fsdp_inputs.watching(group._register_post_backward_hook))
    state = _fsdp_state.FSDPState
    _replace(state, "_cast_forward_inputs", fsdp_inputs.casting(state._cast_forward_inputs))
    _replace(state, "_cast_output_dtype", fsdp_inputs.bringing_back(state._cast_output_dtype))
    _replace(state, _FINAL_CALLBACK, _reducing_what_was_kept(getattr(state, _FINAL_CALLBACK)))
    _replace(group, "_validate_no_meta_params", _naming_meta(group._validate_no_meta_params))
    _replace(_fully_shard, "_unimplemented_deepcopy", _naming_copies(_fully_shard._unimplemented_deepcopy))
    _replace(group, "_backward_prefetch", _after(check_order, group._backward_prefetch))
    _replace(group, "post_backward", _after(check_reduced, _after(fsdp_inputs.forget_uses, group.post_backward)))
    _replace(_fsdp_param_group, "foreach_all_gather", _noting_gathers(_fsdp_param_group.foreach_all_gather))
    _replace(_fsdp_param_group, "foreach_reduce", _noting_reductions(_fsdp_param_group.foreach_reduce))
    gathered = _fsdp_param_group.foreach_all_gather_copy_out
    _replace(_fsdp_param_group, "foreach_all_gather_copy_out", awaiting_gathers(gathered))
    _replace(_fsdp_collectives, "dist", WatchedCollectives())
    _replace(FSDPParam, "to_sharded", _following_requires_grad(FSDPParam.to_sharded))


def uninstall_patch() -> None:
    """Give torch its own functions back. Models dedicated before keep working as long as they are not sharded again."""
    register_fsdp_forward_method.__code__ = _REGISTER_CODE
    while _replaced:
        owner, name, original = _replaced.pop()
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _replace(owner: Any, name: str, replacement: Any) -> None:
    _replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, replacement)


def _absent_method(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stands for a method that FSDPModule leaves to the module's own class."""


def _register_stub(module: nn.Module, method_name: str) -> None:
    # Runs with the globals of torch's own module.
    from dmuon_hf.core.runtime.fsdp_patch import register_forward_method

    register_forward_method(module, method_name)


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """What ``register_fsdp_forward_method`` does while the patch is installed."""
    fsdp_methods.forward_method(_register_forward_method, module, method_name)


def _without_owned(managed: Callable[..., Any]) -> Callable[..., Any]:
    def get_managed_states(
        modules: list[nn.Module], ignored_params: set[nn.Parameter] | None = None
    ) -> tuple[list[nn.Parameter], list[Any]]:
        dedicated = {
            parameter
            for module in modules
            for parameter in module.parameters(recurse=False)
            if isinstance(parameter, OwnedTensor)
        }
        states: tuple[list[nn.Parameter], list[Any]] = managed(
            modules, (ignored_params or set()) | dedicated if dedicated else ignored_params
        )
        return states

    return get_managed_states


def _naming_meta(validate: Callable[[Any], None]) -> Callable[[Any], None]:
    def validate_no_meta_params(group: Any) -> None:
        if any(isinstance(param, OwnedTensor) for module in group.modules for param in module.parameters()):
            for fsdp_param in group.fsdp_params:
                if fsdp_param.sharded_param.is_meta and group.device.type != "meta":
                    raise without_values(fsdp_param._param_fqn, group.device)
        validate(group)

    return validate_no_meta_params


def _naming_copies(refuse: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    def deepcopy(module: nn.Module, *args: Any) -> NoReturn:
        if in_dedicated_model(module, [module]):
            raise ConfigurationError(NO_COPY)
        refuse(module, *args)

    return deepcopy


def _after(check: Callable[[Any], None], original: Callable[..., None]) -> Callable[..., None]:
    def checked(group: Any, *args: Any) -> None:
        check(group)
        original(group, *args)

    return untraced_once_called(checked)


def _reducing_what_was_kept(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """The end of a backward pass, which pipeline schedules call by themselves after the passes of all microbatches.

    FSDP2 then reduces what it has kept since ``set_requires_gradient_sync(False)``; so do the units of its modules.
    """

    def final_callback(state: Any) -> None:
        original(state)
        if graph_task() == -1:
            kept: dict[BackwardPass, list[Unit]] = {}
            for each in state._state_ctx.all_states:
                for hooks in group_hooks(each._modules):
                    kept.setdefault(hooks.backward, []).append(hooks.unit)
            for backward, units in kept.items():
                backward.reduce_kept(units)

    return untraced_once_called(final_callback)


def _noting_gathers(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    def foreach_all_gather(fsdp_params: list[Any], group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        refuse_converted(fsdp_params)
        _note(group, "FSDP2 all-gather", fsdp_params)
        return all_gather(fsdp_params, group, *args, **kwargs)

    return foreach_all_gather


def _following_requires_grad(to_sharded: Callable[..., Any]) -> Callable[..., Any]:
    def follow_to_sharded(self: FSDPParam) -> None:
        if self.sharded_state is ShardedState.UNSHARDED:
            follow_requires_grad(self)
        to_sharded(self)

    return follow_to_sharded


def _noting_reductions(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def foreach_reduce(
        fsdp_params: list[Any], grads: list[Any], group: ProcessGroup | None, *args: Any, **kwargs: Any
    ) -> Any:
        if group is not None:
            _note(group, "FSDP2 gradient reduction", fsdp_params)
        return reduce(fsdp_params, grads, group, *args, **kwargs)

    return foreach_reduce


def _note(group: ProcessGroup, kind: str, fsdp_params: list[Any]) -> None:
    """Have the monitors know what FSDP2 is about to gather or reduce, by the first of its parameters."""
    name = getattr(fsdp_params[0], "_param_fqn", None)
    what = f"{kind} of {name} and what is with it" if name else f"{kind} of its parameters"
    monitor = monitor_of_part(fsdp_params[0]._module_info.module)
    if monitor is not None:
        monitor.before(group, what)
    note_foreign(group, what)
