"""Casts at the modules that hold managed parameters: of their inputs to the weights' dtype, of their outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.policy import ParamPolicy

__all__ = ["register_casts"]

Casts = tuple["torch.dtype | None", "torch.dtype | None"]


def register_casts(managed: Mapping[str, tuple[ParamPolicy, Iterable[nn.Module]]]) -> None:
    """Hook the modules that hold parameters, by name with their policy, whose policy asks for casts.

    Inputs are cast inside of the boundary's own hooks, outputs after them, so that autograd casts gradients back.

    Raises:
        ConfigurationError: The parameters of one module ask for different casts; before anything is hooked.
    """
    wanted: dict[nn.Module, tuple[str, Casts]] = {}
    for name, (policy, modules) in managed.items():
        casts = (policy.input_dtype, policy.output_dtype)
        for module in modules:
            first, other = wanted.setdefault(module, (name, casts))
            if other != casts:
                raise ConfigurationError(
                    f"{first} and {name} are parameters of one {type(module).__name__} and ask for different casts of "
                    f"its inputs and outputs ({_shown(other)} and {_shown(casts)}): give them one param_dtype, "
                    "cast_forward_inputs and output_dtype"
                )
    for module, (_, (inputs, outputs)) in wanted.items():
        if inputs is not None:
            module.register_forward_pre_hook(_InputCast(inputs), with_kwargs=True)
        if outputs is not None:
            module.register_forward_hook(_OutputCast(outputs))


class _InputCast:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = _cast((args, kwargs), self._dtype)
        return args, kwargs


class _OutputCast:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, self._dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in ``dtype``; containers that hold no other are handed on as they are."""
    if not any(_differs(tensor, dtype) for tensor in tree_leaves(tree)):
        return tree
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if _differs(tensor, dtype) else tensor, tree)


def _differs(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not dtype


def _shown(casts: Casts) -> str:
    inputs, outputs = casts
    return f"inputs to {inputs or 'nothing else'}, outputs to {outputs or 'nothing else'}".replace("torch.", "")
