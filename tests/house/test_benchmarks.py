"""The benchmarks' plumbing, without running them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import memory
import step
import traffic
from bench_models import is_matrix, make_moe, spec_of
from contenders import ALL_MODES
from profile_step import SECTIONS, owner_of


def test_profiled_functions_exist_where_they_are_looked_up() -> None:
    missing = [path for path, _ in SECTIONS if not callable(getattr(*owner_of(path), None))]
    assert missing == []


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("dmuon-z3", 3 * 3 / 4),
        ("dmuon-z2", 2 * 3 / 4),
        ("dmuon-hsdp", 3 / 2 + 2 / 4),
        ("sharded-z3", 2 * 3 / 4 / 4),
        ("sharded-z3-bf16", 3 / 4 / 4),
        ("ddp", 3 * 3 / 4),
        ("dmuon-tp", 3 / 2 / 2 + 2 / 2 / 4),
    ],
)
def test_traffic_of_a_mode_follows_its_formula(mode: str, expected: float) -> None:
    assert traffic.formula(traffic.KNOWN[mode], 4, 1024) == pytest.approx(1024 * expected)


def test_memory_of_ddp_is_the_weights_once_and_the_state_of_an_owner() -> None:
    sizes = memory.Sizes(matrices=1000, owned=1000, others=100, matrix_params=10, other_params=5, units=4)
    found = memory.formulas(memory.COUNTED["ddp"], 4, sizes)
    assert (found["matrices"], found["momentum"], found["others"], found["AdamW state"]) == (4000, 1000, 400, 820)
    assert found["alive"] == 6220
    assert memory.formulas(memory.COUNTED["sharded-z3"], 4, sizes)["momentum"] == 1000


def test_ratios_are_formed_within_a_round() -> None:
    zeros = dict.fromkeys(step.Round.__dataclass_fields__, 0)
    ours = [step.Round(**{**zeros, "total": total, "ns": 20.0, "cpu": 90.0, "ns_cpu": 30.0}) for total in (110, 240)]
    theirs = [step.Round(**{**zeros, "total": total, "cpu": 60.0}) for total in (80, 180)]
    found = step.summarise({"ddp": ours, "adamw-ddp": theirs})["ddp"]
    assert found["over_same_and_ns"] == pytest.approx((110 / 100 + 240 / 200) / 2)
    assert found["cpu_over_same_and_ns"] == pytest.approx(1.0)
    assert found["without_ns_same"] == pytest.approx((90 / 80 + 220 / 180) / 2)


def test_adamw_with_the_same_model_and_sharding_is_known_for_every_mode() -> None:
    for name, mode in ALL_MODES.items():
        same = ALL_MODES[mode.rival]
        assert same.optimizer.startswith("adamw"), name
        assert (same.experts, same.hsdp, same.reshard) == (mode.experts, mode.hsdp, mode.reshard), name


def test_experts_are_for_muon_with_two_matrices_in_gate_and_up_and_routers_are_not() -> None:
    with torch.device("meta"):
        model = make_moe()
    taken = {
        name.split("layers.0.")[1] for name, p in model.named_parameters() if is_matrix(name, p) and "s.0." in name
    }
    assert taken == {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    for name, param in model.named_parameters():
        if name.endswith("gate_up_proj"):
            spec_of(name, param).validate(tuple(param.shape[-2:]))
            assert spec_of(name, param).count == 2
