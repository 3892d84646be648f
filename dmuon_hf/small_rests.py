"""Blocks that keep next to nothing beside their owned Muon weights are sharded with the root of the model.

FSDP2 gathers and reduces once per wrapped module. Of a transformer block whose matrices have owners only norms and
biases are left to it: two gathers and a reduction of a few kilobytes per block and step, whose latency is all they
cost. Left to the root's group they travel together, once per pass, and stay whole in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.utils import _apply_to_tensors

from dmuon_hf.core.runtime import runtime_of

__all__ = ["SMALL_REST", "small_rests_left_to_root"]

SMALL_REST = 1 << 18
"""Most elements of a block's rest that is left to the root: 1 MiB in fp32, above the norms and biases of a block of
any size and below adapters, routers and experts, whose gathers are worth hiding behind computation."""


@contextmanager
def small_rests_left_to_root(model: nn.Module) -> Iterator[None]:
    """Inside the block ``fully_shard`` passes by blocks of ``model`` with owned weights and a small rest.

    To be entered while the owned weights are hidden. What a passed block computes is unchanged: it casts its inputs and
    outputs as FSDP2 would. A model whose trainable rest has several dtypes stays as it is, since one FSDP2 group must
    have one. Which blocks are passed follows from shapes, so it is the same on every rank.
    """
    runtime = runtime_of(model)
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if runtime is None or len(dtypes) > 1:
        yield
        return
    holders = {module for param in runtime.dedicated.values() for module, _ in param.places}
    original: Callable[..., Any] = torch.distributed.fsdp.fully_shard

    def fully_shard(module: Any, **options: Any) -> Any:
        if isinstance(module, nn.Module) and _is_inside(model, module) and _has_small_rest(module, holders):
            _cast_as_fsdp_would(module, options.get("mp_policy"))
            return module
        return original(module, **options)

    torch.distributed.fsdp.fully_shard = fully_shard
    try:
        yield
    finally:
        torch.distributed.fsdp.fully_shard = original


def _is_inside(model: nn.Module, module: nn.Module) -> bool:
    return module is not model and any(module is child for child in model.modules())


def _has_small_rest(module: nn.Module, holders: set[nn.Module]) -> bool:
    if not any(child in holders for child in module.modules()):
        return False
    return sum(parameter.numel() for parameter in module.parameters()) <= SMALL_REST


def _cast_as_fsdp_would(module: nn.Module, policy: MixedPrecisionPolicy | None) -> None:
    if policy is None:
        return
    inputs, outputs = policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype

    def cast_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return _cast(args, inputs), _cast(kwargs, inputs)

    if inputs is not None:
        module.register_forward_pre_hook(cast_inputs, prepend=True, with_kwargs=True)
    if outputs is not None:
        module.register_forward_hook(lambda _, args, output: _cast(output, outputs))


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(cast, values)
