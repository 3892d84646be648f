"""Owned tensors on a mesh with an axis that they are not owned over: a coordinate on some axes, a shard on another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from tests.distributed.owned_tensors import assert_whole, values
from tests.harness import run_ranks

SHAPE = (7, 6)


def grid(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tp"))


def own_shard(whole: torch.Tensor, mesh: DeviceMesh, owner: int, placement: Placement) -> OwnedTensor:
    part = distribute_tensor(whole, mesh["tp"], [placement], src_data_rank=None).to_local().contiguous()
    local = part if mesh.get_local_rank("shard") == owner else part[:0]
    return OwnedTensor.from_local(local.clone(), mesh, owner=owner, shape=whole.shape, unowned={1: placement})


def operations(rank: int, world: int, placement: Placement) -> None:
    mesh, whole = grid(world), values(1, SHAPE)
    tensor = own_shard(whole, mesh, 1, placement)
    assert tensor.placements == (Shard(0), placement) and tensor.owner == 1
    assert tensor.is_owner == (mesh.get_local_rank("shard") == 1)
    assert_whole(tensor, whole)
    assert_whole(tensor * 2 + tensor, whole * 3)
    assert_whole(tensor.clone().copy_(values(2, SHAPE)), values(2, SHAPE))
    for order in (2, 1, float("inf")):
        norm = torch.linalg.vector_norm(tensor, order).full_tensor()
        torch.testing.assert_close(norm, torch.linalg.vector_norm(whole, order))
    param = nn.Parameter(tensor)
    param.full_tensor().pow(3).sum().backward()
    assert_whole(param.grad, 3 * whole**2)
    if isinstance(placement, Shard):
        with pytest.raises(NotImplementedError, match="further mesh axes"):
            tensor.sum()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_tensor_owned_over_one_axis_and_placed_on_another_equals_the_whole(placement: Placement) -> None:
    run_ranks(operations, 4, placement)


def save_and_load(rank: int, world: int, directory: str, placement: Placement) -> None:
    mesh, whole = grid(world), values(1, SHAPE)
    dcp.save({"weight": own_shard(whole, mesh, 1, placement)}, checkpoint_id=directory)
    again = own_shard(torch.zeros(SHAPE), mesh, 0, placement)
    dcp.load({"weight": again}, checkpoint_id=directory)
    assert_whole(again, whole)
    sharded = distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(0), Shard(1)])
    dcp.load({"weight": sharded}, checkpoint_id=directory)
    torch.testing.assert_close(sharded.full_tensor(), whole)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_checkpoint_of_owned_shards_loads_into_other_layouts(tmp_path: Path, placement: Placement) -> None:
    run_ranks(save_and_load, 4, str(tmp_path / "checkpoint"), placement)
