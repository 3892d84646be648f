"""An argument that would change nothing in the chosen mode is refused, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon_hf.core as dmuon
from tests.harness import run_ranks
from tests.harness.models import tiny_mlp


def is_proj(name: str, param: nn.Parameter) -> bool:
    return "proj" in name


def one_group(name: str, param: nn.Parameter) -> int:
    return 0


def any_module(module: nn.Module) -> bool:
    return True


def owner_module(name: str, param: nn.Parameter) -> nn.Module:
    return tiny_mlp()


IN_ONE_PROCESS: dict[str, Any] = {
    "compute_dtype": torch.bfloat16,
    "reshard_after_forward": False,
    "assignment_group_key_fn": one_group,
    "max_owners_per_group": 1,
    "owner_strategy": "lpt",
    "owner_cost_model": "numel",
    "pack_small_params": False,
    "process_group_policy": "shared",
    "master_dtype": torch.float64,
    "source_rank": 0,
    "hsdp_column_balance": True,
    "delay_stage2_to_optimizer": False,
    "hook_boundary_strict": False,
}


@pytest.mark.parametrize(("name", "value"), IN_ONE_PROCESS.items())
def test_argument_about_several_ranks_is_refused_in_one_process(name: str, value: Any) -> None:
    with pytest.raises(dmuon.ConfigurationError, match=rf"{name}=.* has no effect"):
        dmuon.dedicate_params(tiny_mlp(), None, is_proj, **{name: value})


ON_A_1D_MESH: list[tuple[dict[str, Any], str, str]] = [
    ({"hsdp_column_balance": False}, "hsdp_column_balance", "without replicate_mesh"),
    ({"delay_stage2_to_optimizer": False}, "delay_stage2_to_optimizer", "without replicate_mesh"),
    ({"owner_strategy": "rank0", "assignment_group_key_fn": one_group}, "assignment_group_key_fn", "'rank0'"),
    ({"owner_strategy": "rank0", "max_owners_per_group": 1}, "max_owners_per_group", "'rank0'"),
    ({"owner_strategy": "rank0", "pack_small_params": True}, "pack_small_params", "'rank0'"),
    ({"hook_boundary_strict": False}, "hook_boundary_strict", "without hook_boundary_predicate"),
    (
        {
            "hook_boundary_predicate": any_module,
            "hook_boundary_resolver": owner_module,
            "hook_boundary_strict": False,
        },
        "hook_boundary_strict",
        "beside hook_boundary_resolver",
    ),
]
UNDER_HSDP: list[tuple[dict[str, Any], str, str]] = [
    ({"owner_strategy": "round_robin", "hsdp_column_balance": True}, "hsdp_column_balance", "'round_robin'"),
    ({"owner_strategy": "rank0", "hsdp_column_balance": True}, "hsdp_column_balance", "'rank0'"),
]


def refused(call: Callable[[], Any], argument: str, circumstance: str) -> None:
    with pytest.raises(dmuon.ConfigurationError) as error:
        call()
    message = str(error.value)
    assert f"{argument}=" in message and "has no effect" in message and circumstance in message, message


def refusals_on_meshes(rank: int, world: int) -> None:
    grid = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    mesh = init_device_mesh("cpu", (world,))
    for arguments, argument, circumstance in ON_A_1D_MESH:
        refused(
            lambda given=arguments: dmuon.dedicate_params(tiny_mlp(), mesh, is_proj, **given), argument, circumstance
        )
    for arguments, argument, circumstance in UNDER_HSDP:
        given = {"replicate_mesh": grid["replicate"], **arguments}
        refused(
            lambda given=given: dmuon.dedicate_params(tiny_mlp(), grid["shard"], is_proj, **given),
            argument,
            circumstance,
        )
    model = tiny_mlp()
    dmuon.dedicate_params(model, mesh, is_proj)
    refused(lambda: dmuon.Muon(model, replicate_async=False), "replicate_async", "with one replica")


def test_argument_that_the_mode_or_another_argument_makes_idle_is_refused() -> None:
    run_ranks(refusals_on_meshes, 2)


@pytest.mark.parametrize(
    ("arguments", "circumstance"),
    [
        ({"replicate_async": False}, "with one replica"),
        ({"forward_prefetch_depth": 2}, "in one process"),
        ({"first_step_progress_log": False, "first_step_progress_log_limit": 3}, "first_step_progress_log=False"),
    ],
)
def test_optimizer_argument_without_effect_is_refused(arguments: dict[str, Any], circumstance: str) -> None:
    model = tiny_mlp()
    dmuon.dedicate_params(model, None, is_proj)
    with pytest.raises(dmuon.ConfigurationError, match=f"has no effect .*{circumstance}"):
        dmuon.Muon(model, **arguments)


@pytest.mark.parametrize("argument", ["use_reduce_stream", "coalesce_wait"])
def test_way_to_wait_for_gradients_that_are_final_already_is_refused(argument: str) -> None:
    model = tiny_mlp()
    dmuon.dedicate_params(model, None, is_proj)
    dmuon.prepare_muon_grads(model, use_reduce_stream=False, coalesce_wait=False)
    with pytest.raises(dmuon.ConfigurationError, match=f"{argument}=True.* final when backward"):
        dmuon.prepare_muon_grads(model, **{argument: True})
