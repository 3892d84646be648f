"""What is sharded with the root of the model instead of by itself, while accelerate prepares it for FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.utils import _apply_to_tensors

from dmuon_hf.core.hook_boundaries import is_called

__all__ = ["left_to_root", "shared_weights_left_to_root"]


@contextmanager
def left_to_root(model: nn.Module, leaves: Callable[[Sequence[nn.Module]], Sequence[nn.Module]]) -> Iterator[None]:
    """Inside the block ``fully_shard`` passes by modules of ``model``, whose parameters the root's group then takes.

    What a passed module computes is unchanged: it casts its inputs and outputs as FSDP2 would. What has no forward to
    be hooked (a list of embeddings, a bare parameter, which some models call their embedding) is passed by, too.

    Args:
        leaves: which of the modules that are to be one group, none of them the root, are left to the root.
    """
    original: Callable[..., Any] = torch.distributed.fsdp.fully_shard
    inside = set(model.modules()) - {model}

    def fully_shard(module: Any, **options: Any) -> Any:
        group = list(module) if isinstance(module, (list, tuple)) else [module]
        if any(isinstance(member, nn.Module) and member not in inside for member in group):
            return original(module, **options)
        hooked = [member for member in group if isinstance(member, nn.Module) and is_called(member)]
        left = leaves(hooked)
        for member in left:
            _cast_as_fsdp_would(member, options.get("mp_policy"))
        kept = [member for member in hooked if not any(member is other for other in left)]
        if kept:
            original(kept[0] if len(kept) == 1 else kept, **options)
        return module

    torch.distributed.fsdp.fully_shard = fully_shard
    try:
        yield
    finally:
        torch.distributed.fsdp.fully_shard = original


@contextmanager
def shared_weights_left_to_root(model: nn.Module) -> Iterator[None]:
    """Inside the block whatever shares a parameter with a module of another group is left to the root.

    One FSDP2 group must hold all uses of a parameter. Encoder-decoder models share an embedding among encoder, decoder
    and head, heads like BERT's a bias between two modules; accelerate knows the tie of input to output embedding alone.
    The root's group stays whole from the first forward to the end of backward. To be entered while the owned weights
    are hidden. Which modules are left follows from the model, so it is the same on every rank.
    """
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(module)
    # By module: on the way to meta and back the parameters are replaced.
    ties = [frozenset(modules) for modules in holders.values() if len(modules) > 1]

    def leaves(group: Sequence[nn.Module]) -> Sequence[nn.Module]:
        kept = list(group)
        while True:
            covered = {part for member in kept for part in member.modules()}
            torn = [tie for tie in ties if tie & covered and not tie <= covered]
            still = [member for member in kept if not any(tie.intersection(member.modules()) for tie in torn)]
            if len(still) == len(kept):
                return [member for member in group if not any(member is other for other in kept)]
            kept = still

    with left_to_root(model, leaves):
        yield


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
