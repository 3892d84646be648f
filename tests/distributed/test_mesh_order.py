"""The package's own groups: ranks in the order of the mesh, the timeout that the user set, groups of the user's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.mesh import topology_from_meshes
from dmuon_hf.core.process_groups import live_clones
from dmuon_hf.core.runtime import require_runtime
from tests.distributed.training import HYPER, full
from tests.harness import run_ranks
from tests.harness.models import dense_batch, rank_part, tiny_mlp


def is_proj(name: str, param: torch.nn.Parameter) -> bool:
    return "proj" in name


def one_step(rank: int, world: int, names: tuple[str, str]) -> dict[str, Any]:
    """A step of HSDP with the dimensions of the root mesh in the order of ``names``."""
    model = tiny_mlp()
    for name, param in model.named_parameters():
        param.requires_grad_("proj" in name)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
    dmuon.dedicate_params(model, mesh["shard"], is_proj, replicate_mesh=mesh["replicate"])
    optimizer = dmuon.Muon(model, **HYPER)
    model(rank_part(dense_batch(0, batch=48), rank, world)).backward()
    optimizer.step()
    topology = require_runtime(model).topology
    assert topology.grid is not None
    return {
        "ranks": list(topology.grid.ranks),
        "place": topology.flat_rank(topology.slot) == topology.grid.rank,
        "weights": {name: full(param) for name, param in model.named_parameters() if "proj" in name},
    }


def test_mesh_with_the_shard_dimension_first_trains_like_one_with_the_replicate_dimension_first() -> None:
    usual = run_ranks(one_step, 4, ("replicate", "shard"))
    other = run_ranks(one_step, 4, ("shard", "replicate"))
    assert usual[0]["ranks"] == [0, 1, 2, 3]
    assert other[0]["ranks"] == [0, 2, 1, 3]
    for result in other:
        assert result["place"]
        for name, weight in result["weights"].items():
            torch.testing.assert_close(weight, usual[0]["weights"][name], rtol=1e-4, atol=1e-6)


def timeouts(rank: int, world: int) -> list[float]:
    dist.init_process_group("gloo", timeout=timedelta(hours=2))
    model = tiny_mlp()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    dmuon.dedicate_params(model, mesh["shard"], is_proj, replicate_mesh=mesh["replicate"])
    topology = require_runtime(model).topology
    groups = [topology.shard_group, topology.replicate_group]
    cpu = torch.device("cpu")
    return [group._get_backend(cpu).options._timeout.total_seconds() for group in groups if group is not None]


def test_groups_wait_as_long_as_the_user_told_the_default_group() -> None:
    for seconds in run_ranks(timeouts, 4, init=False):
        assert seconds == [7200.0] * 2


def with_a_group_of_some_ranks(rank: int, world: int, hsdp: bool, before: bool) -> str | None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    if not hsdp:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    replicate_mesh = mesh["replicate"] if hsdp else None
    if before:
        dist.new_group([0, 1, 2])
    try:
        dmuon.dedicate_params(tiny_mlp(), mesh["shard"], is_proj, replicate_mesh=replicate_mesh)
    except ConfigurationError as error:
        return str(error)
    dist.new_group([0, 1, 2])
    dmuon.dedicate_params(tiny_mlp(), mesh["shard"], is_proj, replicate_mesh=replicate_mesh)
    return None


@pytest.mark.parametrize("hsdp", [False, True])
def test_group_of_only_some_ranks_made_before_is_an_error_on_all(hsdp: bool) -> None:
    for message in run_ranks(with_a_group_of_some_ranks, 4, hsdp, True):
        assert message is not None
        assert "different numbers of process groups" in message


@pytest.mark.parametrize("hsdp", [False, True])
def test_group_of_only_some_ranks_made_afterwards_disturbs_no_further_model(hsdp: bool) -> None:
    assert run_ranks(with_a_group_of_some_ranks, 4, hsdp, False) == [None] * 4


def communicators(rank: int, world: int, hsdp: bool, policy: str) -> tuple[list[str], int]:
    """The groups that two models make, and how many groups torch knows that were not there before."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    if not hsdp:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    replicate_mesh = mesh["replicate"] if hsdp else None
    before = set(dist.distributed_c10d._world.pg_names)
    for _ in range(2):
        model = tiny_mlp()
        dmuon.dedicate_params(model, mesh["shard"], is_proj, replicate_mesh=replicate_mesh, process_group_policy=policy)
        assert require_runtime(model).topology.mesh == mesh
    made = set(dist.distributed_c10d._world.pg_names) - before
    return sorted(group.group_desc for group in made), live_clones()


@pytest.mark.parametrize(
    ("hsdp", "policy", "expected"),
    [
        (False, "isolated", ["dmuon_shard"]),
        (True, "isolated", ["dmuon_replicate", "dmuon_shard"]),
        (False, "shared", []),
        (True, "shared", []),
    ],
)
def test_owners_need_one_communicator_for_each_dimension_of_the_grid(
    hsdp: bool, policy: str, expected: list[str]
) -> None:
    assert run_ranks(communicators, 4, hsdp, policy) == [(expected, len(expected))] * 4


def collectives(rank: int, world: int) -> None:
    """Every collective of the grid, in both orders of the dimensions, against what all ranks have."""
    for names in (("replicate", "shard"), ("shard", "replicate")):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
        grid = topology_from_meshes(mesh["shard"], mesh["replicate"], policy="isolated").grid
        assert grid is not None and grid.ranks[grid.rank] == rank
        for op, expected in ((dist.ReduceOp.SUM, sum(range(world))), (dist.ReduceOp.MAX, world - 1)):
            value = torch.full((3,), float(rank))
            grid.all_reduce(value, op)
            assert value.tolist() == [expected] * 3
        assert grid.all_gather_object({"rank": rank}) == [{"rank": other} for other in grid.ranks]
        for source in range(world):
            value = torch.full((2,), rank)
            grid.broadcast(value, source)
            assert value.tolist() == [grid.ranks[source]] * 2
            assert grid.broadcast_object(f"rank {rank}", source) == f"rank {grid.ranks[source]}"


def test_collectives_of_the_grid_reach_all_ranks_in_flat_order() -> None:
    run_ranks(collectives, 4)
