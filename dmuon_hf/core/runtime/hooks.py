"""Module and autograd hooks that drive units. They decide when; units and the schedule do the work."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dmuon_hf.core.runtime.schedule import BackwardPass, Prefetcher, graph_task
from dmuon_hf.core.runtime.states import GradState
from dmuon_hf.core.runtime.unit import Unit

__all__ = ["register_root_hooks", "register_unit_hooks"]


class _LeaveThroughInputs(torch.autograd.Function):
    """Identity on a module's inputs whose backward runs when autograd leaves the module."""

    @staticmethod
    def forward(ctx: Any, on_leave: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.on_leave = on_leave
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.on_leave()
        return (None, *grads)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _differentiable_tensors(value: Any) -> Iterator[Tensor]:
    """Tensors that require a gradient anywhere in a module's output: containers, mappings and dataclasses."""
    if _differentiable(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _differentiable_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _differentiable_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _differentiable_tensors(getattr(value, field.name))


def _watch_inputs(args: Any, kwargs: Any, on_leave: Callable[[], None]) -> tuple[Any, Any]:
    leaves, tree = tree_flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if _differentiable(leaf)]
    if positions:
        watched = _LeaveThroughInputs.apply(on_leave, *[leaves[i] for i in positions])
        for i, tensor in zip(positions, watched, strict=True):
            leaves[i] = tensor
    new_args, new_kwargs = tree_unflatten(leaves, tree)
    return new_args, new_kwargs


class _UnitHooks:
    """The hooks of one unit."""

    def __init__(self, unit: Unit, backward: BackwardPass, prefetcher: Prefetcher) -> None:
        self.unit = unit
        self.backward = backward
        self.prefetcher = prefetcher

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        in_backward = graph_task() != -1
        if not in_backward:
            self.backward.abandon()
        self.unit.enter_forward(in_backward=in_backward)
        if in_backward:
            self.prefetcher.before_backward(self.unit)
        else:
            self.prefetcher.before_forward(self.unit)
        if not torch.is_grad_enabled() or self._is_recompute(in_backward):
            return args, kwargs
        return _watch_inputs(args, kwargs, self._on_leave)

    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.unit.leave_forward()
        in_backward = graph_task() != -1
        if in_backward:
            # The backward of this unit follows at once, or has begun; its end frees the weights.
            if torch.is_grad_enabled() and not self._is_recompute(in_backward):
                self._watch_outputs(output)
            return
        if torch.is_grad_enabled():
            self._watch_outputs(output)
        if self.unit.reshard_after_forward:
            self.unit.weights.reshard()

    def _is_recompute(self, in_backward: bool) -> bool:
        """A forward inside a backward that has already reached this unit repeats what autograd knows."""
        return in_backward and self.unit.grads.state is not GradState.IDLE

    def _watch_outputs(self, output: Any) -> None:
        for tensor in _differentiable_tensors(output):
            tensor.register_hook(self._pre_backward)

    def _pre_backward(self, grad: Tensor) -> None:
        self.backward.begin()
        self.unit.enter_backward()
        self.prefetcher.before_backward(self.unit)

    def _on_leave(self) -> None:
        self.backward.begin()
        self.unit.grads.inputs_done()
        self.backward.advance()

    def on_grad(self, i: int) -> Callable[[Tensor], None]:
        # Weakly: torch keeps these hooks where the garbage collector does not look, so that a model they held would
        # never be freed. A graph that can still call them holds the unit by its other hooks.
        weak = weakref.ref(self)

        def hook(_: Tensor) -> None:
            hooks = weak()
            assert hooks is not None
            hooks.backward.begin()
            hooks.unit.grads.arrived(i)

        return hook


def register_unit_hooks(unit: Unit, backward: BackwardPass, prefetcher: Prefetcher) -> None:
    """Attach a unit to its boundary module and to autograd."""
    hooks = _UnitHooks(unit, backward, prefetcher)
    unit.module.register_forward_pre_hook(hooks.pre_forward, with_kwargs=True)
    # Also after an exception: early-stopping recomputation leaves a forward by raising.
    unit.module.register_forward_hook(hooks.post_forward, with_kwargs=True, always_call=True)
    for i, parameter in enumerate(unit.weights.unsharded):
        parameter.register_post_accumulate_grad_hook(hooks.on_grad(i))


def register_root_hooks(root: nn.Module, backward: BackwardPass, prefetcher: Prefetcher) -> None:
    """Begin every backward pass in the outermost graph task, and gather the first unit of either direction ahead.

    Reentrant checkpointing runs backward passes inside the backward pass; a pass that began in an inner one would end
    with it. The root's outputs are reached first, in the outer one.
    """

    def pre_forward(module: nn.Module, args: Any) -> None:
        if graph_task() == -1:
            backward.abandon()
            prefetcher.begin_forward()

    def post_forward(module: nn.Module, args: Any, output: Any) -> None:
        if graph_task() != -1:
            return
        prefetcher.end_forward()
        if torch.is_grad_enabled():
            for tensor in _differentiable_tensors(output):
                tensor.register_hook(pre_backward)

    def pre_backward(grad: Tensor) -> None:
        # An output of the model may be reached in the middle of a pass: a hidden state beside the loss.
        if backward.begin():
            prefetcher.begin_backward()

    # Before those of a unit that is the whole model.
    root.register_forward_pre_hook(pre_forward, prepend=True)
    root.register_forward_hook(post_forward)
