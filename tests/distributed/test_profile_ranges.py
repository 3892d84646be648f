"""A profile names what the runtime moves, by unit."""

from __future__ import annotations

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.distributed.training import Run, backward, prepare
from tests.harness import run_ranks


def ranges(rank: int, world: int, mode: str) -> set[str]:
    run = Run(mode, "mlp", steps=1)
    model, optimizer = prepare(run, world)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        backward(model, run, 0, rank, world)
        optimizer.step()
    return {event.key for event in profiler.key_averages() if event.key.startswith("dmuon::")}


@pytest.mark.parametrize(("mode", "world", "kinds"), [("z3", 2, ("gather", "reduce")), ("hsdp", 4, ("publish",))])
def test_profile_shows_each_collective_under_the_name_of_its_unit(mode: str, world: int, kinds: tuple[str]) -> None:
    for seen in run_ranks(ranges, world, mode):
        assert {f"dmuon::{kind} layers.{layer}" for kind in kinds for layer in range(3)} <= seen
