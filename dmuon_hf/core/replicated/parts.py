"""What one rank has of a parameter that tensor parallelism may have cut: plain tensors are their own part.

Under tensor parallelism the data-parallel ranks at one place of the tensor-parallel axis are replicas of each other:
they average, publish and compare their parts, and no part is ever made whole for that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

__all__ = ["grad_part", "part_like", "part_of"]


def part_of(tensor: Tensor) -> Tensor:
    """This rank's part, which shares memory with ``tensor``."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def part_like(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor that lies as ``tensor`` does, around this rank's part of it. No copy, no communication."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def grad_part(param: nn.Parameter) -> Tensor | None:
    """This rank's part of a gradient, live; ``None`` without one.

    A gradient that lies otherwise than its parameter, as the partial sums of a replicated weight that was used on parts
    of a sequence, is brought into the parameter's form first: collective over the tensor-parallel axis then, whose
    ranks run one program.
    """
    grad = param.grad
    if not isinstance(grad, DTensor):
        return grad
    assert isinstance(param, DTensor)
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    local = grad._local_tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if grad is not param.grad or local is not grad._local_tensor:
        param.grad = part_like(param, local)
    return local
