"""What this rank holds of a tensor, and the loss scale on its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["check_and_unscale_", "local_tensor"]

_AMP_TYPES = frozenset({torch.float16, torch.float32, torch.float64})


def local_tensor(tensor: Tensor, what: str) -> Tensor:
    """The part of ``tensor`` that this rank holds: itself, or the live local tensor of a DTensor.

    Call under ``no_grad``: only then is the local tensor the live one.

    Raises:
        ConfigurationError: The tensor is sparse, or a DTensor of partial sums, so that no rank has its values.
    """
    if tensor.layout is not torch.strided:
        raise ConfigurationError(f"{what} is sparse, which Muon does not take: build the embedding with sparse=False")
    if not isinstance(tensor, DTensor):
        return tensor
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ConfigurationError(f"{what} is a DTensor of partial sums ({tensor.placements}): reduce it before step()")
    local: Tensor = tensor.to_local()
    return local


def check_and_unscale_(grads: Sequence[Tensor], grad_scale: Tensor | None, device: torch.device) -> Tensor:
    """Divide live local gradients by the loss scale and report infinities and NaN; does not synchronise.

    One pass of the multi-tensor kernel of ``torch.amp``, the cheapest exact check on CPU and CUDA; without a scale it
    writes every element back as it was. CUDA has it for no other types than fp16, fp32 and fp64: gradients of the
    others, bf16 above all, are scaled and then checked by their largest element.

    Args:
        grads: Local gradients of any device and dtype.
        grad_scale: Loss scale, or ``None``.
        device: Where the result goes.

    Returns:
        fp32 ``(1,)``: above 0 where any element is infinite or NaN, else 0.
    """
    found = torch.zeros(1, dtype=torch.float32, device=device)
    inverse = found.new_ones(1) if grad_scale is None else grad_scale.double().reciprocal().float()
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        if grad.numel() > 0:
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (where, dtype), same_kind in by_kind.items():
        part = torch.zeros(1, dtype=torch.float32, device=where)
        if dtype in _AMP_TYPES:
            torch._amp_foreach_non_finite_check_and_unscale_(same_kind, part, inverse.to(where))
        else:
            if grad_scale is not None:
                torch._foreach_mul_(same_kind, inverse.to(where).reshape(()))
            largest = torch.stack(torch._foreach_norm(same_kind, math.inf))
            part = (~largest.isfinite()).any().float().reshape(1)
        found = torch.maximum(found, part.to(device))
    return found
