"""What a block leaves in an object, or on itself, is a way into its backward like what it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from tests.distributed.training import full
from tests.harness import run_ranks

WIDTH, LAYERS = 8, 3


class Slot:
    """Keys of one layer so far."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None


class Cache:
    """Not a container: tensors are attributes of objects in an attribute, as in transformers."""

    def __init__(self) -> None:
        self.slots = [Slot() for _ in range(LAYERS)]


class Block(nn.Module):
    def __init__(self, i: int) -> None:
        super().__init__()
        self.i = i
        self.norm = nn.LayerNorm(WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        y = self.norm(x)
        slot, keys = cache.slots[self.i], self.key(y)
        slot.keys = keys if slot.keys is None else torch.cat([slot.keys, keys])
        z = x + self.out(torch.tanh(y + slot.keys.mean(0)))
        self.kept = self.key(self.out(y)).square().mean()
        return z


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(map(Block, range(LAYERS)))

    def forward(self, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cache)
        return x.square().mean()


def cached(model: nn.Module) -> torch.Tensor:
    """The outputs of the first forward are used by nothing, its cache is."""
    cache = Cache()
    model(torch.tensor([0, 1, 2]), cache)
    return model(torch.tensor([3, 4]), cache)


def kept(model: nn.Module) -> torch.Tensor:
    """The outputs are used by nothing, what the blocks keep is."""
    model(torch.tensor([0, 1, 2]), Cache())
    return sum(layer.kept for layer in model.layers)


LOSSES = {"cached": cached, "kept": kept}


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def gradients(rank: int, world: int, mode: str, loss: str) -> dict[str, torch.Tensor]:
    model = make_net()
    mesh: Any = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    options = {"replicate_mesh": mesh["replicate"]}
    if mode != "hsdp":
        mesh, options = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)), {}
    dmuon.dedicate_params(
        model,
        mesh["shard"],
        lambda name, param: "layers." in name and param.ndim == 2,
        reshard_after_forward=mode != "z2",
        **options,
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=mode != "z2")
    fully_shard(model, mesh=mesh, reshard_after_forward=mode != "z2")
    for _ in range(2):
        model.zero_grad()
        LOSSES[loss](model).backward()
    return {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("mode", "world"), [("z2", 2), ("z3", 2), ("hsdp", 4)])
def test_backward_through_what_a_block_left_behind_has_the_gradients_of_one_process(
    mode: str, world: int, loss: str
) -> None:
    model = make_net()
    LOSSES[loss](model).backward()
    for got in run_ranks(gradients, world, mode, loss):
        for name, param in model.named_parameters():
            if param.grad is not None:
                torch.testing.assert_close(
                    got[name], param.grad, rtol=2e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
