"""``muon_forward_unshard="all_gather"``: weights become whole from even shards, which owners fill after each update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dmuon_hf.core as dmuon
from tests.distributed.training import Run, assert_same_training, backward, muon_for_matrices, prepare, reference, train
from tests.harness import run_ranks
from tests.harness.comm import CollectiveCounter

SHARDS: dict[str, Any] = {"muon_forward_unshard": "all_gather"}
MESHES = [("z2", 2), ("z3", 3), ("z3", 4), ("hsdp", 4), ("hsdp_sync", 4)]


@pytest.mark.parametrize("model", ["uneven", "llama"])
@pytest.mark.parametrize(("mode", "world"), MESHES)
def test_weights_gathered_from_shards_train_like_one_process(mode: str, world: int, model: str) -> None:
    run = Run(mode, model, steps=3, accumulate=2 if world != 3 else 1, dedicate=SHARDS)
    expected = reference(run)
    for result in run_ranks(train, world, run):
        assert_same_training(run, result, expected, rtol=1e-3)


@pytest.mark.parametrize(("mode", "world"), [("z3", 2), ("hsdp", 4)])
def test_shards_beside_managed_adamw_and_gathers_ahead_train_like_one_process(mode: str, world: int) -> None:
    options = {**SHARDS, "param_policy_fn": muon_for_matrices}
    run = Run(mode, "uneven", pure=True, steps=3, dedicate=options, muon={"post_step_prefetch_groups": 2})
    expected = reference(run)
    for result in run_ranks(train, world, run):
        assert_same_training(run, result, expected, rtol=1e-3)


def count(rank: int, world: int, run: Run) -> dict[str, Any]:
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    optimizer.step()
    optimizer.zero_grad()
    with CollectiveCounter() as counter, counter.phase("step"):
        backward(model, run, 1, rank, world)
        optimizer.step()
    units = optimizer.runtime.units
    kinds = [record.kind for record in counter.select(tag="dmuon_shard")]
    return {
        "gathers": sum("gather" in kind for kind in kinds),
        "broadcasts": sum(kind == "broadcast" for kind in kinds),
        "units": len(units),
        "shards": sum(unit.weights.placement._arrived.numel() for unit in units),
        "padded": sum(unit.weights.buffer.numel() for unit in units),
    }


@pytest.mark.parametrize(("mode", "world", "gathers"), [("z2", 2, 1), ("z3", 2, 2), ("hsdp", 4, 2)])
def test_forward_is_one_all_gather_per_unit_of_shards_of_one_size(mode: str, world: int, gathers: int) -> None:
    results = run_ranks(count, world, Run(mode, "llama", dedicate=SHARDS))
    shard_size = world if mode != "hsdp" else 2
    for result in results:
        assert result["gathers"] == gathers * result["units"]
        assert result["broadcasts"] == 0
        assert result["shards"] == result["padded"] // shard_size


def state_of(rank: int, world: int, unshard: str) -> dict[str, Any]:
    run = Run("z3", "mlp", dedicate={"muon_forward_unshard": unshard})
    model, optimizer = prepare(run, world)
    for step in range(2):
        backward(model, run, step, rank, world)
        optimizer.step()
        optimizer.zero_grad()
    state = {n: torch.zeros_like(v) for n, v in dmuon.get_model_state_dict(model, rank0_only=False).items()}
    momentum = dmuon.get_optimizer_state_dict(model, optimizer, rank0_only=False)["dedicated"]
    dmuon.set_model_state_dict(model, state)
    return {"momentum": momentum, "loss": backward(model, run, 2, rank, world)}


def test_state_is_that_of_the_broadcast_and_loaded_weights_reach_the_shards() -> None:
    plain = run_ranks(state_of, 2, "broadcast")
    for result, want in zip(run_ranks(state_of, 2, "all_gather"), plain, strict=True):
        assert result["loss"] == 0.0
        for name, entry in want["momentum"].items():
            torch.testing.assert_close(result["momentum"][name]["momentum_buffer"], entry["momentum_buffer"])
