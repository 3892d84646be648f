"""A gradient that comes after its unit was sent to the owners is an error on every rank, and no lost gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon_hf.core as dmuon
from tests.distributed.training import full
from tests.harness import run_ranks

WIDTH = 8


class Stack(nn.Module):
    """Three layers. With `late`, the backward of the first layer's output runs that of the last layer once more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        last = self.layers[2](self.layers[1](first))
        if self.late:
            side = last.square().sum()

            def use_again(grad: torch.Tensor) -> None:
                handle.remove()
                side.backward(retain_graph=True)

            handle = first.register_hook(use_again)
        return last.sum()


def part_of(rank: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))


def send_then_use_again(rank: int, world: int, mode: str) -> tuple[str, str, dict[str, torch.Tensor]]:
    """Messages of the late gradient and of the step after it, then the gradients of a pass on the same model."""
    model = Stack()
    arguments: dict[str, Any] = {"reshard_after_forward": mode != "z2"}
    if mode.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        arguments |= {"replicate_mesh": mesh["replicate"], "delay_stage2_to_optimizer": mode == "hsdp"}
        dmuon.dedicate_params(model, mesh["shard"], lambda name, param: True, **arguments)
    else:
        dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), lambda name, param: True, **arguments)
    optimizer = dmuon.Muon(model)
    model.late = True
    with pytest.raises(dmuon.DMuonError) as late:
        model(part_of(rank)).backward(retain_graph=True)
    with pytest.raises(dmuon.DMuonError) as step:
        optimizer.step()
    optimizer.zero_grad()
    model.late = False
    model(part_of(rank)).backward()
    return str(late.value), str(step.value), {name: full(param.grad) for name, param in model.named_parameters()}


def expected_gradients(world: int) -> dict[str, torch.Tensor]:
    model = Stack()
    for rank in range(world):
        (model(part_of(rank)) / world).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize(("mode", "world"), [("z2", 2), ("z3", 2), ("hsdp", 4), ("hsdp_at_once", 4)])
def test_gradient_after_its_unit_was_sent_is_refused_and_the_next_pass_is_right(mode: str, world: int) -> None:
    expected = expected_gradients(world)
    for late, step, gradients in run_ranks(send_then_use_again, world, mode):
        assert "layers.2.weight received a gradient after the gradients of unit 'layers.2' were sent" in late
        assert "hook_boundary_resolver" in late
        assert "did not finish" in step
        assert gradients.keys() == expected.keys()
        for name, want in expected.items():
            torch.testing.assert_close(gradients[name], want, rtol=1e-5, atol=1e-6)
