"""`param_policy`, `param_policy_fn` and `route_hint_fn`: what each parameter is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.policy import ParamPolicy, policy_source

WEIGHT = nn.Parameter(torch.zeros(2, 2))
POLICY: dict[str, Any] = {
    "defaults": {"route": "adamw", "param_dtype": torch.bfloat16},
    "overrides": [
        {"name": ["q_proj", "o_proj"], "set": {"route": "muon"}},
        {"name": "layers.1.", "set": {"grad_dtype": torch.bfloat16, "param_dtype": None}},
    ],
}


def source(**given: Any) -> Any:
    return policy_source(**{"param_policy": None, "param_policy_fn": None, "route_hint_fn": None, **given})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("norm.weight", ParamPolicy("adamw", torch.bfloat16)),
        ("layers.0.q_proj.weight", ParamPolicy("muon", torch.bfloat16)),
        ("layers.1.o_proj.weight", ParamPolicy("muon", None, torch.bfloat16)),
        ("layers.1.norm.weight", ParamPolicy("adamw", None, torch.bfloat16)),
        ("layers.11.norm.weight", ParamPolicy("adamw", torch.bfloat16)),
    ],
)
def test_overrides_hold_in_order_for_names_with_their_tokens(name: str, expected: ParamPolicy) -> None:
    assert source(param_policy=POLICY)(name, WEIGHT) == expected


def test_function_decides_by_name_and_parameter_over_every_field() -> None:
    fields = {
        "route": "adamw",
        "param_dtype": torch.bfloat16,
        "grad_dtype": torch.float32,
        "output_dtype": torch.float32,
        "cast_forward_inputs": False,
        "master_dtype": torch.float32,
        "optim_dtype": torch.bfloat16,
        "muon_forward_unshard": "broadcast",
    }
    decide = source(param_policy_fn=lambda name, param: fields if param.ndim == 2 and name == "w" else None)
    assert decide("w", WEIGHT) == ParamPolicy(**fields)
    assert decide("v", WEIGHT) == ParamPolicy()


def test_hint_gives_the_route_alone() -> None:
    decide = source(route_hint_fn=lambda name, param: "adamw" if "norm" in name else None)
    assert [decide(name, WEIGHT).route for name in ("norm", "proj")] == ["adamw", "muon"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"param_policy": {}, "param_policy_fn": lambda n, p: None}, ConfigurationError, "pass one"),
        ({"param_policy": {}, "route_hint_fn": lambda n, p: None}, ConfigurationError, "pass one"),
        ({"param_policy": {"default": {}}}, ConfigurationError, "'default'.*'defaults', 'overrides'"),
        ({"param_policy": {"defaults": {"dtype": torch.float32}}}, ConfigurationError, "'dtype'.*'param_dtype'"),
        ({"param_policy": {"defaults": {"route": "sgd"}}}, ConfigurationError, "'muon', 'adamw'"),
        ({"param_policy": {"defaults": {"param_dtype": "bf16"}}}, ConfigurationError, r"param_dtype.*torch\.dtype"),
        ({"param_policy": {"defaults": {"grad_dtype": torch.int32}}}, ConfigurationError, "grad_dtype"),
        ({"param_policy": {"defaults": {"cast_forward_inputs": 1}}}, ConfigurationError, "cast_forward_inputs"),
        ({"param_policy": {"defaults": {"muon_forward_unshard": "ring"}}}, ConfigurationError, "'broadcast'"),
        ({"param_policy": {"overrides": [{"set": {}}]}}, ConfigurationError, r"overrides\[0\].*'name'"),
        ({"param_policy": {"overrides": [{"name": "q"}]}}, ConfigurationError, r"overrides\[0\].*no 'set'"),
        ({"param_policy": {"overrides": [{"name": [], "set": {}}]}}, ConfigurationError, "token"),
        ({"param_policy": {"overrides": [{"name": "q", "set": {"rout": "muon"}}]}}, ConfigurationError, "'rout'"),
        ({"param_policy": {"overrides": [("q", {})]}}, ConfigurationError, "dict of 'name' and 'set'"),
    ],
)
def test_policy_of_another_form_is_refused_before_any_parameter(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        source(**given)


def test_error_of_a_function_names_the_parameter() -> None:
    with pytest.raises(ConfigurationError, match=r"param_policy_fn for w.*'nothing'"):
        source(param_policy_fn=lambda name, param: {"nothing": 1})("w", WEIGHT)
    with pytest.raises(ConfigurationError, match=r"route_hint_fn \(w\)"):
        source(route_hint_fn=lambda name, param: "sgd")("w", WEIGHT)
