"""How semantic groups become the optimizer's groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim import Muon
from tests.unit.muon_fakes import MATRICES, FakeRuntime, Net, build, use

DEFAULTS: dict[str, Any] = {
    "lr": 0.02,
    "momentum": 0.95,
    "nesterov": True,
    "ns_steps": 5,
    "weight_decay": 0.0,
    "lr_scale": "match_rms_adamw",
    "update_rule": "muon",
    "normuon_beta2": 0.95,
}
ADAMW_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def names_of(optimizer: Muon, model: nn.Module, group_name: str) -> list[str]:
    by_id = {id(param): name for name, param in model.named_parameters()}
    (group,) = [group for group in optimizer.param_groups if group["group_name"] == group_name]
    return [by_id[id(param)] for param in group["params"]]


def options_of(optimizer: Muon, group_name: str) -> dict[str, Any]:
    (group,) = [group for group in optimizer.param_groups if group["group_name"] == group_name]
    return {key: value for key, value in group.items() if key not in ("params", "group_name", "route")}


def split_groups(model: Net) -> list[dict[str, Any]]:
    """`first` holds a_proj whole, `second` the rest."""
    first = list(model.a_proj.parameters())
    ids = {id(param) for param in first}
    second = [param for param in model.parameters() if param.requires_grad and id(param) not in ids]
    return [{"params": first, "group_name": "first"}, {"params": second, "group_name": "second"}]


def test_no_groups_give_the_default_pair_with_the_reference_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    groups = [(group["group_name"], group["route"]) for group in setup.optimizer.param_groups]
    assert groups == [("default/muon", "muon"), ("default/adamw", "adamw")]
    assert options_of(setup.optimizer, "default/muon") == DEFAULTS
    assert options_of(setup.optimizer, "default/adamw") == ADAMW_DEFAULTS
    assert names_of(setup.optimizer, setup.model, "default/muon") == list(MATRICES)
    assert names_of(setup.optimizer, setup.model, "default/adamw") == [
        name for name, param in setup.model.named_parameters() if param.requires_grad and name not in MATRICES
    ]


def test_constructor_arguments_reach_their_route(monkeypatch: pytest.MonkeyPatch) -> None:
    muon = {
        "lr": 0.1,
        "momentum": 0.5,
        "nesterov": False,
        "ns_steps": 3,
        "weight_decay": 0.2,
        "lr_scale": "original",
        "update_rule": "normuon",
        "normuon_beta2": 0.6,
    }
    setup = build(
        monkeypatch,
        **muon,
        adamw_lr=0.3,
        adamw_betas=(0.1, 0.2),
        adamw_weight_decay=0.4,
        adamw_eps=0.5,
    )
    assert options_of(setup.optimizer, "default/muon") == muon
    assert options_of(setup.optimizer, "default/adamw") == {
        "lr": 0.3,
        "betas": (0.1, 0.2),
        "weight_decay": 0.4,
        "eps": 0.5,
    }


def test_semantic_group_lr_and_decay_apply_to_both_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    groups = split_groups(model)
    groups[0] |= {"lr": 7e-4, "weight_decay": 0.3}
    optimizer = Muon(model, param_groups=groups)
    assert options_of(optimizer, "first/muon") == {**DEFAULTS, "lr": 7e-4, "weight_decay": 0.3}
    assert options_of(optimizer, "first/adamw") == {**ADAMW_DEFAULTS, "lr": 7e-4, "weight_decay": 0.3}
    assert options_of(optimizer, "second/muon") == DEFAULTS
    assert names_of(optimizer, model, "first/muon") == ["a_proj.weight"]
    assert names_of(optimizer, model, "first/adamw") == ["a_proj.bias"]


def test_route_specific_keys_win_over_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    groups = split_groups(model)
    groups[0] |= {
        "lr": 1.0,
        "muon_lr": 2.0,
        "adamw_lr": 3.0,
        "weight_decay": 0.1,
        "muon_weight_decay": 0.2,
        "adamw_weight_decay": 0.3,
        "momentum": 0.4,
        "adamw_betas": (0.5, 0.6),
        "adamw_eps": 0.7,
    }
    optimizer = Muon(model, param_groups=groups)
    assert options_of(optimizer, "first/muon") == {**DEFAULTS, "lr": 2.0, "weight_decay": 0.2, "momentum": 0.4}
    assert options_of(optimizer, "first/adamw") == {"lr": 3.0, "weight_decay": 0.3, "betas": (0.5, 0.6), "eps": 0.7}


def test_unknown_keys_of_a_group_are_kept_on_both_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    groups = split_groups(model)
    groups[0]["initial_lr"] = 0.5
    optimizer = Muon(model, param_groups=groups)
    assert options_of(optimizer, "first/muon")["initial_lr"] == 0.5
    assert options_of(optimizer, "first/adamw")["initial_lr"] == 0.5
    assert "initial_lr" not in options_of(optimizer, "second/muon")


def test_group_of_one_route_makes_one_subgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    matrices = [model.get_parameter(name) for name in MATRICES]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and n not in MATRICES]
    optimizer = Muon(model, param_groups=[{"params": matrices}, {"params": rest}])
    assert [group["group_name"] for group in optimizer.param_groups] == ["group0/muon", "group1/adamw"]


def test_named_pairs_and_generators_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    pairs = ((name, param) for name, param in model.named_parameters() if param.requires_grad)
    optimizer = Muon(model, param_groups=[{"params": pairs, "group_name": "all"}])
    assert names_of(optimizer, model, "all/muon") == list(MATRICES)


def test_tied_parameter_is_stepped_once_under_its_first_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    model.tied = nn.Linear(18, 3)
    model.tied.weight = model.head.weight
    use(monkeypatch, FakeRuntime(model))
    optimizer = Muon(model)
    names = names_of(optimizer, model, "default/adamw")
    assert "head.weight" in names
    assert "tied.weight" not in names
    assert len(names) == len(set(names))


def test_missing_parameters_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    groups = split_groups(model)
    groups[1]["params"] = groups[1]["params"][2:]
    with pytest.raises(ConfigurationError, match=r"leave out trainable parameters: 'b_proj.weight', 'c_proj.weight'$"):
        Muon(model, param_groups=groups)


def test_parameter_in_two_groups_is_named_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    groups = split_groups(model)
    groups[1]["params"].append(model.a_proj.bias)
    with pytest.raises(
        ConfigurationError, match=r"'second'\) holds 'a_proj.bias', which param_groups\[0\] \('first'\)"
    ):
        Muon(model, param_groups=groups)


def test_parameter_twice_in_one_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    groups = split_groups(model)
    groups[0]["params"].append(model.a_proj.weight)
    with pytest.raises(ConfigurationError, match=r"holds 'a_proj.weight', which param_groups\[0\]"):
        Muon(model, param_groups=groups)


def test_stale_parameter_is_named_where_its_name_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    pairs = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    pairs[0] = ("a_proj.weight", nn.Parameter(torch.zeros(20, 12)))
    with pytest.raises(ConfigurationError, match=r"a_proj.weight, which is no parameter of this model"):
        Muon(model, param_groups=[{"params": pairs}])


def test_frozen_parameter_of_a_group_is_left_out_until_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    optimizer = Muon(model, param_groups=[{"params": list(model.parameters())}])
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert held == {id(param) for param in model.parameters() if param.requires_grad}


def test_repeated_group_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    groups = split_groups(model)
    groups[1]["group_name"] = "first"
    with pytest.raises(ConfigurationError, match="repeat group_name 'first/adamw', 'first/muon'"):
        Muon(model, param_groups=groups)


@pytest.mark.parametrize("key", ["dmuon_route", "dmuon_optimizer", "matrix_optimizer"])
def test_group_that_asks_for_adamw_takes_its_matrices_off_the_muon_route(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    groups = split_groups(model)
    groups[0][key] = "adamw"
    optimizer = Muon(model, param_groups=groups)
    names = [group["group_name"] for group in optimizer.param_groups]
    assert "first/adamw" in names
    assert "first/muon" not in names
    taken = next(group for group in optimizer.param_groups if group["group_name"] == "first/adamw")
    assert key not in taken
    assert all("exp_avg" in optimizer.state[param] for param in taken["params"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dmuon_route": "sgd"}, ConfigurationError, "'first'.*must be one of 'muon', 'adamw'"),
        ({"dmuon_route": "adamw", "matrix_optimizer": "muon"}, ConfigurationError, "several routes"),
        ({"dmuon_route": "sharded_adamw"}, ConfigurationError, "has an owner.*give it that route in the param_policy"),
        ({"route": "adamw"}, ConfigurationError, "dmuon_route"),
    ],
)
def test_route_of_a_group_that_there_is_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], error: type[Exception], message: str
) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    groups = split_groups(model)
    groups[0] |= options
    with pytest.raises(error, match=message):
        Muon(model, param_groups=groups)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("lr", -1.0),
        ("momentum", 1.0),
        ("weight_decay", -0.1),
        ("ns_steps", 0),
        ("ns_steps", 2.5),
        ("lr_scale", "moonlight"),
        ("adamw_lr", -1.0),
        ("adamw_betas", (0.9, 1.0)),
        ("adamw_eps", -1e-8),
        ("adamw_weight_decay", -0.1),
    ],
)
def test_argument_out_of_range_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, argument: str, value: object
) -> None:
    with pytest.raises(ConfigurationError, match=argument.removeprefix("adamw_")):
        build(monkeypatch, **{argument: value})


def test_model_without_runtime_is_told_to_dedicate() -> None:
    with pytest.raises(ConfigurationError, match="call dedicate_params"):
        Muon(Net())


def test_model_without_dedicated_matrices_is_told_to_widen_the_predicate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    runtime = FakeRuntime(model)
    runtime.dedicated.clear()
    use(monkeypatch, runtime)
    with pytest.raises(ConfigurationError, match="widen its predicate"):
        Muon(model)


def test_model_with_only_frozen_dedicated_matrices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    for name in MATRICES:
        model.get_parameter(name).requires_grad_(False)
    with pytest.raises(ConfigurationError, match="every dedicated matrix of the model is frozen"):
        Muon(model)


def test_groups_that_put_every_matrix_on_adamw_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    optimizer = Muon(model, param_groups=[{"params": list(model.parameters()), "dmuon_route": "adamw"}])
    assert {group["route"] for group in optimizer.param_groups} == {"adamw"}


def test_adding_a_group_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    with pytest.raises(ConfigurationError, match="fixed at construction"):
        setup.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})


def test_prefetch_depth_reaches_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build(monkeypatch, forward_prefetch_depth=3).runtime.prefetch_depth == 3
