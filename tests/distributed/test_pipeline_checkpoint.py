"""Checkpoints of pipeline stages: one for all of them, which continues, also in one process; or one of each."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import dmuon_hf.core as dmuon
from tests.distributed.pipeline_setup import (
    HYPER,
    STAGES,
    Run,
    feed,
    is_matrix,
    pipeline_mesh,
    prepare,
    schedule_of,
    stages_of,
    whole,
    whole_model,
    wrap,
)
from tests.harness import run_ranks

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _state(model, optimizer):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }


def _load(model, optimizer, directory, **options):
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=directory, **options)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)


@pytest.mark.parametrize("mode", ["z3", "replicate", "sharded"])
def test_checkpoint_of_all_stages_continues_as_the_uninterrupted_run(mode, tmp_path):
    for straight, resumed in run_ranks(_interrupted, 4, Run(mode), str(tmp_path)):
        assert straight.keys() == resumed.keys()
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def _interrupted(rank, world, run, directory):
    mesh = pipeline_mesh()
    model, schedule, optimizer = _start(run, mesh)
    _steps(model, schedule, optimizer, mesh, range(2))
    dcp.save(_state(model, optimizer), checkpoint_id=directory)
    straight = _steps(model, schedule, optimizer, mesh, range(2, 4))
    other, fresh_schedule, fresh = _start(run, mesh, seed=5)
    _load(other, fresh, directory)
    return straight, _steps(other, fresh_schedule, fresh, mesh, range(2, 4))


def _start(run, mesh, seed=0):
    model, wrapped, optimizer = prepare(run, mesh, stages_of(whole_model(seed), STAGES))
    return model, schedule_of(run, mesh, wrapped), optimizer


def _steps(model, schedule, optimizer, mesh, steps):
    for step in steps:
        feed(schedule, mesh, step)
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(param) for name, param in model.named_parameters()}


def test_checkpoint_of_all_stages_loads_in_one_process(tmp_path):
    stages = run_ranks(_saved, 4, str(tmp_path))
    (loaded,) = run_ranks(_one_process, 1, str(tmp_path), init=False)
    saved = {key: value for stage in stages for key, value in stage.items()}
    assert saved.keys() == loaded.keys()
    for key, value in saved.items():
        torch.testing.assert_close(loaded[key], value, rtol=0, atol=0)


def _saved(rank, world, directory):
    mesh = pipeline_mesh()
    model, schedule, optimizer = _start(Run("z3"), mesh)
    _steps(model, schedule, optimizer, mesh, range(1))
    dcp.save(_state(model, optimizer), checkpoint_id=directory)
    return _values(model, optimizer)


def _one_process(rank, world, directory):
    model = whole_model(5)
    dmuon.dedicate_params(model, None, is_matrix)
    optimizer = dmuon.Muon(model, **HYPER)
    _load(model, optimizer, directory, no_dist=True)
    return _values(model, optimizer)


def _values(model, optimizer):
    """Weights, momentum and moments by name, whole."""
    return {
        (name, key): whole(value)
        for name, param in model.named_parameters()
        for key, value in {"weight": param, **optimizer.state[param]}.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("mode", ["z3", "sharded"])
def test_whole_state_of_a_stage_is_of_its_own_ranks(mode):
    """The second stage comes to it when the first has long been through: neither waits for the other."""
    names = run_ranks(_whole_states, 4, mode)
    assert all(name.startswith(("layers.0", "layers.1")) for name in names[0])
    assert any(name.startswith("layers.3") for name in names[2])
    assert names[1] == names[3] == []


def _whole_states(rank, world, mode):
    mesh = pipeline_mesh()
    store = torch.distributed.distributed_c10d._get_default_store()
    model = stages_of(whole_model(), STAGES)[mesh.get_local_rank("pp")]
    wrap(model, [model], mesh, mode)
    optimizer = dmuon.Muon(model, **({"predicate": is_matrix} if mode == "sharded" else {}))
    if rank >= 2:
        store.wait(["first stage/0", "first stage/1"])
    state, steps = dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)
    dmuon.set_model_state_dict(model, state)
    dmuon.set_optimizer_state_dict(model, optimizer, steps)
    store.set(f"first stage/{rank}", "done")
    return list(state)
