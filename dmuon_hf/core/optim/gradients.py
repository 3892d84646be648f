"""What this rank holds of a tensor, and the loss scale on its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["local_tensor", "unscale_"]


def local_tensor(tensor: Tensor, what: str) -> Tensor:
    """The part of ``tensor`` that this rank holds: itself, or the live local tensor of a DTensor.

    Call under ``no_grad``: only then is the local tensor the live one.

    Raises:
        ConfigurationError: The DTensor holds partial sums, so that no rank has its values.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ConfigurationError(f"{what} is a DTensor of partial sums ({tensor.placements}): reduce it before step()")
    local: Tensor = tensor.to_local()
    return local


def unscale_(grads: Sequence[Tensor], grad_scale: Tensor) -> None:
    """Divide live local gradients by the loss scale, in place."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    inverse = grad_scale.double().reciprocal().float()
    for device, same_device in by_device.items():
        torch._foreach_mul_(same_device, inverse.to(device))
