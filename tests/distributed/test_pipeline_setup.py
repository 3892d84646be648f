"""Set-up of a pipeline stage spans its own ranks alone, whatever the other stages do, and when."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dmuon_hf.core as dmuon
from dmuon_hf.core.covering import ranks_of
from dmuon_hf.core.process_groups import clone_group
from tests.distributed.pipeline_setup import is_matrix, pipeline_mesh, stages_of, whole_model, wrap
from tests.harness import run_ranks
from tests.harness.fake import fake_world
from tests.harness.models import dense_batch


@pytest.mark.parametrize("mode", ["z3", "hsdp", "replicate", "sharded", "tp"])
def test_stage_is_set_up_and_trained_while_the_other_has_not_begun(mode):
    """The second stage then dedicates two models, the first had one: a group over the world would hang either."""
    assert run_ranks(_one_after_the_other, 4, mode) == [1, 1, 2, 2]


def _one_after_the_other(rank, world, mode):
    mesh = pipeline_mesh(mode)
    store = dist.distributed_c10d._get_default_store()
    stage = mesh.get_local_rank("pp")
    if stage == 1:
        store.wait(["first stage/0", "first stage/1"], timedelta(seconds=50))
    for _ in range(1 + stage):
        _train(mesh, mode)
    store.set(f"first stage/{rank}", "done")
    return 1 + stage


def _train(mesh, mode):
    model = stages_of(whole_model(), 2)[0]
    wrap(model, [model], mesh, mode)
    optimizer = dmuon.Muon(model, **({"predicate": is_matrix} if mode == "sharded" else {}))
    model(dense_batch(0, width=64)).square().mean().backward()
    optimizer.step()


def test_one_rank_a_stage_needs_nobody():
    run_ranks(_alone, 2)


def _alone(rank, world):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    if rank == 0:
        _train(mesh, "z3")


def test_matrices_on_two_meshes_of_a_stage_are_stepped_by_that_stage():
    assert run_ranks(_two_meshes, 1, init=False) == [([4, 5, 6, 7], [4, 6], list(range(8)))]


def _two_meshes(rank, world):
    with fake_world(8, rank=4):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        on_dp, on_tp, on_pp = (distribute_tensor(torch.ones(4, 4), mesh[d], [Shard(0)]) for d in ("dp", "tp", "pp"))
        return ranks_of([on_dp, on_tp]), ranks_of([on_dp]), ranks_of([on_pp, on_dp, on_tp])


def test_group_of_a_stage_is_not_split_from_a_world_bound_to_a_device():
    """Splitting takes every rank of the job: NCCL's communicator is that of all."""
    assert run_ranks(_bound, 2) == [(True, "cuda:1"), (True, "cuda:1")]


def _bound(rank, world):
    group = dist.new_group([rank], use_local_synchronization=True)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 1)
    made_of = []
    original = dist.distributed_c10d._get_split_source
    dist.distributed_c10d._get_split_source = lambda parent: made_of.append(parent) or original(parent)
    clone = clone_group([rank], like=group, purpose="shard")
    bound = dist.group.WORLD.bound_device_id
    dist.group.WORLD.bound_device_id = None
    return made_of == [] and clone.bound_device_id == bound, str(bound)
