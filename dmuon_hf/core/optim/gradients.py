"""What this rank holds of a tensor, and the loss scale on its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["check_and_unscale_", "copies_of", "local_tensor", "share_of"]

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
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def copies_of(grad: Tensor, ranks: Sequence[int] | None) -> float:
    """How many of ``ranks`` hold what this rank holds of ``grad``."""
    if ranks is None or not isinstance(grad, DTensor):
        return 1.0
    mesh, coordinate = grad.device_mesh, grad.device_mesh.get_coordinate()
    if coordinate is None:
        return 1.0
    alike = mesh.mesh[
        tuple(
            slice(None) if placement.is_replicate() else place
            for placement, place in zip(grad.placements, coordinate, strict=True)
        )
    ]
    group = set(ranks)
    copies = len(group.intersection(alike.flatten().tolist()))
    return copies * len(group) / len(group.intersection(mesh.mesh.flatten().tolist()))


def share_of(grad: Tensor, ranks: Sequence[int] | None) -> float:
    """This rank's part in one that the ``ranks`` add up to: all of them have a DTensor, one has a plain tensor."""
    return 1.0 / len(ranks) if ranks is not None and isinstance(grad, DTensor) else 1.0


def check_and_unscale_(grads: Sequence[Tensor], grad_scale: Tensor | None, device: torch.device) -> Tensor:
    """Divide live local gradients by the loss scale, if there is one, and report infinities and NaN.

    Does not synchronise. Without a scale gradients are read once and not written.

    Args:
        grads: Local gradients of any device and dtype.
        grad_scale: Loss scale, or ``None``.
        device: Where the result goes.

    Returns:
        fp32 ``(1,)``: above 0 where any element is infinite or NaN, else 0.
    """
    found = torch.zeros(1, dtype=torch.float32, device=device)
    inverse = None if grad_scale is None else grad_scale.double().reciprocal().float().reshape(1).to(device)
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        if grad.numel() > 0:
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (where, _), same_kind in by_kind.items():
        part = _nonfinite(same_kind) if inverse is None else _unscale_(same_kind, inverse.to(where))
        found = torch.maximum(found, part.to(device))
    return found


def _unscale_(grads: list[Tensor], inverse: Tensor) -> Tensor:
    """Multiply by ``inverse`` and report in one pass of the kernel of ``torch.amp``.

    CUDA has it for no other types than fp16, fp32 and fp64: others, bf16 above all, take two passes.
    """
    if grads[0].dtype not in _AMP_TYPES:
        torch._foreach_mul_(grads, inverse.reshape(()))
        return _nonfinite(grads)
    part = torch.zeros(1, dtype=torch.float32, device=grads[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, part, inverse)
    return part


def _nonfinite(grads: list[Tensor]) -> Tensor:
    """Exact and without a write: extremes keep NaN, and no sum overflows.

    One multi-tensor kernel on accelerators; on the CPU, which has none for the largest magnitude, two extremes each.
    """
    if grads[0].device.type == "cpu":
        extremes = [extreme for grad in grads for extreme in torch.aminmax(grad)]
    else:
        extremes = list(torch._foreach_norm(grads, math.inf))
    return (~torch.stack(extremes).isfinite()).any().float().reshape(1)
