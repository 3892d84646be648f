"""Which weights of a block take part on a rank is data: the order of collectives and the result do not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import dmuon_hf.core as dmuon
from tests.distributed.training import HYPER, dedicate_on, full
from tests.harness import run_ranks
from tests.harness.reference import ReferenceOptimizer

WIDTH, LAYERS, EXPERTS = 12, 4, 3
# A weight that takes no part in a pass: (layer, expert).
Idle = Collection[tuple[int, int]]


class Block(nn.Module):
    """A norm that FSDP2 keeps, a matrix that every token uses and experts that may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor, idle: Collection[int]) -> torch.Tensor:
        h = self.norm(x)
        y = self.shared(h)
        for i, expert in enumerate(self.experts):
            if i not in idle:
                y = y + torch.tanh(expert(h))
        return x + y


class Net(nn.Module):
    """Blocks behind an embedding that is frozen if ``frozen``: the first block's inputs then require no gradient."""

    def __init__(self, *, frozen: bool, kind: str | None) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)
        self.kind = kind

    def forward(self, x: torch.Tensor, idle: Idle) -> torch.Tensor:
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            mine = [expert for where, expert in idle if where == i]
            if self.kind is None:
                x = layer(x, mine)
            else:
                x = checkpoint(layer, x, mine, use_reentrant=self.kind == "reentrant")
        return self.head(x).square().mean()


EVERY = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
# By step, what is idle on a rank.
SCHEDULE: list[Callable[[int, int], Idle]] = [
    lambda rank, world: [(1, 0)] if rank == 1 else [],
    lambda rank, world: [(0, 1), (0, 2)] if rank == 1 else [],
    lambda rank, world: [(LAYERS - 1, 0), (1, 1)] if rank == 0 else [],
    lambda rank, world: [(2, 0)] if rank != world - 1 else [],
    lambda rank, world: [(rank % LAYERS, expert) for expert in range(EXPERTS)],
    lambda rank, world: EVERY if rank == 0 else [],
    lambda rank, world: [(1, 2), (3, 0)],
]


def make_net(frozen: bool, kind: str | None) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(frozen=frozen, kind=kind)


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return "layers." in name and param.ndim == 2


def part_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def losses(model: nn.Module, step: int, rank: int, world: int, twice: bool) -> list[torch.Tensor]:
    """One loss per backward pass; ``twice`` makes one of two forwards, with other experts idle in each."""
    idle = SCHEDULE[step % len(SCHEDULE)](rank, world)
    if not twice:
        return [model(part_of(step, rank), idle)]
    other = SCHEDULE[(step + 1) % len(SCHEDULE)](rank, world)
    return [(model(part_of(step, rank), idle) - model(part_of(step + 50, rank), other)).square()]


def prepare(world: int, mode: str, blocks: bool, frozen: bool, kind: str | None) -> tuple[Net, dmuon.Muon]:
    model = make_net(frozen, kind)
    mesh = dedicate_on(model, world, mode, is_matrix)
    for layer in model.layers if blocks else ():
        fully_shard(layer, mesh=mesh, reshard_after_forward=mode != "z2")
    fully_shard(model, mesh=mesh, reshard_after_forward=mode != "z2")
    return model, dmuon.Muon(model, **HYPER)


def train(
    rank: int, world: int, mode: str, blocks: bool, frozen: bool, kind: str | None, twice: bool, accumulate: int
) -> list[dict[str, torch.Tensor]]:
    """Gradients and weights after every step, whole."""
    model, optimizer = prepare(world, mode, blocks, frozen, kind)
    seen = []
    for step in range(0, len(SCHEDULE), accumulate):
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)
            for loss in losses(model, step + micro, rank, world, twice):
                loss.backward()
        seen.append(state(model, optimizer))
    return seen


def state(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    grads = {f"grad of {name}": full(param.grad) for name, param in model.named_parameters() if param.requires_grad}
    optimizer.step()
    optimizer.zero_grad()
    weights = {name: full(param) for name, param in model.named_parameters()}
    return {name: value for name, value in {**grads, **weights}.items() if value is not None}


def reference(world: int, frozen: bool, twice: bool, accumulate: int) -> list[dict[str, torch.Tensor]]:
    model = make_net(frozen, None)
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    seen = []
    for step in range(0, len(SCHEDULE), accumulate):
        for micro in range(accumulate):
            for rank in range(world):
                for loss in losses(model, step + micro, rank, world, twice):
                    (loss / world).backward()
        seen.append(state(model, optimizer))
    return seen


@pytest.mark.parametrize(
    ("mode", "world", "options"),
    [
        ("z2", 2, {}),
        ("z3", 2, {}),
        ("z3", 4, {"blocks": False, "frozen": True}),
        ("hsdp", 4, {}),
        ("z3", 2, {"kind": "nonreentrant"}),
        ("z3", 2, {"kind": "reentrant"}),
        ("z3", 2, {"accumulate": 2, "frozen": True}),
        ("hsdp", 4, {"kind": "nonreentrant", "accumulate": 2, "blocks": False}),
        ("z2", 4, {"twice": True}),
        ("z3", 2, {"twice": True, "blocks": False}),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else str(value),
)
def test_experts_without_tokens_on_some_ranks_train_like_one_process(
    mode: str, world: int, options: dict[str, Any]
) -> None:
    chosen = {"blocks": True, "frozen": False, "kind": None, "twice": False, "accumulate": 1, **options}
    expected = reference(world, chosen["frozen"], chosen["twice"], chosen["accumulate"])
    for got in run_ranks(train, world, mode, *chosen.values(), env={"DMUON_HANG_SECONDS": "5"}):
        for step, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            for name, want in theirs.items():
                error = (mine[name].double() - want.double()).norm() / want.double().norm().clamp_min(1e-9)
                assert error < 1e-3, f"{name} in step {step}: relative error {error:.1e}"
