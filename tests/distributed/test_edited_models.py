"""Models that are edited after ``dedicate_params``: one table of edits, with one outcome in every mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.utils import prune

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import ConfigurationError
from tests.distributed import training
from tests.harness import run_ranks
from tests.harness.models import GatedBlock, TinyMLP

MODES = {"local": 1, "z2": 2, "z3": 2, "hsdp": 4}


def _swap(model: TinyMLP) -> None:
    model.layers[1].up_proj = nn.Linear(16, 32, bias=False)


def _swap_block(model: TinyMLP) -> None:
    model.layers[1] = GatedBlock(16, 32)


def _new_parameter(model: TinyMLP) -> None:
    model.layers[1].up_proj.weight = nn.Parameter(torch.randn(32, 16))


def _resize(model: TinyMLP) -> None:
    model.layers[1].up_proj.weight = nn.Parameter(torch.randn(40, 16))


def _merge(model: TinyMLP) -> None:
    fused = torch.randn(64, 16)
    del model.layers[1].up_proj.weight
    model.layers[1].up_proj.weight = fused[:32]


def _parametrise(model: TinyMLP) -> None:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    nn.utils.parametrize.register_parametrization(model.layers[1].up_proj, "weight", Double(), unsafe=True)


def _tie(model: TinyMLP) -> None:
    model.layers[1].up_proj.weight = model.layers[0].up_proj.weight


def _prune(model: TinyMLP) -> None:
    prune.identity(model.layers[1].up_proj, "weight")


EDITS: dict[str, Callable[[TinyMLP], None]] = {
    "swapped module": _swap,
    "swapped block": _swap_block,
    "new parameter": _new_parameter,
    "other shape": _resize,
    "view of a fused weight": _merge,
    "parametrised": _parametrise,
    "pruned": _prune,
    "tied": _tie,
}


def _run(mode: str) -> training.Run:
    return training.Run(mode, model="mlp")


@pytest.mark.parametrize("mode", MODES)
def test_edits_before_the_optimizer_are_refused_by_name(mode: str) -> None:
    for messages in run_ranks(_edit_before_optimizer, MODES[mode], mode):
        for edit, message in messages.items():
            assert "layers.1.up_proj.weight" in message, f"{edit}: {message}"


def _edit_before_optimizer(rank: int, world: int, mode: str) -> dict[str, str]:
    messages = {}
    for name, edit in EDITS.items():
        model, _ = training.prepare(_run(mode), world)
        edit(model)
        with pytest.raises(ConfigurationError) as error:
            dmuon.Muon(model)
        messages[name] = str(error.value)
    return messages


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [0, 1])
def test_edits_on_one_rank_are_refused_by_the_next_step_on_all(mode: str, steps: int) -> None:
    for messages in run_ranks(_edit_before_step, MODES[mode], mode, steps):
        for edit, message in messages.items():
            assert "layers.1.up_proj.weight" in message, f"{edit}: {message}"


def _edit_before_step(rank: int, world: int, mode: str, steps: int) -> dict[str, str]:
    messages = {}
    for name, edit in EDITS.items():
        model, optimizer = training.prepare(_run(mode), world)
        for step in range(steps):
            training.backward(model, _run(mode), step, rank, world)
            optimizer.step()
            optimizer.zero_grad()
        if rank == world - 1:
            edit(model)
        before = training.full(next(iter(model.parameters())))
        with pytest.raises(ConfigurationError) as error:
            optimizer.step()
        messages[name] = str(error.value)
        assert torch.equal(before, training.full(next(iter(model.parameters()))))
    return messages


@pytest.mark.parametrize("mode", MODES)
def test_a_pass_does_not_undo_an_edit(mode: str) -> None:
    for message, kept in run_ranks(_edit_and_train, MODES[mode], mode):
        assert "layers.1.up_proj.weight" in message and kept


def _edit_and_train(rank: int, world: int, mode: str) -> tuple[str, bool]:
    run = _run(mode)
    model, optimizer = training.prepare(run, world)
    training.backward(model, run, 0, rank, world)
    optimizer.step()
    optimizer.zero_grad()
    mine = nn.Parameter(torch.randn(32, 16))
    model.layers[1].up_proj.weight = mine
    training.backward(model, run, 1, rank, world)
    with pytest.raises(ConfigurationError) as error:
        optimizer.step()
    return str(error.value), model.layers[1].up_proj.weight is mine


@pytest.mark.parametrize("mode", MODES)
def test_an_edited_model_is_not_saved(mode: str) -> None:
    for messages in run_ranks(_save, MODES[mode], mode):
        for what, message in messages.items():
            assert "layers.1.up_proj.weight" in message, f"{what}: {message}"


def _save(rank: int, world: int, mode: str) -> dict[str, str]:
    full = StateDictOptions(full_state_dict=True)
    saves: dict[str, Callable[[Any, Any], Any]] = {
        "state_dict": lambda model, optimizer: model.state_dict(),
        "load_state_dict": lambda model, optimizer: model.load_state_dict({}, strict=False),
        "ours": lambda model, optimizer: dmuon.get_model_state_dict(model),
        "ours, loading": lambda model, optimizer: dmuon.set_model_state_dict(model, {}),
        "ours, optimizer": dmuon.get_optimizer_state_dict,
        "torch, sharded": lambda model, optimizer: get_model_state_dict(model),
        "torch, full": lambda model, optimizer: get_model_state_dict(model, options=full),
    }
    model, optimizer = training.prepare(_run(mode), world)
    _swap(model)
    messages = {}
    for what, save in saves.items():
        with pytest.raises(ConfigurationError) as error:
            save(model, optimizer)
        messages[what] = str(error.value)
    return messages


LATE: dict[str, Callable[[TinyMLP], Any]] = {
    "weight norm": lambda model: nn.utils.parametrizations.weight_norm(model.layers[1].up_proj),
    "spectral norm": lambda model: nn.utils.parametrizations.spectral_norm(model.layers[1].up_proj),
    "orthogonal": lambda model: nn.utils.parametrizations.orthogonal(model.layers[1].up_proj),
    "copied": copy.deepcopy,
    "block copied": lambda model: copy.deepcopy(model.layers[1]),
    "matrix copied": lambda model: copy.deepcopy(model.layers[1].up_proj),
    "weight norm by hooks": lambda model: nn.utils.weight_norm(model.layers[1].up_proj),
}


@pytest.mark.parametrize("mode", ["z2", "z3", "hsdp"])
def test_what_owned_weights_cannot_do_is_refused_by_name(mode: str) -> None:
    for messages in run_ranks(_do_late, MODES[mode], mode):
        for what, message in messages.items():
            assert "before dedicate_params()" in message, f"{what}: {message}"


def _do_late(rank: int, world: int, mode: str) -> dict[str, str]:
    model, _ = training.prepare(_run(mode), world)
    messages = {}
    for what, act in LATE.items():
        with pytest.raises(ConfigurationError) as error:
            act(model)
        messages[what] = str(error.value)
    return messages


class Adapter(nn.Module):
    """A module around another, as PEFT and checkpoint wrappers make it."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x)


