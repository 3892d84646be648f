"""A rank that would leave the order of collectives asks first, so that no backend ends a process over unequal sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.lockstep import watch
from tests.distributed.lockstep_setup import HYPER, is_matrix, part_of
from tests.distributed.training import full
from tests.harness import run_ranks, run_ranks_outcomes
from tests.harness.faults import die
from tests.harness.reference import ReferenceOptimizer

WIDTH = 12
ENV = {"DMUON_HANG_SECONDS": "1", "DMUON_HANG_ABORT_SECONDS": "30"}


class Layer(nn.Module):
    """Of a size of its own, what FSDP2 keeps of it as well, with experts that are units where ``experts``."""

    def __init__(self, i: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH * (2 + i))
        self.down = nn.Linear(WIDTH * (2 + i), WIDTH, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH * (1 + i)) for _ in range(experts))

    def forward(self, x: torch.Tensor, idle: Collection[int]) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        for i, expert in enumerate(self.experts):
            if i not in idle:
                y = y + expert(y).mean()
        return x + y


class Net(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, experts) for i in range(4))
        self.layers[0].norm.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(
        self, x: torch.Tensor, skip: Collection[int] = (), unused: Collection[int] = (), idle: Collection[int] = ()
    ) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i not in skip:
                y = layer(x, idle if i == 1 else ())
                x = x if i in unused else y
        return self.head(x).square().mean()


def make_net(experts: int = 0) -> Net:
    torch.manual_seed(0)
    return Net(experts)


def prepare(world: int, mode: str, experts: int = 0) -> tuple[Net, dmuon.Muon]:
    model = make_net(experts)
    mesh: Any
    if mode == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(model, mesh["shard"], is_matrix, replicate_mesh=mesh["replicate"])
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dmuon.dedicate_params(model, mesh, is_matrix, reshard_after_forward=mode == "z3")
    options = {"mesh": mesh, "reshard_after_forward": mode != "z2"}
    for layer in model.layers:
        for expert in layer.experts:
            fully_shard(expert, **options)
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model, dmuon.Muon(model, **HYPER)


def train_step(model: Net, optimizer: dmuon.Muon, step: int, rank: int, world: int, **options: Any) -> None:
    model(part_of(step, rank, world), **options).backward()
    optimizer.step()
    optimizer.zero_grad()


def remove_a_block(model: Net) -> dict[str, Any]:
    model.layers = nn.ModuleList(list(model.layers)[:-1])
    return {}


def replace_a_block(model: Net) -> dict[str, Any]:
    model.layers[2] = Layer(2, 0)
    return {}


def pass_over_a_block(model: Net) -> dict[str, Any]:
    return {"skip": (1,)}


def ignore_a_block(model: Net) -> dict[str, Any]:
    return {"unused": (2,)}


def leave_an_expert_idle(model: Net) -> dict[str, Any]:
    return {"idle": (0,)}


def freeze_what_fsdp_keeps(model: Net) -> dict[str, Any]:
    model.layers[1].norm.requires_grad_(False)
    return {}


def unfreeze_what_fsdp_keeps(model: Net) -> dict[str, Any]:
    model.layers[0].norm.requires_grad_(True)
    return {}


FAULTS: dict[str, Callable[[Net], dict[str, Any]]] = {
    fault.__name__: fault
    for fault in (
        remove_a_block,
        replace_a_block,
        pass_over_a_block,
        ignore_a_block,
        leave_an_expert_idle,
        freeze_what_fsdp_keeps,
        unfreeze_what_fsdp_keeps,
    )
}


def train_with_fault(rank: int, world: int, mode: str, fault: str, at: int, experts: int) -> None:
    """The last rank does something else from step ``at`` on."""
    model, optimizer = prepare(world, mode, experts)
    for step in range(3):
        options = FAULTS[fault](model) if rank == world - 1 and step == at else {}
        train_step(model, optimizer, step, rank, world, **options)
    dist.barrier()


@pytest.mark.parametrize(
    ("mode", "fault", "at", "experts"),
    [
        ("z2", "remove_a_block", 0, 0),
        ("z3", "remove_a_block", 1, 0),
        ("hsdp", "remove_a_block", 1, 0),
        ("z3", "replace_a_block", 1, 0),
        ("z2", "pass_over_a_block", 1, 0),
        ("z3", "pass_over_a_block", 0, 0),
        ("hsdp", "pass_over_a_block", 1, 0),
        ("z3", "ignore_a_block", 1, 0),
        ("hsdp", "leave_an_expert_idle", 1, 2),
        ("z3", "leave_an_expert_idle", 0, 2),
        ("z2", "freeze_what_fsdp_keeps", 1, 0),
        ("z3", "unfreeze_what_fsdp_keeps", 1, 0),
        ("hsdp", "unfreeze_what_fsdp_keeps", 1, 0),
    ],
)
def test_rank_that_does_something_else_is_a_named_error_on_every_rank(
    mode: str, fault: str, at: int, experts: int
) -> None:
    world = 4 if mode == "hsdp" else 2
    for outcome in run_ranks_outcomes(train_with_fault, world, mode, fault, at, experts, timeout=60, env=ENV):
        assert outcome.exception is not None and outcome.exception.is_a(LockstepError), outcome.report()
        assert "layers." in outcome.exception.message, outcome.report()


def lose_a_peer_that_is_asked(rank: int, world: int) -> str:
    watch._MARGIN = 0.0
    model, optimizer = prepare(world, "z3")
    train_step(model, optimizer, 0, rank, world)
    if rank == 1:
        die()
    with pytest.raises(LockstepError) as lost:
        model.layers[2](part_of(1, rank, world), ())  # not what the last step began with
    return str(lost.value)


def test_peer_that_was_killed_is_named_where_it_is_asked() -> None:
    outcome = run_ranks_outcomes(lose_a_peer_that_is_asked, 2, timeout=60, env=ENV)[0]
    assert "a peer was lost" in str(outcome.result), outcome.report()


CHANGES: list[dict[str, Any]] = [{}, {"skip": (1,)}, {"skip": (1,)}, {}, {"skip": (0, 2)}, {"unused": (3,)}, {}, {}]
ALONE = len(CHANGES) - 2


def train_and_evaluate(rank: int, world: int, mode: str) -> list[dict[str, torch.Tensor]]:
    """All ranks change what they run together; at last one replica evaluates by itself."""
    model, optimizer = prepare(world, mode)
    weights = []
    for step, options in enumerate(CHANGES):
        train_step(model, optimizer, step, rank, world, **options)
        if mode != "hsdp" or step != ALONE or rank >= world // 2:
            with torch.no_grad():
                for _ in range((step + 1) % 3):
                    model(part_of(100, rank, world))
        weights.append({name: full(param) for name, param in model.named_parameters()})
    return weights


@pytest.mark.parametrize(("mode", "world"), [("z2", 2), ("z3", 2), ("hsdp", 4)])
def test_ranks_that_change_what_they_run_together_train_like_one_process(mode: str, world: int) -> None:
    model = make_net()
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    runs = run_ranks(train_and_evaluate, world, mode, env=ENV)
    for step, options in enumerate(CHANGES):
        for rank in range(world):
            (model(part_of(step, rank, world), **options) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        for run in runs:
            for name, param in model.named_parameters():
                torch.testing.assert_close(run[step][name], param.detach(), rtol=2e-4, atol=1e-5)
