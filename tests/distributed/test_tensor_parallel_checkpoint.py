"""Training with owned tensor-parallel parts goes on in other modes, and the other way round."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import dmuon_hf.core as dmuon
from tests.distributed.sharded_training import ShardedRun
from tests.distributed.sharded_training import backward as sharded_backward
from tests.distributed.sharded_training import prepare as prepare_sharded
from tests.distributed.tp_training import TpRun, backward, prepare, snapshot, world_of
from tests.distributed.training import HYPER, Run, batch_of, is_matrix, make_model
from tests.harness import models, run_ranks

RUN = Run("tp", "llama")
States = tuple[dict[str, Any], dict[str, Any]]


def world_for(mode: str) -> int:
    return {"one_process": 1, "sharded": 4}.get(mode) or world_of(mode)


def build(mode: str) -> tuple[nn.Module, dmuon.Muon]:
    if mode == "one_process":
        model = make_model(RUN.model)
        dmuon.dedicate_params(model, None, is_matrix)
        return model, dmuon.Muon(model, **HYPER)
    return prepare_sharded(ShardedRun("fsdp_tp", RUN)) if mode == "sharded" else prepare(TpRun(mode, RUN))


def train(mode: str, model: nn.Module, optimizer: dmuon.Muon, rank: int, steps: range) -> None:
    for step in steps:
        if mode == "one_process":
            models.loss_of(model, batch_of(RUN, step)).backward()
        elif mode == "sharded":
            sharded_backward(model, ShardedRun("fsdp_tp", RUN), step, rank)
        else:
            backward(model, TpRun(mode, RUN), step, rank)
        optimizer.step()
        optimizer.zero_grad()


def leg(rank: int, world: int, mode: str, states: States | None, steps: range) -> States:
    """Load, unless it is the first leg; train; and what there is then, whole, on rank 0."""
    model, optimizer = build(mode)
    if states is not None:
        dmuon.set_model_state_dict(model, states[0])
        dmuon.set_optimizer_state_dict(model, optimizer, states[1])
    train(mode, model, optimizer, rank, steps)
    return dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)


@cache
def uninterrupted(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    weights, state = run_ranks(leg, 1, "one_process", None, range(steps), init=False)[0]
    return weights, {name: entry["momentum_buffer"] for name, entry in state["dedicated"].items()}


def assert_close(got: tuple[dict[str, Any], dict[str, Any]], want: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert (mine[name].double() - value.double()).norm() < 2e-3 * value.double().norm(), name


def test_whole_state_dicts_carry_training_between_modes() -> None:
    states: States | None = None
    modes = ["hsdp_tp", "one_process", "ddp_tp", "tp", "ddp_tp", "shard_tp", "sharded", "shard_tp"]
    for step, mode in enumerate(modes):
        one_leg = (mode, states, range(step, step + 1))
        states = run_ranks(leg, world_for(mode), *one_leg, init=mode != "one_process")[0]
    assert states is not None
    momenta = {name: entry["momentum_buffer"] for name, entry in states[1]["dedicated"].items()}
    assert_close((states[0], momenta), uninterrupted(len(modes)))


def save(rank: int, world: int, mode: str, path: str, full: bool) -> None:
    model, optimizer = build(mode)
    train(mode, model, optimizer, rank, range(2))
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=full, cpu_offload=full))
    if not full:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    elif rank == 0:
        torch.save({"model": weights, "optimizer": state}, path)


def load_and_go_on(rank: int, world: int, mode: str, path: str, full: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = build(mode)
    options = StateDictOptions(full_state_dict=full)
    if full:
        found = torch.load(path)
    else:
        weights, state = get_state_dict(model, optimizer)
        found = {"model": weights, "optimizer": state}
        dcp.load(found, checkpoint_id=path, no_dist=mode == "one_process")
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=options
    )
    train(mode, model, optimizer, rank, range(2, 3))
    return snapshot(model, optimizer, "weights"), snapshot(model, optimizer, "momenta")


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("hsdp_tp", "one_process"),
        ("one_process", "shard_tp"),
        ("shard_tp", "tp"),
        ("tp", "hsdp_tp"),
        ("ddp_tp", "one_process"),
        ("one_process", "ddp_tp"),
    ],
)
def test_checkpoints_of_torch_carry_training_between_modes(saved: str, loaded: str, full: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(save, world_for(saved), saved, path, full, init=saved != "one_process")
    got = run_ranks(load_and_go_on, world_for(loaded), loaded, path, full, init=loaded != "one_process")
    for result in got:
        assert_close(result, uninterrupted(3))
