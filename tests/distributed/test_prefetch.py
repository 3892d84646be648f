"""forward_prefetch_depth decides how many units are gathered ahead of the one that runs."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime.states import WeightState
from dmuon_hf.core.runtime.unit import Unit
from dmuon_hf.core.runtime.weights import UnitWeights
from tests.harness import run_ranks
from tests.harness.models import dense_batch, tiny_mlp


def events_of_one_forward(rank: int, world: int, depth: int) -> list[str]:
    model = tiny_mlp()
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), lambda name, param: "proj" in name)
    dmuon.Muon(model, forward_prefetch_depth=depth)
    seen: list[str] = []
    gather, enter = UnitWeights.gather, Unit.enter_forward

    def logged_gather(weights: UnitWeights) -> None:
        if weights.state is WeightState.SHARDED:
            seen.append(f"gather {weights.name[-1]}")
        gather(weights)

    def logged_enter(unit: Unit, *, in_backward: bool) -> None:
        seen.append(f"enter {unit.index}")
        enter(unit, in_backward=in_backward)

    UnitWeights.gather, Unit.enter_forward = logged_gather, logged_enter  # type: ignore[method-assign]
    with torch.no_grad():
        model(dense_batch(0))
    return seen


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0, ["enter 0", "gather 0", "enter 1", "gather 1", "enter 2", "gather 2"]),
        (1, ["gather 0", "enter 0", "gather 1", "enter 1", "gather 2", "enter 2"]),
        (2, ["gather 0", "enter 0", "gather 1", "gather 2", "enter 1", "enter 2"]),
    ],
)
def test_depth_decides_how_far_ahead_units_are_gathered(depth: int, expected: list[str]) -> None:
    assert run_ranks(events_of_one_forward, 2, depth) == [expected] * 2
