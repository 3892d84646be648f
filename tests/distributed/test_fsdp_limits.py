"""What FSDP2 itself cannot do, and that the way round in docs/troubleshooting.md trains right with owned weights."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import dmuon_hf.core as dmuon
from tests.distributed.training import full
from tests.harness import run_ranks

D = 8


class Model(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


def built(world: int, reentrant: bool, owned: bool) -> Model:
    model = Model(reentrant)
    mesh = init_device_mesh("cpu", (world,))
    if owned:
        dmuon.dedicate_params(model, mesh, lambda name, param: param.ndim == 2)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def part(rank: int) -> torch.Tensor:
    return torch.randn(2, D, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def train(rank: int, world: int, reentrant: bool, owned: bool, before: str) -> Any:
    """Mean gradients of two forwards and one backward, whether all of them were reduced, or the error."""
    model = built(world, reentrant, owned)
    first = {"inference": torch.inference_mode, "no_grad": torch.no_grad}.get(before)
    with first() if first else contextlib.nullcontext():
        if first:
            model(part(rank))
    try:
        (model(part(rank)) + model(2 * part(rank))).backward()
    except RuntimeError as error:
        return str(error)
    if not all(isinstance(p.grad, DTensor) for p in model.parameters()):
        return "not reduced"
    return [full(p.grad) for p in model.parameters()]


def test_fsdp2_alone_fails_after_inference_mode_and_in_reentrant_checkpoints_of_two_forwards() -> None:
    assert all("inference tensor" in message for message in run_ranks(train, 2, False, False, "inference"))
    assert run_ranks(train, 2, True, False, "") == ["not reduced"] * 2


@pytest.mark.parametrize("before", ["", "no_grad"])
def test_no_grad_and_checkpoints_that_are_not_reentrant_train_right(before: str) -> None:
    reference = Model(False)
    for rank in range(2):
        ((reference(part(rank)) + reference(2 * part(rank))) / 2).backward()
    for gradients in run_ranks(train, 2, False, True, before):
        for found, parameter in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)
