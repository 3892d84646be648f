"""Timings of the phases of a step and of the gathers of forward, the fence, and gathers at the end of a step."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime.states import WeightState
from tests.distributed.training import (
    Run,
    assert_same_training,
    backward,
    prepare,
    reference,
    second_backward_of_zeroed,
    snapshot,
    train,
)
from tests.harness import run_ranks
from tests.harness.comm import CollectiveCounter

PHASES = {"prepare_ms", "agreement_ms", "muon_ms", "adamw_ms", "publish_ms", "total_ms"}


def profiled(rank: int, world: int, mode: str, record: bool) -> list[dict[str, float] | None]:
    run = Run(mode, "mlp", muon={"record_step_profile": record})
    model, optimizer = prepare(run, world)
    found = [optimizer.consume_last_step_profile()]
    for step in range(2):
        backward(model, run, step, rank, world)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, optimizer.consume_last_step_profile(), optimizer.consume_last_step_profile()]


@pytest.mark.parametrize(("mode", "world"), [("local", 1), ("z3", 2), ("hsdp_sync", 4)])
def test_profile_of_the_last_step_is_given_once_and_adds_up(mode: str, world: int) -> None:
    for before, profile, again in run_ranks(profiled, world, mode, True, init=mode != "local"):
        assert before is None
        assert again is None
        assert profile.keys() == PHASES
        assert all(value >= 0.0 for value in profile.values())
        assert profile["muon_ms"] > 0.0
        assert sum(value for name, value in profile.items() if name != "total_ms") <= profile["total_ms"] * (1 + 1e-9)


def test_profile_that_was_not_asked_for_is_none() -> None:
    assert run_ranks(profiled, 1, "local", False, init=False) == [[None, None, None]]


def gathers(rank: int, world: int, enabled: bool) -> list[dict[str, Any]]:
    os.environ["DMUON_RECORD_FORWARD_PROFILE"] = str(int(enabled))
    run = Run("z3", "mlp")
    model, _ = prepare(run, world)
    for step in range(2):
        backward(model, run, step, rank, world)
    kept = dmuon.collect_forward_unshard_profile(model, clear=False, synchronize=True)
    taken = dmuon.collect_forward_unshard_profile(model)
    return [kept, taken, dmuon.collect_forward_unshard_profile(model), dmuon.summarize_comm_plan(model)]


def test_gathers_of_forward_are_counted_by_unit_without_those_of_backward() -> None:
    for kept, taken, after, plan in run_ranks(gathers, 2, True):
        assert kept == taken
        assert kept["enabled"]
        assert kept["groups"].keys() == {group["name"] for group in plan["groups"]}
        assert kept["gathers"] == kept["waits"] == 2 * len(plan["groups"])
        assert kept["bytes"] == 2 * plan["gather_bytes"]
        assert kept["gather_ms"] >= kept["wait_ms"] > 0.0
        assert kept["gathers"] == sum(group["gathers"] for group in kept["groups"].values())
        assert (after["gathers"], after["groups"]) == (0, {})


def test_gathers_are_not_recorded_unless_the_environment_asks() -> None:
    for kept, *_ in run_ranks(gathers, 2, False):
        assert not kept["enabled"]
        assert (kept["gathers"], kept["groups"]) == (0, {})


def fenced(rank: int, world: int, mode: str, policy: str, enabled: bool) -> dict[str, Any]:
    os.environ["DMUON_ISOLATED_PG_BARRIER"] = str(int(enabled))
    run = Run(mode, "mlp", dedicate={"process_group_policy": policy})
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    with CollectiveCounter() as counter:
        optimizer.step()
        calls = len(counter.select("all_reduce"))
    pending = [unit.weights.placement._column for unit in optimizer.runtime.units]
    in_flight = any(column is not None and column.in_flight for column in pending)
    return {"calls": calls, "in_flight": in_flight, "weights": snapshot(model)}


@pytest.mark.parametrize(("policy", "extra"), [("isolated", 1), ("shared", 0)])
def test_fence_waits_for_the_publish_and_meets_on_groups_of_its_own_alone(policy: str, extra: int) -> None:
    plain = run_ranks(fenced, 4, "hsdp", policy, False)
    for without, fence in zip(plain, run_ranks(fenced, 4, "hsdp", policy, True), strict=True):
        assert without["in_flight"]
        assert not fence["in_flight"]
        # One over the shard group and one over the replicate group.
        assert fence["calls"] - without["calls"] == 2 * extra
        assert all(torch.equal(fence["weights"][name], weight) for name, weight in without["weights"].items())


def ahead(rank: int, world: int, mode: str, count: int) -> dict[str, Any]:
    run = Run(mode, "mlp", muon={"post_step_prefetch_groups": count})
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    with CollectiveCounter() as counter:
        with counter.phase("step"):
            optimizer.step()
        optimizer.zero_grad()
        states = [unit.weights.state is not WeightState.SHARDED for unit in optimizer.runtime.units]
        with counter.phase("next"):
            backward(model, run, 1, rank, world)
        shard = {phase: len(counter.select("broadcast", tag="dmuon_shard", phase=phase)) for phase in ("step", "next")}
    return {"states": states, "calls": shard}


@pytest.mark.parametrize(("mode", "world"), [("z3", 2), ("z2", 2), ("hsdp", 4)])
def test_first_units_of_the_next_forward_are_gathered_at_the_end_of_the_step_and_no_more_often(
    mode: str, world: int
) -> None:
    plain = run_ranks(ahead, world, mode, 0)
    for without, result in zip(plain, run_ranks(ahead, world, mode, 2), strict=True):
        assert without["states"] == [False] * 3
        assert result["states"] == [True, True, False]
        assert without["calls"]["step"] == 0 < result["calls"]["step"]
        assert sum(result["calls"].values()) == sum(without["calls"].values())


@pytest.mark.parametrize(("mode", "world"), [("z2", 2), ("z3", 4), ("hsdp", 4)])
def test_gathers_at_the_end_of_a_step_change_no_weight(mode: str, world: int) -> None:
    run = Run(mode, "uneven", steps=3, accumulate=2, muon={"post_step_prefetch_groups": 9, "forward_prefetch_depth": 0})
    expected = reference(run)
    for result in run_ranks(train, world, run):
        assert_same_training(run, result, expected)


def edits(rank: int, world: int) -> list[float]:
    """A weight that is loaded after the gathers were issued is the one that forward uses."""
    run = Run("z3", "mlp", muon={"post_step_prefetch_groups": 3})
    return [second_backward_of_zeroed(run, rank, world)]


def test_weights_that_were_loaded_since_are_gathered_again() -> None:
    assert run_ranks(edits, 2) == [[0.0], [0.0]]
