"""Every topology computes the update of one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime.states import GradState
from dmuon_hf.core.runtime.unit import Unit
from tests.distributed.training import Run, assert_same_training, backward, prepare, reference, train
from tests.harness import run_ranks

WORLDS = [("local", 1), ("z2", 2), ("z3", 2), ("z3", 3), ("z2", 4), ("z3", 4), ("hsdp", 4), ("hsdp_sync", 4)]
WORLDS += [("ddp", 1), ("ddp", 2), ("ddp_sync", 4), ("replicate", 3), ("replicate", 4)]


def check(run: Run, world: int, *, rtol: float = 2e-4) -> list[dict]:
    results = run_ranks(train, world, run, init=run.mode != "local")
    expected = reference(run)
    for result in results:
        assert_same_training(run, result, expected, rtol=rtol)
    return results


@pytest.mark.parametrize(("mode", "world"), WORLDS)
def test_uneven_shapes_train_like_one_process(mode: str, world: int) -> None:
    check(Run(mode, "uneven"), world)


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "nonreentrant"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    ("mode", "world"), [("local", 1), ("z2", 2), ("z3", 4), ("hsdp", 4), ("ddp", 4), ("replicate", 2)]
)
def test_tied_llama_trains_like_one_process(mode: str, world: int, accumulate: int, checkpointing: str | None) -> None:
    # The gradients of queries and keys are small beside what they are differences of: rounding of another CPU's fp32
    # kernels moves them by more than 2e-4 after a step, in one process as well.
    check(Run(mode, "llama_tied", accumulate=accumulate, checkpointing=checkpointing), world, rtol=1e-3)


def test_hsdp_sync_and_async_publish_are_bit_equal() -> None:
    sync = run_ranks(train, 4, Run("hsdp_sync", "llama"))[0]
    overlapped = run_ranks(train, 4, Run("hsdp", "llama"))[0]
    for a, b in zip(sync["weights"], overlapped["weights"], strict=True):
        for name in a:
            assert torch.equal(a[name], b[name]), name


def reductions_in_order(rank: int, world: int, delay: bool) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    for event in ("launch_reduction", "finish_reduction"):
        original = getattr(Unit, event)

        def logged(unit: Unit, original: Any = original, event: str = event) -> None:
            if event == "launch_reduction" or unit.grads.state is GradState.REDUCING:
                seen.append((event.partition("_")[0], unit.name))
            original(unit)

        setattr(Unit, event, logged)
    run = Run("hsdp", "mlp", steps=1, dedicate={"delay_stage2_to_optimizer": delay})
    model, _ = prepare(run, world)
    backward(model, run, 0, rank, world)
    return seen


def test_delay_of_the_second_stage_decides_when_reductions_finish() -> None:
    units = ["layers.2", "layers.1", "layers.0"]
    launches = [("launch", unit) for unit in units]
    finishes = [("finish", unit) for unit in units]
    for seen in run_ranks(reductions_in_order, 4, True):
        assert seen == launches + finishes
    for seen in run_ranks(reductions_in_order, 4, False):
        assert seen == [launches[0], finishes[0], launches[1], finishes[1], launches[2], finishes[2]]


def test_waiting_for_the_second_stage_at_once_changes_no_weight() -> None:
    check(Run("hsdp", "uneven", dedicate={"delay_stage2_to_optimizer": False}), 4)


class Borrowing(torch.nn.Module):
    """Its second block reads a weight of the first one, outside of that one's forward but while it is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lent: list[torch.Tensor] = []
        handle = self.layers[0].register_forward_hook(lambda module, args, out: lent.append(module.weight))
        x = self.layers[1](self.layers[0](x))
        handle.remove()
        return (x @ lent[0].t()).sum() if isinstance(lent[0], torch.nn.Parameter) else x.sum()


def borrow(rank: int, world: int) -> str:
    model = Borrowing()
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, lambda name, param: True, reshard_after_forward=False)
    try:
        model(torch.ones(2, 8, requires_grad=True)).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_weight_used_outside_of_its_boundary_is_an_error_and_not_a_lost_gradient() -> None:
    for message in run_ranks(borrow, 2):
        assert "hook" in message or "layers.0.weight, an owned weight" in message, message
