"""DTensors whose parts are no box of the whole, through the files of torch's distributed checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from dmuon_hf.core.shards.parts import parts_of
from tests.harness import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WHOLE = torch.arange(21.0).view(7, 3)
LAYOUTS: dict[str, Any] = {
    "gaps_in_copies": (_StridedShard(0, split_factor=2), Replicate()),
    "gaps_beside_columns": (_StridedShard(0, split_factor=2), Shard(1)),
    "strided_inside": (Shard(0), _StridedShard(0, split_factor=2)),
    "as_fsdp_over_tp": (_StridedShard(0, split_factor=2), Shard(0)),
}


def spread(layout: str, whole: torch.Tensor) -> Any:
    mesh = init_device_mesh("cpu", (2, 2))
    return distribute_tensor(whole, mesh, LAYOUTS[layout], src_data_rank=None)


def there_and_back(rank: int, world: int, layout: str, directory: str) -> None:
    tensor = spread(layout, WHOLE)
    dcp.save({"w": tensor}, checkpoint_id=directory)
    for other in LAYOUTS:
        target = spread(other, torch.zeros_like(WHOLE))
        dcp.load({"w": target}, checkpoint_id=directory)
        assert torch.equal(target.to_local(), spread(other, WHOLE).to_local()), other
    local, mesh = torch.zeros(7 if rank == 1 else 0, 3), init_device_mesh("cpu", (4,))
    owned = OwnedTensor.from_local(local, mesh, owner=1, shape=(7, 3))
    dcp.load({"w": owned}, checkpoint_id=directory)
    assert torch.equal(owned.full_tensor(), WHOLE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_shards_are_saved_as_what_they_hold(layout: str, tmp_path: Path) -> None:
    run_ranks(there_and_back, 4, layout, str(tmp_path))
    found = {"w": torch.zeros_like(WHOLE)}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found["w"], WHOLE)


def misfit(rank: int, world: int) -> None:
    tensor = spread("gaps_in_copies", WHOLE)
    tensor._local_tensor = tensor._local_tensor[:1]
    with pytest.raises(dmuon.ConfigurationError, match=r"layers.w has a local tensor of shape \(1, 3\)"):
        list(parts_of(tensor, "layers.w"))


def test_local_tensor_of_another_size_is_an_error_that_names_the_key() -> None:
    run_ranks(misfit, 4)
