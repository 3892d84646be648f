"""Matrices in three dimensions and experts one below the other train alike wherever they lie, each in its own sense."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from dmuon_hf.core import MatrixSpec
from tests.distributed.training import full
from tests.harness import models, run_ranks
from tests.harness.reference import ReferenceOptimizer

WIDTH, HEADS, SIZE, EXPERTS, INNER = 6, 3, 5, 2, 7
HYPER: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
SPECS = {
    "q": MatrixSpec(folded=True, transposed=True),
    "o": MatrixSpec(folded=True),
    "heads": MatrixSpec(folded=True, transposed=True, sections=(SIZE,) * HEADS),
    "down": MatrixSpec(sections=(INNER,) * EXPERTS, sections_transposed=True),
}
BY_HAND = {
    "q": lambda weight: [weight.flatten(1).T],
    "o": lambda weight: [weight.flatten(1)],
    "heads": lambda weight: [weight[:, head].T for head in range(HEADS)],
    "down": lambda weight: [part.T for part in weight.split(INNER)],
}
"""The matrices `(out, in)` of each weight, as the forward below multiplies by them."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(WIDTH, HEADS, SIZE) / 3)
        self.heads = nn.Parameter(torch.randn(WIDTH, HEADS, SIZE) / 3)
        self.o = nn.Parameter(torch.randn(WIDTH, HEADS, SIZE) / 3)
        self.up = nn.Linear(WIDTH, INNER * EXPERTS, bias=False)
        self.down = nn.Parameter(torch.randn(EXPERTS * INNER, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.einsum("bh,hnd->bnd", x, self.q) * torch.einsum("bh,hnd->bnd", x, self.heads)
        x = x + torch.einsum("bnd,hnd->bh", torch.tanh(heads), self.o)
        inner = torch.tanh(self.up(x)).unflatten(-1, (EXPERTS, INNER))
        return x + torch.einsum("bei,eih->bh", inner, self.down.view(EXPERTS, INNER, WIDTH))


def make() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(Layer(), Layer())


def spec_of(name: str, param: nn.Parameter) -> MatrixSpec | None:
    return SPECS.get(name.rpartition(".")[2])


def is_muon(name: str, param: nn.Parameter) -> bool:
    return param.ndim > 1


def prepare(mode: str, world: int, rule: str) -> tuple[nn.Module, dmuon.Muon]:
    model = make()
    options = {**HYPER, "lr_scale": "spectral", "update_rule": rule}
    if mode == "one process":
        dmuon.dedicate_params(model, None, is_muon, matrix_spec_fn=spec_of)
        return model, dmuon.Muon(model, **options)
    mesh = init_device_mesh("cpu", (world,))
    if mode == "replicated":
        dmuon.dedicate_params_ddp(model, mesh, is_muon, matrix_spec_fn=spec_of)
        return model, dmuon.Muon(model, **options)
    if mode == "owned":
        dmuon.dedicate_params(model, mesh, is_muon, matrix_spec_fn=spec_of)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if mode == "owned":
        return model, dmuon.Muon(model, **options)
    return model, dmuon.Muon(model, predicate=is_muon, matrix_spec_fn=spec_of, **options)


def train(rank: int, world: int, modes: tuple[str, ...], rule: str = "muon") -> dict[str, dict[str, Tensor | None]]:
    found = {}
    for mode in modes:
        model, optimizer = prepare(mode, world, rule)
        for step in range(3):
            batch = models.dense_batch(step, batch=8, width=WIDTH)
            model(batch.chunk(world)[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[mode] = {name: full(param) for name, param in model.named_parameters()}
    return found


def expected() -> dict[str, Tensor]:
    model = make()
    split = {name: BY_HAND[leaf] for name, _ in model.named_parameters() if (leaf := name.rpartition(".")[2]) in SPECS}
    scale = lambda out, into: math.sqrt(out / into)  # noqa: E731
    optimizer = ReferenceOptimizer(model, is_muon, split=split, scale=scale, **HYPER)
    for step in range(3):
        model(models.dense_batch(step, batch=8, width=WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def test_layouts_beyond_rows_train_as_the_matrices_of_the_forward_in_every_mode() -> None:
    alone = run_ranks(train, 1, ("one process",), init=False)
    for found in (*alone, *run_ranks(train, 4, ("owned", "replicated", "sharded"))):
        for mode, weights in found.items():
            for name, want in expected().items():
                torch.testing.assert_close(weights[name], want, rtol=2e-4, atol=2e-5, msg=f"{mode}: {name}")


def test_rows_of_layouts_beyond_rows_are_normalised_as_in_one_process() -> None:
    (alone,) = run_ranks(train, 1, ("one process",), "normuon", init=False)
    for found in run_ranks(train, 4, ("owned", "replicated", "sharded"), "normuon"):
        for weights in found.values():
            torch.testing.assert_close(weights, alone["one process"], rtol=2e-4, atol=2e-5)
