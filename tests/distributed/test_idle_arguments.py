"""One script runs on every mesh: arguments of the reference are taken where they change nothing, ours are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from tests.distributed.optim_setup import whole_weights
from tests.harness import run_ranks
from tests.harness.models import dense_batch, rank_part, tiny_mlp


def is_proj(name: str, param: nn.Parameter) -> bool:
    return "proj" in name


def one_group(name: str, param: nn.Parameter) -> int:
    return 0


def any_module(module: nn.Module) -> bool:
    return True


SET_UP: list[dict[str, Any]] = [
    {"compute_dtype": torch.float32, "reshard_after_forward": False, "delay_stage2_to_optimizer": False},
    {"owner_strategy": "lpt", "owner_cost_model": "numel", "pack_small_params": False, "hsdp_column_balance": False},
    {"owner_strategy": "round_robin", "hsdp_column_balance": True, "pack_small_params": True},
    {
        "owner_strategy": "rank0",
        "hsdp_column_balance": True,
        "assignment_group_key_fn": one_group,
        "max_owners_per_group": 1,
        "pack_small_params": True,
    },
    {"process_group_policy": "shared", "hook_boundary_strict": False},
    {"process_group_policy": "isolated", "hook_boundary_predicate": any_module, "hook_boundary_strict": False},
    {"muon_forward_unshard": "broadcast", "tp_buffer_reuse": False, "replicate_broadcast_bucket_mb": 0.0},
]
OPTIMIZER: list[dict[str, Any]] = [
    {"replicate_async": False, "group_prepare_ahead": False, "forward_prefetch_depth": 2},
    {"replicate_async": True, "first_step_progress_log": False, "first_step_progress_log_limit": 3},
]
CALLS = [{"use_reduce_stream": stream, "coalesce_wait": wait} for stream in (False, True) for wait in (False, True)]
MESHES = {"one process": 1, "1-d": 2, "hsdp": 4}


def trained(mesh: str, set_up: dict[str, Any], optimizer: dict[str, Any], call: dict[str, bool]) -> dict[str, Tensor]:
    """Weights after two steps of one and the same script."""
    model = tiny_mlp()
    if mesh == "one process":
        dmuon.dedicate_params(model, None, is_proj, **set_up)
    elif mesh == "1-d":
        grid = init_device_mesh("cpu", (2,))
        dmuon.dedicate_params(model, grid, is_proj, **set_up)
        fully_shard(model, mesh=grid)
    else:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(model, grid["shard"], is_proj, replicate_mesh=grid["replicate"], **set_up)
        fully_shard(model, mesh=grid)
    muon = dmuon.Muon(model, **optimizer)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in range(2):
        muon.zero_grad()
        model(rank_part(dense_batch(step, batch=8), rank, world)).backward()
        dmuon.prepare_muon_grads(model, **call)
        muon.step()
    return whole_weights(model)


def scripts(rank: int, world: int, mesh: str) -> None:
    expected = trained("one process", {}, {}, {}) if world == 1 else trained(mesh, {}, {}, {})
    for i in range(max(len(SET_UP), len(OPTIMIZER), len(CALLS))):
        found = trained(mesh, SET_UP[i % len(SET_UP)], OPTIMIZER[i % len(OPTIMIZER)], CALLS[i % len(CALLS)])
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=f"{i} {name}")


@pytest.mark.parametrize("mesh", MESHES)
def test_documented_arguments_are_taken_and_train_alike_on_every_mesh(mesh: str) -> None:
    if mesh == "one process":
        scripts(0, 1, mesh)
    else:
        run_ranks(scripts, MESHES[mesh], mesh)


@pytest.mark.parametrize(("name", "value"), {"master_dtype": torch.float64, "source_rank": 0}.items())
def test_argument_of_ours_about_several_ranks_is_refused_in_one_process(name: str, value: Any) -> None:
    with pytest.raises(dmuon.ConfigurationError, match=rf"{name}=.* has no effect in one process"):
        dmuon.dedicate_params(tiny_mlp(), None, is_proj, **{name: value})


@pytest.mark.parametrize(
    "arguments",
    [
        {"process_group_policy": "mine"},
        {"owner_strategy": "best"},
        {"owner_cost_model": "free"},
        {"max_owners_per_group": 0},
    ],
    ids=str,
)
def test_value_that_is_not_documented_is_refused_in_one_process_too(arguments: dict[str, Any]) -> None:
    (name, value) = next(iter(arguments.items()))
    with pytest.raises(dmuon.ConfigurationError, match=rf"{name}.*{value!r}"):
        dmuon.dedicate_params(tiny_mlp(), None, is_proj, **arguments)
