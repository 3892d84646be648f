"""Optimizer state: present from the start, round trips, and refuses what does not fit."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim import Muon
from tests.unit.muon_fakes import MATRICES, FakeRuntime, Net, Setup, backward, build, use, weights


def train(setup: Setup, seeds: range) -> None:
    for seed in seeds:
        setup.optimizer.zero_grad()
        backward(setup.model, seed)
        setup.optimizer.step()


def assert_same_weights(left: nn.Module, right: nn.Module) -> None:
    for name, weight in weights(left).items():
        assert torch.equal(weight, right.get_parameter(name)), name


def test_state_exists_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    for name, param in setup.model.named_parameters():
        if not param.requires_grad:
            assert param not in setup.optimizer.state
        elif name in MATRICES:
            assert set(setup.optimizer.state[param]) == {"momentum_buffer"}
        else:
            assert set(setup.optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}
    for entry in setup.optimizer.state.values():
        assert all(not value.any() for value in entry.values())


def test_resume_equals_the_uninterrupted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    straight = build(monkeypatch)
    train(straight, range(6))
    first = build(monkeypatch)
    train(first, range(3))
    saved = copy.deepcopy(first.optimizer.state_dict())
    resumed = build(monkeypatch, lr=0.5, adamw_lr=0.5)
    resumed.model.load_state_dict(first.model.state_dict())
    resumed.optimizer.load_state_dict(saved)
    train(resumed, range(3, 6))
    assert_same_weights(straight.model, resumed.model)


def test_loading_its_own_state_dict_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, reloaded = build(monkeypatch), build(monkeypatch)
    for setup in (plain, reloaded):
        train(setup, range(2))
    reloaded.optimizer.load_state_dict(reloaded.optimizer.state_dict())
    for setup in (plain, reloaded):
        train(setup, range(2, 4))
    assert_same_weights(plain.model, reloaded.model)


def test_torch_full_state_dict_round_trip_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    straight = build(monkeypatch)
    train(straight, range(4))
    first = build(monkeypatch)
    train(first, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(first.model, first.optimizer))
    assert set(saved["state"]) >= set(MATRICES)
    resumed = build(monkeypatch)
    resumed.model.load_state_dict(first.model.state_dict())
    set_optimizer_state_dict(resumed.model, resumed.optimizer, saved)
    train(resumed, range(2, 4))
    assert_same_weights(straight.model, resumed.model)


def test_reading_the_state_dict_of_a_fresh_optimizer_moves_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch, weight_decay=0.5)
    before = weights(setup.model)
    get_optimizer_state_dict(setup.model, setup.optimizer)
    for name, weight in before.items():
        assert torch.equal(weight, setup.model.get_parameter(name))


def test_fp32_momentum_of_a_bf16_model_survives_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(monkeypatch, dtype=torch.bfloat16)
    train(first, range(2))
    second = build(monkeypatch, dtype=torch.bfloat16)
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for name in MATRICES:
        loaded = second.optimizer.state[second.model.get_parameter(name)]["momentum_buffer"]
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded, first.optimizer.state[first.model.get_parameter(name)]["momentum_buffer"])


def test_hyperparameters_missing_from_an_older_state_dict_keep_their_value(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch, lr_scale="original")
    saved = copy.deepcopy(setup.optimizer.state_dict())
    for group in saved["param_groups"]:
        group.pop("lr_scale", None)
    setup.optimizer.load_state_dict(saved)
    assert setup.optimizer.param_groups[0]["lr_scale"] == "original"


def broken(saved: dict[str, Any], how: str) -> None:
    matrix = saved["state"][0]
    if how == "entry":
        del saved["state"][0]
    elif how == "key":
        del matrix["momentum_buffer"]
    elif how == "shape":
        matrix["momentum_buffer"] = matrix["momentum_buffer"][:1]
    elif how == "dtype":
        matrix["momentum_buffer"] = matrix["momentum_buffer"].to(torch.int8)
    elif how == "order":
        saved["param_names"][0].reverse()
    elif how == "groups":
        saved["param_groups"].pop()
    else:
        saved["param_groups"][0]["group_name"] = "other/muon"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("entry", "holds no optimizer state of 'a_proj.weight'"),
        ("key", "no 'momentum_buffer' for 'a_proj.weight'"),
        ("shape", "'momentum_buffer' of 'a_proj.weight' has shape (1, 12), wanted (20, 12)"),
        ("dtype", "'momentum_buffer' of 'a_proj.weight' is torch.int8, wanted a floating-point tensor"),
        ("order", "at place 0 of group 'default/muon', where this optimizer has 'a_proj.weight'"),
        ("groups", "has groups [('default/muon', 4)]"),
        ("name", "('other/muon', 4)"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, how: str, message: str
) -> None:
    setup = build(monkeypatch)
    train(setup, range(1))
    before = copy.deepcopy(setup.optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][1]["lr"] = 77.0
    broken(saved, how)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        setup.optimizer.load_state_dict(saved)
    after = setup.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entry in before["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, after["state"][key][name])


def test_rebind_follows_the_names_to_new_parameters_with_fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch, lr=0.3, forward_prefetch_depth=2)
    train(setup, range(2))
    setup.optimizer.param_groups[1]["lr"] = 0.7
    other = Net()
    runtime = FakeRuntime(other)
    use(monkeypatch, runtime)
    setup.optimizer.rebind(other)
    held = [id(param) for group in setup.optimizer.param_groups for param in group["params"]]
    assert held == [id(p) for p in [*map(other.get_parameter, MATRICES)]] + [
        id(p) for n, p in other.named_parameters() if p.requires_grad and n not in MATRICES
    ]
    assert [group["lr"] for group in setup.optimizer.param_groups] == [0.3, 0.7]
    assert runtime.prefetch_depth == 2
    assert set(setup.optimizer.state) == {p for p in other.parameters() if p.requires_grad}
    assert not setup.optimizer.state[other.a_proj.weight]["momentum_buffer"].any()
    fresh = build(monkeypatch, lr=0.3, adamw_lr=0.7)
    use(monkeypatch, runtime)
    train(Setup(other, runtime, setup.optimizer), range(2))
    use(monkeypatch, fresh.runtime)
    train(fresh, range(2))
    assert_same_weights(fresh.model, other)


def test_rebind_names_missing_and_uncovered_parameters_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    held = [param for group in setup.optimizer.param_groups for param in group["params"]]
    other = Net()
    other.extra = nn.Linear(2, 2, bias=False)
    other.head = nn.Linear(18, 3, bias=False)
    use(monkeypatch, FakeRuntime(other))
    with pytest.raises(ConfigurationError, match=r"not found \['head.bias'\], in no group \['extra.weight'\]"):
        setup.optimizer.rebind(other)
    assert all(
        a is b for a, b in zip(held, (p for g in setup.optimizer.param_groups for p in g["params"]), strict=True)
    )
    assert setup.optimizer.runtime is setup.runtime


def test_rebind_refuses_a_parameter_that_changed_its_route(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    other = Net()
    runtime = FakeRuntime(other)
    del runtime.dedicated["c_proj.weight"]
    use(monkeypatch, runtime)
    with pytest.raises(ConfigurationError, match=r"changed their route: \['c_proj.weight'\]"):
        setup.optimizer.rebind(other)


def test_names_ignore_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    wrapped = torch.nn.Module()
    wrapped._orig_mod = Net()
    runtime = FakeRuntime(wrapped._orig_mod)
    use(monkeypatch, runtime)
    setup.optimizer.rebind(wrapped)
    assert setup.optimizer.param_groups[0]["params"][0] is wrapped._orig_mod.a_proj.weight


def test_state_dict_of_another_muon_is_interchangeable(monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(monkeypatch)
    train(first, range(2))
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    second = Muon(model)
    second.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for left, right in zip(first.optimizer.state.values(), second.state.values(), strict=True):
        for key in left:
            assert torch.equal(left[key], right[key])


def test_parameter_frozen_since_keeps_its_state_where_none_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    train(setup, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(setup.model, setup.optimizer))
    momentum = setup.optimizer.state[setup.model.b_proj.weight]["momentum_buffer"].clone()
    setup.model.b_proj.weight.requires_grad_(False)
    set_optimizer_state_dict(setup.model, setup.optimizer, saved)
    assert torch.equal(momentum, setup.optimizer.state[setup.model.b_proj.weight]["momentum_buffer"])
    train(setup, range(2, 3))


def test_deferred_state_is_made_by_the_first_step_and_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, deferred = build(monkeypatch), build(monkeypatch, defer_state=True)
    assert not deferred.optimizer.state
    for setup in (eager, deferred):
        train(setup, range(2))
    assert_same_weights(eager.model, deferred.model)
    assert set(map(len, deferred.optimizer.state.values())) == {1, 3}


def test_deferred_state_is_made_by_rebind(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch, defer_state=True)
    setup.optimizer.rebind(setup.model)
    assert len(setup.optimizer.state) == sum(param.requires_grad for param in setup.model.parameters())
