"""Training goes on in another mode from the state dicts of any: owned, sharded and one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dmuon_hf.core as dmuon
from tests.distributed.sharded_training import MODES, ShardedRun, backward, prepare
from tests.distributed.training import HYPER, Run, batch_of, full, is_matrix, make_model
from tests.distributed.training import backward as owned_backward
from tests.distributed.training import prepare as prepare_owned
from tests.harness import models, run_ranks

RUN = Run("z3", "llama")
States = tuple[dict[str, Any], dict[str, Any]]


def build(mode: str, world: int) -> tuple[nn.Module, dmuon.Muon]:
    if mode == "owned":
        return prepare_owned(RUN, world)
    if mode == "one_process":
        model = make_model(RUN.model)
        return model, dmuon.Muon(model, predicate=is_matrix, **HYPER)
    return prepare(ShardedRun(mode, RUN))


def one_step(mode: str, model: nn.Module, optimizer: dmuon.Muon, step: int, rank: int, world: int) -> None:
    if mode == "owned":
        owned_backward(model, RUN, step, rank, world)
    elif mode == "one_process":
        models.loss_of(model, batch_of(RUN, step)).backward()
    else:
        backward(model, ShardedRun(mode, RUN), step, rank)
    optimizer.step()
    optimizer.zero_grad()


def leg(rank: int, world: int, mode: str, states: States | None, steps: range) -> States:
    """Load, unless it is the first leg; train; and what there is then, whole, on rank 0."""
    model, optimizer = build(mode, world)
    if states is not None:
        dmuon.set_model_state_dict(model, states[0])
        dmuon.set_optimizer_state_dict(model, optimizer, states[1])
    for step in steps:
        one_step(mode, model, optimizer, step, rank, world)
    return dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)


def test_training_goes_on_from_every_mode_in_every_other() -> None:
    states: States | None = None
    for step, (mode, world) in enumerate(
        [("owned", 4), ("hsdp", 4), ("one_process", 1), ("fsdp_tp", 4), ("owned", 2), ("z2", 2)]
    ):
        states = run_ranks(leg, world, mode, states, range(step, step + 1), init=mode != "one_process")[0]
    (expected,) = run_ranks(leg, 1, "one_process", None, range(6), init=False)
    assert states is not None
    assert states[1]["dedicated"].keys() == expected[1]["dedicated"].keys()
    assert [group["group_name"] for group in states[1]["param_groups"]] == ["default/muon", "default/adamw"]
    for name, want in expected[0].items():
        torch.testing.assert_close(states[0][name], want, rtol=1e-3, atol=1e-4)
    for name, entry in expected[1]["dedicated"].items():
        got, want = states[1]["dedicated"][name]["momentum_buffer"], entry["momentum_buffer"]
        assert (got - want).norm() < 2e-3 * want.norm(), name


def save_with_torch(rank: int, world: int, mode: str, path: str) -> None:
    model, optimizer = build(mode, world)
    for step in range(2):
        one_step(mode, model, optimizer, step, rank, world)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def load_with_torch(rank: int, world: int, mode: str, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = build(mode, world)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    names = {id(param): name for name, param in model.named_parameters()}
    momenta = {
        names[id(param)]: full(entry["momentum_buffer"])
        for param, entry in optimizer.state.items()
        if "momentum_buffer" in entry
    }
    return {name: full(param) for name, param in model.named_parameters()}, momenta


@pytest.mark.parametrize(("saved", "loaded"), [("hsdp", "z2"), ("owned", "hsdp"), ("z2", "owned")])
def test_torch_saves_and_loads_in_another_mode(saved: str, loaded: str, tmp_path: Path) -> None:
    worlds = {mode: 4 if mode == "owned" else MODES[mode].world for mode in (saved, loaded)}
    run_ranks(save_with_torch, worlds[saved], saved, str(tmp_path / "checkpoint"))
    weights, momenta = run_ranks(load_with_torch, worlds[loaded], loaded, str(tmp_path / "checkpoint"))[0]
    (expected,) = run_ranks(leg, 1, "one_process", None, range(2), init=False)
    for name, want in expected[0].items():
        torch.testing.assert_close(weights[name], want, rtol=1e-3, atol=1e-4)
    assert momenta.keys() == expected[1]["dedicated"].keys()
    for name, got in momenta.items():
        want = expected[1]["dedicated"][name]["momentum_buffer"]
        assert (got - want).norm() < 2e-3 * want.norm(), name
