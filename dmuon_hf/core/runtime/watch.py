"""Which tensors enter a module and which it makes, found without replacing an argument or a container.

[Note: leaving a module]
Nodes of an autograd graph are numbered as they are made, and the engine always takes the ready node with the highest
number. So once it takes a node that is older than a module's forward, every node of that forward has run, and the
leaves behind them (accumulated as soon as they are ready) have their gradients. The first producer of an input that
runs tells that autograd has left the module: a hook on each input is enough, whatever else uses the input, and the
caller's tensors, lists and caches stay the very objects it passed. An input that is a leaf has no producer; a module
that has no others is left at the end of its graph task.
"""

from __future__ import annotations

import dataclasses
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Inputs", "differentiable_tensors"]

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type, range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module, torch.optim.Optimizer),
    *(types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
)
# Whoever passes more than that does not pass arguments, but everything it knows.
_MOST = 1 << 14


def differentiable_tensors(value: Any) -> Iterator[Tensor]:
    """Tensors that require a gradient in nested containers, mappings and objects (caches); each of them once.

    Of an object what its attributes hold, but not of modules, types, functions and the like: those are no data.
    """
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            if item.requires_grad:
                yield item
            continue
        if isinstance(item, _ATOMS) or id(item) in seen:
            continue
        seen.add(id(item))
        pending.extend(reversed(_children(item)))
        if len(seen) == _MOST:
            return


def _children(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset, deque)):
        return list(item)
    if dataclasses.is_dataclass(item):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    return list(getattr(item, "__dict__", {}).values())


class Inputs:
    """The differentiable tensors with which a module was called."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        # Tensors are kept, so that an id names one of them for as long as this object lives.
        self._tensors = {id(tensor): (tensor, tensor.grad_fn) for tensor in differentiable_tensors((args, kwargs))}

    def on_leave(self, hook: Callable[[Tensor], None]) -> None:
        """Call ``hook`` when autograd has left the module, at least once. See [Note: leaving a module]."""
        for tensor, producer in self._tensors.values():
            if producer is not None:
                _register_first(tensor, hook)

    def on_passed(self, value: Any, hook: Callable[[Tensor], None]) -> None:
        """Call ``hook`` where autograd comes to an input that the module handed on in ``value``, before it leaves."""
        made = {id(tensor) for tensor in self.made_since(value)}
        for tensor in differentiable_tensors(value):
            if id(tensor) not in made and tensor.grad_fn is not None:
                _register_first(tensor, hook)

    def made_since(self, *values: Any) -> Iterator[Tensor]:
        """Tensors in ``values`` that the module made, or changed in place; not the inputs that it passed on."""
        for tensor in differentiable_tensors(values):
            known = self._tensors.get(id(tensor))
            if known is None or known[1] is not tensor.grad_fn:
                yield tensor


def _register_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Before the hooks that are there: those of whoever made the tensor begin the backward of an earlier module."""
    own = tensor.register_hook(hook).id
    hooks = tensor._backward_hooks
    assert hooks is not None
    for other in [key for key in hooks if key != own]:
        # Autograd calls them in the order of insertion into the dict, which move_to_end() leaves as it is.
        hooks[other] = hooks.pop(other)
