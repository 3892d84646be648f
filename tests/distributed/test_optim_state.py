"""Optimizer state on several ranks: layout, round trips through torch's state dict functions, and rebinding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import ConfigurationError
from tests.distributed.optim_setup import (
    MODES,
    assert_close,
    dedicate,
    is_muon,
    reference_weights,
    shard_rest,
    sharded_mlp,
    spec_of,
    train,
    whole,
    whole_weights,
)
from tests.harness import run_ranks
from tests.harness.models import dense_batch, tiny_mlp

OPTIONS: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.1, "adamw_lr": 0.01}
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": whole(value)
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def _layout(rank: int, world: int) -> None:
    model = sharded_mlp("hsdp")
    optimizer = dmuon.Muon(model, **OPTIONS)
    for name, matrix in optimizer.runtime.dedicated.items():
        momentum = optimizer.state[matrix.param]["momentum_buffer"]
        assert isinstance(momentum, dmuon.OwnedTensor)
        assert momentum.shape == matrix.shape
        assert momentum.to_local().shape == (matrix.shape if matrix.is_owner else (0, matrix.shape[1])), name
    assert set(optimizer.state) == set(model.parameters())


def test_state_has_the_layout_of_its_parameter_on_every_rank() -> None:
    run_ranks(_layout, 4)


def _accelerate_round_trip(rank: int, world: int, mode: str) -> None:
    model = sharded_mlp(mode)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, [0, 1])
    device = torch.device("cpu")
    moved = {
        "state": {
            key: {name: value.to(device) for name, value in entry.items()}
            for key, entry in optimizer.state_dict()["state"].items()
        },
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    optimizer.load_state_dict(moved)
    train(model, optimizer, [2, 3])
    assert_close(whole_weights(model), reference_weights(range(4), **OPTIONS))


@pytest.mark.parametrize("mode", ["fsdp", "hsdp"])
def test_state_dict_moved_and_loaded_again_changes_nothing(mode: str) -> None:
    run_ranks(_accelerate_round_trip, MODES[mode], mode)


def _save_full(rank: int, world: int, mode: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model = sharded_mlp(mode)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(steps))
    weights = get_model_state_dict(model, options=FULL)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    return (copy.deepcopy(weights), copy.deepcopy(state)) if rank == 0 else ({}, {})


def _resume_full(
    rank: int, world: int, mode: str, weights: dict[str, Any], state: dict[str, Any], broadcast: bool
) -> dict[str, Tensor]:
    model = sharded_mlp(mode)
    optimizer = dmuon.Muon(model, lr=9.0, adamw_lr=9.0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    mine = rank == 0 or not broadcast
    set_model_state_dict(model, weights if mine else {}, options=options)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(state) if mine else {}, options=options)
    train(model, optimizer, [2, 3])
    return whole_weights(model)


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize(("source", "target"), [("hsdp", "fsdp"), ("fsdp", "hsdp")])
def test_full_state_dict_resumes_on_another_topology(source: str, target: str, broadcast: bool) -> None:
    weights, state = run_ranks(_save_full, MODES[source], source, 2)[0]
    resumed = run_ranks(_resume_full, MODES[target], target, weights, state, broadcast)
    for result in resumed:
        assert_close(result, reference_weights(range(4), **OPTIONS))


def test_full_state_dict_of_many_ranks_resumes_in_one_process() -> None:
    weights, state = run_ranks(_save_full, 4, "hsdp", 2)[0]
    model = tiny_mlp()
    dmuon.dedicate_params(model, None, predicate=is_muon, matrix_spec_fn=spec_of)
    optimizer = dmuon.Muon(model)
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, state)
    for step in (2, 3):
        optimizer.zero_grad()
        model(dense_batch(step, batch=12)).backward()
        optimizer.step()
    assert_close(whole_weights(model), reference_weights(range(4), **OPTIONS))


def _sharded_files(rank: int, world: int, mode: str, path: str, save: bool) -> dict[str, Tensor]:
    model = sharded_mlp(mode)
    optimizer = dmuon.Muon(model, **OPTIONS)
    if save:
        train(model, optimizer, [0, 1])
    content = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if save:
        dcp.save(content, checkpoint_id=path)
    else:
        dcp.load(content, checkpoint_id=path)
        set_model_state_dict(model, content["model"])
        set_optimizer_state_dict(model, optimizer, content["optimizer"])
        train(model, optimizer, [2, 3])
        assert_close(whole_weights(model), reference_weights(range(4), **OPTIONS))
    return whole_state(model, optimizer)


@pytest.mark.parametrize(("source", "target"), [("hsdp", "fsdp"), ("fsdp", "fsdp3")])
def test_sharded_checkpoint_resumes_on_another_topology(tmp_path: Path, source: str, target: str) -> None:
    run_ranks(_sharded_files, MODES[source], source, str(tmp_path), True)
    run_ranks(_sharded_files, MODES[target], target, str(tmp_path), False)


def _fresh_state_dict(rank: int, world: int) -> None:
    model = sharded_mlp("hsdp")
    optimizer = dmuon.Muon(model, lr=0.5, weight_decay=0.5, adamw_lr=0.5)
    before = whole_weights(model)
    get_optimizer_state_dict(model, optimizer, options=FULL)
    assert_equal(before, whole_weights(model))
    train(model, optimizer, [0])


def test_reading_the_state_of_a_fresh_optimizer_moves_no_weight() -> None:
    run_ranks(_fresh_state_dict, 4)


def _plain_momentum(rank: int, world: int) -> None:
    model = sharded_mlp("fsdp")
    optimizer = dmuon.Muon(model, **OPTIONS)
    saved = optimizer.state_dict()
    saved["state"] = {
        index: {key: whole(value) for key, value in entry.items()} for index, entry in saved["state"].items()
    }
    with pytest.raises(ConfigurationError, match=r"is a plain tensor, here it is a (matrix owned by rank|DTensor)"):
        optimizer.load_state_dict(saved)


def test_whole_state_for_a_distributed_parameter_is_refused() -> None:
    run_ranks(_plain_momentum, 2)


def _rebind(rank: int, world: int, mode: str) -> None:
    model = tiny_mlp()
    mesh = dedicate(model, mode)
    groups = [
        {"params": [p for n, p in model.named_parameters() if "layers.0." in n], "group_name": "first", "lr": 0.03},
        {
            "params": [p for n, p in model.named_parameters() if "layers.0." not in n],
            "group_name": "rest",
            "muon_lr": 0.03,
            "adamw_lr": 0.03,
        },
    ]
    optimizer = dmuon.Muon(model, weight_decay=0.1, param_groups=groups, defer_state=True)
    shard_rest(model, mesh)
    with pytest.raises(ConfigurationError, match="no longer in the model"):
        optimizer.step()
    optimizer.rebind(model)
    train(model, optimizer, range(3))
    expected = reference_weights(range(3), lr=0.03, adamw_lr=0.03, weight_decay=0.1)
    assert_close(whole_weights(model), expected)


@pytest.mark.parametrize("mode", ["fsdp", "hsdp"])
def test_optimizer_built_before_sharding_follows_by_name(mode: str) -> None:
    run_ranks(_rebind, MODES[mode], mode)