def _wrap(model: TinyMLP) -> None:
    model.layers[1].up_proj = Adapter(model.layers[1].up_proj)


def _take_over(model: TinyMLP) -> None:
    taken = nn.Linear(16, 32, bias=False)
    taken.weight = model.layers[1].up_proj.weight
    model.layers[1].up_proj = taken


KEPT = {"wrapped": _wrap, "taken over by another module": _take_over}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edit", KEPT)
def test_a_parameter_that_is_kept_goes_on_training(mode: str, edit: str) -> None:
    expected = training.reference(training.Run(mode, model="mlp", steps=2))
    for weights in run_ranks(_train_kept, MODES[mode], mode, edit):
        for got, want in zip(weights, expected["weights"][1].values(), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-5)


def _train_kept(rank: int, world: int, mode: str, edit: str) -> list[torch.Tensor]:
    run = training.Run(mode, model="mlp", steps=2)
    model, _ = training.prepare(run, world)
    KEPT[edit](model)
    optimizer = dmuon.Muon(model, **training.HYPER)
    for step in range(2):
        training.backward(model, run, step, rank, world)
        optimizer.step()
        optimizer.zero_grad()
    return list(training.snapshot(model).values())


@pytest.mark.parametrize("mode", MODES)
def test_blocks_that_changed_places_are_saved_and_loaded_under_their_new_names(mode: str) -> None:
    saved, weights, loaded, momentum = run_ranks(_reorder, MODES[mode], mode)[0]
    assert saved.keys() == weights.keys() == loaded.keys()
    for name, want in weights.items():
        assert torch.equal(saved[name], want), name
        assert torch.equal(loaded[name], want), name
    assert momentum["live"].any() and torch.equal(momentum["saved"], momentum["live"])


def _reorder(rank: int, world: int, mode: str) -> tuple[Any, ...]:
    run = _run(mode)
    model, optimizer = training.prepare(run, world)
    training.backward(model, run, 0, rank, world)
    optimizer.step()
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]
    weights = training.snapshot(model)
    live = optimizer.state[model.layers[0].up_proj.weight]["momentum_buffer"]
    momentum = {"live": training.full(live)}
    # In Z2 the modules hold gathered weights from here on.
    model(training.batch_of(run, 0)[:2])
    saved, state = dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)
    momentum["saved"] = state["dedicated"]["layers.0.up_proj.weight"]["momentum_buffer"] if rank == 0 else None
    optimizer.zero_grad()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    dmuon.set_model_state_dict(model, saved)
    return saved, weights, training.snapshot(model), momentum
