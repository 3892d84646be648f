"""One matrix that every rank keeps whole, and whose update one of them computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dmuon_hf.core.replicated.parts import part_of
from dmuon_hf.core.runtime.dedicated import DedicatedParam
from dmuon_hf.core.runtime.owned_tensor import Origin, OwnedTensor

__all__ = ["ReplicatedParam"]


class ReplicatedParam(DedicatedParam):
    """A dedicated parameter under replication: ``param`` is the model's own, live on every rank.

    Its gradient is the same mean everywhere when ``backward()`` has returned. Only the momentum has an owner. Under
    tensor parallelism ``param`` is the DTensor that it was, all of that holds for its parts, and each has the momentum
    at one data-parallel place.

    Args:
        mesh: Of the data-parallel ranks; with a ``part`` the tensor-parallel axis as its last dimension.
        is_owner: Whether this rank is at the owner's place.
    """

    __slots__ = ("_is_owner", "_mesh", "changed")

    def __init__(self, *, mesh: DeviceMesh, is_owner: bool, **of_dedicated: Any) -> None:
        super().__init__(hsdp=False, **of_dedicated)
        self._mesh = mesh
        self._is_owner = is_owner
        self.changed = False
        """Whether the owner has updated the matrix since it was last published; the same on every rank."""

    @property
    def is_owner(self) -> bool:
        return self._is_owner

    @property
    def held_grad(self) -> Tensor | None:
        """The mean gradient as a DTensor around the parameter's own, which all data-parallel ranks have."""
        grad = self.param.grad
        if grad is None:
            return None
        beside = [] if self.part is None else [self.part.placement]
        return DTensor.from_local(
            part_of(grad), self._mesh, [Replicate(), *beside], run_check=False, shape=grad.shape, stride=grad.stride()
        )

    @property
    def state_like(self) -> Tensor:
        """What the momentum is laid out like: whole on the owner, without rows elsewhere. Aliases the parameter."""
        part = part_of(self.param)
        local = part if self._is_owner else part[:0]
        return OwnedTensor.from_local(
            local.contiguous(),
            self._mesh,
            owner=self.owner_shard,
            shape=self.param.shape,
            unowned=None if self.part is None else {1: self.part.placement},
            origin=Origin(self.name, self.unit),
        )

    def mark_updated(self) -> None:
        """The owner has written the parameter; on the others the publish will. To be called on every rank."""
        self.changed = True
        if not self._is_owner or self.part is not None:
            # A graph that was recorded before the step must not be walked after it, on any rank. Writes to a part are
            # not counted by the DTensor around it.
            torch.autograd.graph.increment_version(self.param)
