"""Which units are gathered ahead of the one that runs, and when."""

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


class InOrder(torch.nn.Module):
    """Runs the layers that it is told to, in that order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x.square().mean()


def gathers_by_pass(rank: int, world: int, orders: list[tuple[int, ...]]) -> list[tuple[str, str]]:
    """Per training pass, the events of forward and of backward: ``g`` a gather, ``f`` and ``b`` the use of a unit."""
    model = InOrder()
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), lambda name, param: True)
    dmuon.Muon(model)
    events: list[str] = []
    gather, forward, backward = UnitWeights.gather, Unit.enter_forward, Unit.enter_backward

    def logged_gather(weights: UnitWeights) -> None:
        if weights.state is WeightState.SHARDED:
            events.append(f"g{weights.name[-1]}")
        gather(weights)

    def logged_forward(unit: Unit, *, in_backward: bool) -> None:
        events.append(f"f{unit.index}")
        forward(unit, in_backward=in_backward)

    def logged_backward(unit: Unit) -> None:
        events.append(f"b{unit.index}")
        backward(unit)

    UnitWeights.gather, Unit.enter_forward, Unit.enter_backward = logged_gather, logged_forward, logged_backward  # type: ignore[method-assign]
    passes = []
    for order in orders:
        loss = model(torch.ones(2, 8), order)
        seen = " ".join(events)
        events.clear()
        loss.backward()
        passes.append((seen, " ".join(events)))
        events.clear()
    return passes


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        # The last unit's weights are asked for when the root's backward begins, before its own does.
        ([(0, 1, 2, 3)], ("g0 f0 g1 f1 g2 f2 g3 f3", "g3 b3 g2 b2 g1 b1 g0 b0")),
        ([(3, 1, 0, 2)] * 2, ("g3 f3 g1 f1 g0 f0 g2 f2", "g2 b2 g0 b0 g1 b1 g3 b3")),
        ([(0, 2)] * 2, ("g0 f0 g2 f2", "g2 b2 g0 b0")),
        # What follows a unit that the last forward passed over is taken from the plan.
        ([(0, 2), (0, 1, 2, 3)], ("g0 f0 g2 f1 g1 f2 f3 g3", "g3 b3 g2 b2 g1 b1 g0 b0")),
    ],
)
def test_prefetch_follows_the_order_of_the_last_forward(
    orders: list[tuple[int, ...]], expected: tuple[str, str]
) -> None:
    for passes in run_ranks(gathers_by_pass, 2, orders):
        assert passes[-1] == expected
