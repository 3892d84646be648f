"""How a dedicated parameter lies on the tensor-parallel axis, and what its module and autograd see of that.

Such a parameter was a DTensor before it was dedicated. Each tensor-parallel rank owns, gathers and reduces its part
over its own data-parallel grid, as it would a whole matrix; the module's forward gets a DTensor of that part, on the
mesh that the parameter came on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["TensorPart"]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The place of one parameter on the tensor-parallel axis.

    Attributes:
        mesh: 1-D.
        placement: ``Shard`` or ``Replicate``.
        whole: Global shape.
        shape: Shape of this rank's part, which may be empty.
    """

    mesh: DeviceMesh
    placement: Placement
    whole: torch.Size
    shape: torch.Size

    @staticmethod
    def of(param: Tensor) -> TensorPart | None:
        """The place of a DTensor on a 1-D mesh; ``None`` for a plain tensor."""
        if not isinstance(param, DTensor):
            return None
        mesh, (placement,) = param.device_mesh, param.placements
        shape, _ = compute_local_shape_and_global_offset(param.shape, mesh, [placement])
        return TensorPart(mesh, placement, param.shape, torch.Size(shape))

    def show(self, local: Tensor) -> DTensor:
        """A DTensor around this rank's part, whose storage it shares."""
        stride = torch.empty(self.whole, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [self.placement], run_check=False, shape=self.whole, stride=stride)

    def part_of_grad(self, grad: Tensor) -> Tensor:
        """This rank's part of a gradient of :meth:`show`. Collective over the axis if it is in another placement.

        That is a partial sum above all, as that of a replicated weight that was used on parts of a sequence.
        """
        assert isinstance(grad, DTensor)
        if grad.placements != (self.placement,):
            grad = grad.redistribute(placements=[self.placement])
        local = grad._local_tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
