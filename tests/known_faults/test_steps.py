"""Gradients and steps: recomputation inside a hook boundary, and weights that go stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import dmuon_hf.core as dmuon
from tests.harness import run_ranks
from tests.harness.reference import ReferenceOptimizer

HYPER: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "adamw_lr": 1e-2, "adamw_weight_decay": 0.1}


class Block(nn.Module):
    """Two halves, each of which may be recomputed by itself inside the block's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)
        self.recompute: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None:
            return x + self.second(self.first(x))
        half = checkpoint(self.first, x, use_reentrant=self.recompute)
        return x + checkpoint(self.second, half, use_reentrant=self.recompute)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(self.norm(x)))

    def second(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(x))


class Net(nn.Module):
    """Blocks that may be recomputed whole, each with halves that may be recomputed once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.outer: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.outer is None else checkpoint(layer, x, use_reentrant=self.outer)
        return x.square().mean()


def _net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net()


def _batch(step: int) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()


def _is_matrix(name: str, param: nn.Parameter) -> bool:
    return param.ndim == 2


def _recompute(rank: int, world: int, outer: bool | None, inner: bool | None) -> dict[str, torch.Tensor]:
    model = _net()
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, _is_matrix, hook_boundary_predicate=lambda module: isinstance(module, Block))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
        layer.recompute = inner
    model.outer = outer
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, **HYPER)
    for step in range(2):
        model(_batch(step).chunk(world)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(None, False), (None, True), (False, False), (True, True), (False, True)],
    ids=["halves", "halves-reentrant", "nested", "nested-reentrant", "nested-mixed"],
)
def test_recomputation_inside_a_block_trains_like_none(outer: bool | None, inner: bool | None) -> None:
    model = _net()
    reference = ReferenceOptimizer(model, _is_matrix, **HYPER)
    for step in range(2):
        model(_batch(step)).backward()
        reference.step()
        reference.zero_grad()
    for weights in run_ranks(_recompute, 2, outer, inner):
        for name, param in model.named_parameters():
            torch.testing.assert_close(weights[name], param.detach(), rtol=1e-4, atol=1e-5)
