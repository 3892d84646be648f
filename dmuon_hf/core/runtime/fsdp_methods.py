"""The public interface of FSDP2 on modules with owned weights: what every method of it does to the units.

Each method acts on the units of the FSDP module (see :func:`fsdp_units.group_units`) as it does on the module's own
parameter group, or has no effect on them by their nature, or is refused. A test compares these tables with torch.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from dmuon_hf.core.runtime.fsdp_units import group_hooks, group_units, runtimes_below
from dmuon_hf.core.runtime.unit import Unit

__all__ = ["ACTING", "NO_EFFECT", "REFUSED", "forward_method"]

Method = Callable[..., Any]
Act = Callable[[Unit, Any], None]


class _PassThrough(Protocol):
    def __call__(self, original: Method) -> Method: ...


def _modules(module: FSDPModule, recurse: bool) -> list[FSDPModule]:
    assert isinstance(module, nn.Module)
    return [part for part in module.modules() if isinstance(part, FSDPModule)] if recurse else [module]


def _units(module: FSDPModule) -> list[Unit]:
    state: Any = module._get_fsdp_state()
    if state._is_root is None:
        return group_units(state._modules)
    # Since the first forward the wrapping is final.
    if not hasattr(state, "_dmuon_units"):
        state._dmuon_units = group_units(state._modules)
    units: list[Unit] = state._dmuon_units
    return units


def _setter(act: Act) -> _PassThrough:
    """A setter of one value, recursive where torch's is: ``act(unit, value)`` after it."""

    def wrap(original: Method) -> Method:
        signature = inspect.signature(original)
        name = list(signature.parameters)[1]

        @functools.wraps(original)
        def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            for module in _modules(self, given.arguments.get("recurse", False)):
                for unit in _units(module):
                    act(unit, given.arguments[name])

        return method

    return wrap


class _Handle(UnshardHandle):
    """Waits for FSDP2's gather and for those of the units."""

    def __init__(self, fsdp: UnshardHandle | None, units: list[Unit]) -> None:
        self._fsdp = fsdp
        self._units = units

    def wait(self) -> None:
        if self._fsdp is not None:
            self._fsdp.wait()
        for unit in self._units:
            unit.weights.show_whole()
        self._fsdp, self._units = None, []


def _unshard(original: Method) -> Method:
    @functools.wraps(original)
    def unshard(self: FSDPModule, async_op: bool = False) -> UnshardHandle | None:
        handle = _Handle(original(self, async_op), _units(self))
        for unit in _units(self):
            unit.weights.gather()
        if async_op:
            return handle
        handle.wait()
        return None

    return unshard


def _reshard(original: Method) -> Method:
    @functools.wraps(original)
    def reshard(self: FSDPModule) -> None:
        original(self)
        for unit in _units(self):
            unit.reshard()

    return reshard


def _reset_iter_state(original: Method) -> Method:
    @functools.wraps(original)
    def reset_iter_state(self: FSDPModule) -> None:
        original(self)
        for runtime in runtimes_below(self):
            runtime.backward.abandon()

    return reset_iter_state


def _zero_grad(original: Method) -> Method:
    def zero_grad(self: FSDPModule, set_to_none: bool = True) -> None:
        super(FSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]
        for runtime in runtimes_below(self):
            runtime.on_module_zeroed(set_to_none)

    return zero_grad


def _prefetch(attribute: str, trigger: int) -> _PassThrough:
    """The unit that a pass reaches first gathers those of the modules in the list, instead of the next in order."""

    def wrap(original: Method) -> Method:
        @functools.wraps(original)
        def method(self: FSDPModule, modules: list[FSDPModule]) -> None:
            original(self, modules)
            own = _units(self)
            if own:
                ahead = [unit for module in modules for unit in _units(module) if unit not in own]
                setattr(own[trigger], attribute, ahead if modules else None)

        return method

    return wrap


def _refused(reason: str) -> _PassThrough:
    def wrap(original: Method) -> Method:
        @functools.wraps(original)
        def method(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
            for unit in _units(self):
                raise NotImplementedError(f"{original.__name__}() on a module with {unit.params[0].name}: {reason}")
            return original(self, *args, **kwargs)

        return method

    return wrap


def _set_requires_sync(unit: Unit, value: bool) -> None:
    unit.requires_sync = value


def _set_requires_all_reduce(unit: Unit, value: bool) -> None:
    unit.set_requires_all_reduce(value)


def _set_divide_factor(unit: Unit, value: float) -> None:
    unit.grads.set_divide_factor(value)


def _assign(attribute: str) -> Act:
    return lambda unit, value: setattr(unit, attribute, value)


ACTING: dict[str, _PassThrough] = {
    "unshard": _unshard,
    "reshard": _reshard,
    "reset_iter_state": _reset_iter_state,
    "zero_grad": _zero_grad,
    "set_requires_gradient_sync": _setter(_set_requires_sync),
    "set_requires_all_reduce": _setter(_set_requires_all_reduce),
    "set_reshard_after_forward": _setter(_assign("reshard_after_forward")),
    "set_reshard_after_backward": _setter(_assign("reshard_after_backward")),
    "set_unshard_in_backward": _setter(_assign("unshard_in_backward")),
    "set_gradient_divide_factor": _setter(_set_divide_factor),
    "set_modules_to_forward_prefetch": _prefetch("forward_prefetch", 0),
    "set_modules_to_backward_prefetch": _prefetch("backward_prefetch", -1),
}

NO_EFFECT: dict[str, str] = {
    "set_reduce_scatter_divide_factor": "calls set_gradient_divide_factor, which acts",
    "set_is_last_backward": "owned gradients are final at the end of every pass",
    "set_post_optim_event": "gathers of owned weights are ordered after the whole step",
    "set_reduce_scatter_unused_params": "zeros of unused owned weights always take part",
    "set_reduce_scatter_max_input_buffers": "owned gradients have one packed buffer in flight and no reduce-scatter",
    "set_separate_reduce_scatter_group": "owned gradients are reduced to owners, on a group of their own",
    "set_force_sum_reduction_for_comms": "owned gradients are always summed, and divided on the owner",
    "set_allocate_memory_from_process_group_for_comm": "where FSDP2 stages its own collectives",
    "set_symm_mem_for_comm": "where FSDP2 stages its own collectives",
    "set_custom_all_gather": "owned weights are broadcast by their owners, not all-gathered",
    "set_custom_reduce_scatter": "owned gradients are reduced to owners, not reduce-scattered",
}

REFUSED: dict[str, _PassThrough] = {
    "set_all_reduce_hook": _refused(
        "the hook would see FSDP2's gradients and not those of owned weights; pass replicate_mesh= to dedicate_params "
        "and shard over a two-dimensional mesh, which reduces over the replicas"
    ),
}


def forward_method(register: Callable[[nn.Module, str], None], module: nn.Module, name: str) -> None:
    """``register_fsdp_forward_method``, with the weights of the units gathered for the method and for its backward."""
    register(module, name)
    if not isinstance(module, FSDPModule):
        return
    sharded_method = getattr(module, name)

    @functools.wraps(sharded_method)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = group_hooks(self._get_fsdp_state()._modules)
        output = None
        for unit_hooks in hooks:
            unit_hooks.enter(self, args, kwargs)
        try:
            output = sharded_method(*args, **kwargs)
        finally:
            for unit_hooks in reversed(hooks):
                unit_hooks.leave(self, args, kwargs, output)
        return output

    setattr(module, name, types.MethodType(method, module))
