"""Owned tensors with known values, for tests."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dmuon_hf.core.runtime.owned_tensor import OwnedTensor

SHAPE = (7, 3)


def values(seed: int = 0, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same normal values on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def flat_mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))


def grid_mesh(world: int, hsdp: bool) -> DeviceMesh:
    """What owned tensors of a model live on: the shard mesh, or two replicas of it."""
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")) if hsdp else flat_mesh(world)


def own(whole: torch.Tensor, mesh: DeviceMesh, owner: int, *, requires_grad: bool = False) -> OwnedTensor:
    flat = mesh.mesh.flatten().tolist().index(dist.get_rank())
    local = whole.clone() if flat == owner else whole.new_empty((0, *whole.shape[1:]))
    return OwnedTensor.from_local(local, mesh, owner=owner, shape=whole.shape, requires_grad=requires_grad)


def parameter(whole: torch.Tensor, mesh: DeviceMesh, owner: int) -> nn.Parameter:
    return nn.Parameter(own(whole, mesh, owner))


def assert_whole(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    """The values that the owner holds, up to rounding."""
    assert type(tensor) is OwnedTensor
    torch.testing.assert_close(tensor.full_tensor(), expected, rtol=1e-6, atol=1e-6)
