"""Module and autograd hooks that drive units. They decide when; units and the schedule do the work."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from dmuon_hf.core.runtime.compiling import refuse_cuda_graphs, untraced
from dmuon_hf.core.runtime.fsdp_units import note_unit
from dmuon_hf.core.runtime.owned_tensor import GradHook
from dmuon_hf.core.runtime.pipelining import follow_pipelining
from dmuon_hf.core.runtime.schedule import BackwardPass, Prefetcher, graph_task
from dmuon_hf.core.runtime.states import GradState
from dmuon_hf.core.runtime.unit import Unit
from dmuon_hf.core.runtime.watch import Inputs, differentiable_tensors

__all__ = ["UnitHooks", "register_root_hooks", "register_unit_hooks"]


class UnitHooks:
    """The hooks of one unit."""

    def __init__(self, unit: Unit, backward: BackwardPass, prefetcher: Prefetcher) -> None:
        self.unit = unit
        self.backward = backward
        self.prefetcher = prefetcher
        # One entry for each forward of the module that is running; None where autograd records nothing new.
        self._inputs: list[Inputs | None] = []
        self._compiled: object = self
        self._on_pre_backward = untraced(self._pre_backward)
        self._on_inner_pre_backward = untraced(self._inner_pre_backward)
        self._on_leave_hook = untraced(self._on_leave)
        self._on_passed_hook = untraced(self._on_passed)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the forward of the boundary, or of a method that was registered as one."""
        in_backward = graph_task() != -1
        if not in_backward:
            self.backward.abandon()
            follow_pipelining()
        if module._compiled_call_impl is not self._compiled:
            # Before the first forward, and after module.compile().
            self._compiled = module._compiled_call_impl
            refuse_cuda_graphs(self.unit.name)
        inputs = None
        if torch.is_grad_enabled() and not self._is_recompute(in_backward):
            inputs = Inputs(args, kwargs)
            inputs.on_leave(self._on_leave_hook)
        self._inputs.append(inputs)
        self.unit.enter_forward(in_backward=in_backward)
        if in_backward:
            self.prefetcher.before_backward(self.unit)
        else:
            self.prefetcher.before_forward(self.unit)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After it, also after an exception."""
        if not self._inputs:
            # A hook that runs before ours raised, so that the module was never entered.
            return
        inputs = self._inputs.pop()
        self.unit.leave_forward()
        in_backward = graph_task() != -1
        if inputs is not None and not self._is_recompute(in_backward):
            hook = self._on_inner_pre_backward if in_backward else self._on_pre_backward
            for tensor in inputs.made_since(output):
                tensor.register_hook(hook)
            inputs.on_passed(output, self._on_passed_hook)
            # What the module left in its arguments or on itself: losses, caches, hidden states. FSDP2 looks at outputs.
            for tensor in inputs.made_since(args, kwargs, _kept_by(module)):
                tensor.register_hook(hook)
                if isinstance(module, FSDPModule):
                    tensor.register_hook(module._get_fsdp_state()._pre_backward)
        # In a backward pass, that of this unit follows at once, or has begun; its end frees the weights.
        if not in_backward and self.unit.reshard_after_forward:
            self.unit.weights.reshard()

    def _is_recompute(self, in_backward: bool) -> bool:
        """A forward inside a backward that has already reached this unit repeats what autograd knows."""
        return in_backward and self.unit.grads.state is not GradState.IDLE

    def _pre_backward(self, grad: Tensor) -> None:
        self.backward.begin()
        self.unit.enter_backward()
        self.prefetcher.before_backward(self.unit)

    def _inner_pre_backward(self, grad: Tensor) -> None:
        """Of a forward that ran inside a backward pass (reentrant checkpointing), whose own pass is an inner one."""
        self._pre_backward(grad)
        Variable._execution_engine.queue_callback(self._on_leave_hook)

    def _on_passed(self, grad: Tensor) -> None:
        """Of an input that the module handed on: on this rank it may have done nothing else (a block that is skipped).

        The pass comes through the unit all the same, so that this rank gathers and reduces when the others do.
        """
        if self.unit.grads.state is GradState.IDLE:
            self._pre_backward(grad)

    def _on_leave(self, grad: Tensor | None = None) -> None:
        if self.unit.grads.state is GradState.COLLECTING:
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


def _kept_by(module: nn.Module) -> list[Tensor]:
    """Tensors that a module and those below it keep as plain attributes, such as an auxiliary loss."""
    return [value for part in module.modules() for value in part.__dict__.values() if isinstance(value, Tensor)]


def _on_owned_grad(unit: Unit, i: int) -> GradHook:
    weak = weakref.ref(unit.grads)  # weakly, as in `_UnitHooks.on_grad`

    def hook(_: Tensor) -> None:
        grads = weak()
        assert grads is not None
        grads.arrives_owned(i)

    return GradHook(hook)


def register_unit_hooks(unit: Unit, backward: BackwardPass, prefetcher: Prefetcher) -> None:
    """Attach a unit to its boundary module and to autograd."""
    hooks = UnitHooks(unit, backward, prefetcher)
    note_unit(hooks)
    # Around the hooks that the module has already, which so read whole weights, as FSDP2's.
    unit.module.register_forward_pre_hook(untraced(hooks.enter), with_kwargs=True, prepend=True)
    # Also after an exception: early-stopping recomputation leaves a forward by raising.
    unit.module.register_forward_hook(untraced(hooks.leave), with_kwargs=True, always_call=True)
    for i, parameter in enumerate(unit.weights.unsharded):
        parameter.register_post_accumulate_grad_hook(untraced(hooks.on_grad(i)))
    for i, param in enumerate(unit.params):
        owned, trainable = param.param, param.param.requires_grad
        # Torch takes no hook of a frozen tensor, which may be trained later.
        owned.requires_grad_(True).register_hook(_on_owned_grad(unit, i))
        owned.requires_grad_(trainable)


def register_root_hooks(root: nn.Module, backward: BackwardPass, prefetcher: Prefetcher) -> None:
    """Begin every backward pass in the outermost graph task, and gather the first unit of either direction ahead.

    Reentrant checkpointing runs backward passes inside the backward pass; a pass that began in an inner one would end
    with it. The root's outputs are reached first, in the outer one.
    """

    def pre_forward(module: nn.Module, args: Any) -> None:
        if graph_task() == -1:
            refuse_cuda_graphs(type(module).__name__)
            backward.abandon()
            prefetcher.begin_forward()

    def pre_backward(grad: Tensor) -> None:
        # An output of the model may be reached in the middle of a pass: a hidden state beside the loss.
        if backward.begin():
            prefetcher.begin_backward()

    on_pre_backward = untraced(pre_backward)

    def post_forward(module: nn.Module, args: Any, output: Any) -> None:
        if graph_task() != -1:
            return
        prefetcher.end_forward()
        if torch.is_grad_enabled():
            for tensor in differentiable_tensors(output):
                tensor.register_hook(on_pre_backward)

    # Before those of a unit that is the whole model.
    root.register_forward_pre_hook(untraced(pre_forward), prepend=True)
    root.register_forward_hook(untraced(post_forward))
