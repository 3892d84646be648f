"""After any order of operations a forward sees the newest weights; a step applies the gradients since zero_grad."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from tests.distributed.training import full
from tests.harness import run_ranks
from tests.harness.reference import ReferenceOptimizer

WIDTH = 12
HYPER: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "adamw_lr": 1e-2, "adamw_weight_decay": 0.0}
OPERATIONS = (
    "train",
    "train",
    "train_no_sync",
    "two_forwards",
    "forward_only",
    "evaluate",
    "step",
    "step",
    "zero_grad",
    "module_zero_grad",
    "zero_between",
    "load",
    "load_distributed",
    "scale_in_place",
    "discard",
    "interrupted",
)


class InterruptedPassError(RuntimeError):
    """Stands for whatever ends a backward pass midway, on every rank."""


def interrupt(grad: torch.Tensor) -> None:
    raise InterruptedPassError


class Block(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, out, bias=False)
        self.down = nn.Linear(out, WIDTH, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Skipping(nn.Module):
    """Blocks, some of which a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(out) for out in (7, 16, 5, 9))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, skip: frozenset[int] = frozenset()) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i not in skip:
                x = layer(x)
        return self.head(x).square().mean()


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return "layers." in name and param.ndim == 2


class Pair:
    """The distributed model of this rank, and the whole job in one process as its oracle."""

    def __init__(self, mode: str, world: int, rank: int) -> None:
        self.rank, self.world = rank, world
        torch.manual_seed(0)
        self.oracle = Skipping()
        self.model = Skipping()
        self.model.load_state_dict(self.oracle.state_dict())
        self.oracle_optimizer = ReferenceOptimizer(self.oracle, is_matrix, **HYPER)
        if mode == "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
            dmuon.dedicate_params(self.model, mesh["shard"], is_matrix, replicate_mesh=mesh["replicate"])
        else:
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
            dmuon.dedicate_params(self.model, mesh, is_matrix, reshard_after_forward=mode == "z3")
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = dmuon.Muon(self.model, **HYPER)
        self.pending = False

    def run(self, operation: str, draw: random.Random) -> None:
        getattr(self, operation)(draw)

    def _loss(self, draw: random.Random, *, grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of this rank's part on the distributed model and of the whole batch on the oracle; they must agree."""
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        batch = torch.randn(2 * self.world, WIDTH, generator=generator)
        skip = frozenset(i for i in range(4) if draw.random() < 0.25)
        with contextlib.nullcontext() if grad else torch.no_grad():
            part = batch.chunk(self.world)[self.rank]
            mine = self.model(part, skip)
            whole = self.oracle(batch, skip)
            with torch.no_grad():
                torch.testing.assert_close(mine.detach(), self.oracle(part, skip), rtol=2e-4, atol=1e-6)
        return mine, whole

    def evaluate(self, draw: random.Random) -> None:
        self._loss(draw, grad=False)

    def forward_only(self, draw: random.Random) -> None:
        self._loss(draw, grad=True)

    def train(self, draw: random.Random) -> None:
        mine, whole = self._loss(draw, grad=True)
        mine.backward()
        whole.backward()
        self.pending = False

    def train_no_sync(self, draw: random.Random) -> None:
        with dmuon.no_sync(self.model):
            mine, whole = self._loss(draw, grad=True)
            mine.backward()
        whole.backward()
        self.pending = True

    def two_forwards(self, draw: random.Random) -> None:
        first, first_whole = self._loss(draw, grad=True)
        second, second_whole = self._loss(draw, grad=True)
        (first + 2 * second).backward()
        (first_whole + 2 * second_whole).backward()
        self.pending = False

    def step(self, draw: random.Random) -> None:
        if self.pending:
            self.train(draw)
        self.optimizer.step()
        self.oracle_optimizer.step()
        if draw.random() < 0.7:
            self.zero_grad(draw)
        self.compare()

    def zero_grad(self, draw: random.Random) -> None:
        self.optimizer.zero_grad()
        self.oracle_optimizer.zero_grad()
        self.pending = False

    def module_zero_grad(self, draw: random.Random) -> None:
        self.model.zero_grad()
        self.oracle_optimizer.zero_grad()
        self.pending = False

    def zero_between(self, draw: random.Random) -> None:
        """Zero gradients while a graph waits for its backward: what comes after it counts."""
        mine, whole = self._loss(draw, grad=True)
        (self.zero_grad if draw.random() < 0.5 else self.module_zero_grad)(draw)
        mine.backward()
        whole.backward()

    def discard(self, draw: random.Random) -> None:
        self.train(draw)
        self.zero_grad(draw)

    def interrupted(self, draw: random.Random) -> None:
        """A backward pass that ends midway, and a forward or not before gradients are zeroed."""

        def interrupt_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(interrupt)

        handle = self.model.layers[draw.randrange(4)].register_forward_hook(interrupt_backward)
        mine, _ = self._loss(draw, grad=True)
        handle.remove()
        # The layer may have been skipped.
        with contextlib.suppress(InterruptedPassError):
            mine.backward()
        if draw.random() < 0.4:
            self._loss(draw, grad=draw.random() < 0.5)
        (self.zero_grad if draw.random() < 0.5 else self.module_zero_grad)(draw)

    def _random_state(self, draw: random.Random) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        return {
            name: value + 0.1 * torch.randn(value.shape, generator=generator)
            for name, value in self.oracle.state_dict().items()
        }

    def load(self, draw: random.Random) -> None:
        """Plain full tensors through load_state_dict, owned parameters only (FSDP2's take DTensors)."""
        state = self._random_state(draw)
        own = {name: value for name, value in state.items() if is_matrix(name, value)}
        self.model.load_state_dict(own, strict=False)
        self.oracle.load_state_dict(own, strict=False)

    def load_distributed(self, draw: random.Random) -> None:
        state = self._random_state(draw)
        # FSDP2 leaves its root unsharded after a forward without gradients, and torch's loader does not expect that.
        self.model.reshard()
        set_model_state_dict(
            self.model, {k: v.clone() for k, v in state.items()}, options=StateDictOptions(full_state_dict=True)
        )
        self.oracle.load_state_dict(state)

    def scale_in_place(self, draw: random.Random) -> None:
        factor = 1 + 0.1 * draw.random()
        with torch.no_grad():
            for model in (self.model, self.oracle):
                for name, param in model.named_parameters():
                    if is_matrix(name, param):
                        param.mul_(factor)

    def compare(self) -> None:
        oracle = dict(self.oracle.named_parameters())
        for name, param in self.model.named_parameters():
            torch.testing.assert_close(
                full(param), oracle[name].detach(), rtol=5e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def in_order(rank: int, world: int, mode: str, operations: Sequence[str], seed: int) -> None:
    """What an operation draws depends on its place and the seed alone, so that a failing order can be cut short."""
    pair = Pair(mode, world, rank)
    i = 0
    try:
        for i, operation in enumerate(operations):
            pair.run(operation, random.Random(f"{seed} {i}"))
        pair.compare()
    except Exception as error:
        raise AssertionError(f"after {list(operations[: i + 1])}") from error


def interleave(rank: int, world: int, mode: str, seed: int, length: int) -> list[str]:
    """A random order of operations, which is returned."""
    operations = random.Random(f"{mode} {world} {seed}").choices(OPERATIONS, k=length)
    in_order(rank, world, mode, operations, seed)
    return operations


MODES = [("z2", 2), ("z3", 3), ("z3", 4), ("hsdp", 4)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("mode", "world"), MODES)
def test_any_order_of_operations_matches_one_process(mode: str, world: int, seed: int) -> None:
    results = run_ranks(interleave, world, mode, seed, 50, timeout=120)
    assert all(done == results[0] for done in results)
    assert len(set(results[0])) >= 8


# Each is as short as an order can be that goes wrong when one thing that FSDP2 keeps outlives the zeroing.
SHORT = {
    "accumulated_then_zeroed_by_the_optimizer": ["train_no_sync", "zero_grad", "train", "step"],
    "accumulated_then_zeroed_by_the_module": ["train_no_sync", "module_zero_grad", "train", "step"],
    "root_left_whole_by_a_forward": ["train", "forward_only", "module_zero_grad", "step"],
    "root_left_whole_by_an_evaluation": ["train", "evaluate", "module_zero_grad", "step"],
    "backward_that_broke": ["train", "interrupted", "train", "step"],
}


@pytest.mark.parametrize("order", SHORT)
@pytest.mark.parametrize(("mode", "world"), [("z2", 2), ("z3", 3), ("hsdp", 4)])
def test_gradients_from_before_zeroing_are_in_no_step(mode: str, world: int, order: str) -> None:
    run_ranks(in_order, world, mode, SHORT[order], 0, timeout=120)
