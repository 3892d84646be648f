"""Is it Muon, on the whole matrix, once a step, on every number of ranks and on the same weights on each."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon_hf.core as dmuon
from dmuon_hf.core.device import DeviceHandle
from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.runtime import runtime_of
from dmuon_hf.core.runtime.collectives import InFlight
from tests.harness import run_ranks
from tests.harness.reference import ReferenceOptimizer

HYPER: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "adamw_lr": 1e-2, "adamw_weight_decay": 0.1}


class Narrow(nn.Module):
    """A matrix between a `(1, N)` gate and an `(N, 1)` expansion, with a frozen and an unused weight beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 10, bias=False)
        self.gate = nn.Linear(10, 1, bias=False)
        self.expand = nn.Linear(1, 5, bias=False)
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.unused = nn.Linear(4, 3)
        self.unused_matrix = nn.Linear(4, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.expand(torch.tanh(self.gate(torch.tanh(self.body(x)))))).square().mean()


def _is_matrix(name: str, param: nn.Parameter) -> bool:
    return name in ("body.weight", "unused_matrix.weight", "frozen.weight")


def _narrow() -> Narrow:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Narrow()


def _batch(step: int) -> torch.Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@dataclass
class _CountingNS:
    """Newton-Schulz that counts the matrices it is given."""

    matrices: int = 0

    def __call__(self, stacked: torch.Tensor, *, steps: int | None = None) -> torch.Tensor:
        self.matrices += 1 if stacked.ndim == 2 else stacked.shape[0]
        return dmuon.NewtonSchulz()(stacked, steps=steps)


def _train_narrow(rank: int, world: int, steps: int) -> dict[str, Any]:
    model = _narrow()
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, _is_matrix)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, **HYPER)
    counting = _CountingNS()
    optimizer._orthogonalize = counting
    for step in range(steps):
        model(_batch(step).chunk(world)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    calls = torch.tensor([counting.matrices])
    dist.all_reduce(calls)
    return {"weights": {name: _whole(p) for name, p in model.named_parameters()}, "calls": int(calls)}


@pytest.mark.parametrize("world", [2, 3])
def test_narrow_frozen_and_unused_weights_train_like_one_process(world: int) -> None:
    steps = 3
    model = _narrow()
    untouched = {n: p.detach().clone() for n, p in model.named_parameters() if n.startswith(("frozen", "unused"))}
    reference = ReferenceOptimizer(model, lambda name, param: name == "body.weight", **HYPER)
    for step in range(steps):
        model(_batch(step)).backward()
        reference.step()
        reference.zero_grad()
    for result in run_ranks(_train_narrow, world, steps):
        assert result["calls"] == steps
        for name, param in model.named_parameters():
            if name not in untouched:
                torch.testing.assert_close(result["weights"][name], param.detach(), rtol=1e-4, atol=1e-5)
        for name, weight in untouched.items():
            assert torch.equal(result["weights"][name], weight), f"{name} was decayed or stepped"


class Branches(nn.Module):
    """Two matrices of which a forward may leave the second without an influence on the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        y, z = self.first(x), self.second(x)
        return (y + z if both else y).square().mean()


def _branches() -> Branches:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return Branches()


def _train_branches(rank: int, world: int) -> dict[str, torch.Tensor]:
    model = _branches()
    # Weights that are freed after forward are gathered again in backward, which all ranks have to reach then.
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, lambda name, param: True, reshard_after_forward=False)
    optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.0)
    for step in range(3):
        model(_batch(step).chunk(world)[rank], both=rank == 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: _whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", [2, 3])
def test_rank_without_a_gradient_counts_as_zero_in_the_mean(world: int) -> None:
    model = _branches()
    reference = ReferenceOptimizer(model, lambda name, param: True, lr=0.02, weight_decay=0.0)
    for step in range(3):
        parts = _batch(step).chunk(world)
        sum(model(part, both=rank == 0) / world for rank, part in enumerate(parts)).backward()
        reference.step()
        reference.zero_grad()
    for weights in run_ranks(_train_branches, world):
        for name, param in model.named_parameters():
            torch.testing.assert_close(weights[name], param.detach(), rtol=1e-4, atol=1e-5)


# -- ranks that drift apart --------------------------------------------------------------------------------------------


class _Work:
    """A collective that ends when it is waited for."""

    def wait(self) -> bool:
        return True


def test_buffers_of_a_collective_live_until_it_is_waited_for() -> None:
    send, receive = torch.zeros(4), torch.zeros(4)
    alive = [weakref.ref(send), weakref.ref(receive)]
    record = InFlight(DeviceHandle(torch.device("cpu")), [_Work()], None, [send, receive])
    del send, receive
    gc.collect()
    assert all(reference() is not None for reference in alive)
    record.wait()
    assert all(reference() is None for reference in alive)


def _drift(rank: int, world: int, fault: str) -> str:
    """Two good steps, a rank that drifts, one more step; the error of this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6), nn.Linear(6, 1))
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    dmuon.dedicate_params(
        model, mesh["shard"], lambda name, param: name in ("0.weight", "1.weight"), replicate_mesh=mesh["replicate"]
    )
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=0.1)

    def step() -> None:
        model(torch.ones(2, 6) * (rank + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    runtime = runtime_of(model)
    assert runtime is not None
    unit = runtime.units[1]
    if fault == "gather" and rank == 1:
        gather = unit.weights.placement.gather

        def damaged(buffer: torch.Tensor, versions: Any) -> InFlight:
            flight = gather(buffer, versions)
            flight.wait()
            buffer[3] += 1.0
            return flight

        unit.weights.placement.gather = damaged  # type: ignore[method-assign]
    if fault == "norm" and rank == 3:
        with torch.no_grad():
            model[2].weight.to_local().add_(1.0)
    try:
        step()
    except LockstepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none", ""),
        ("gather", "1.weight differs between data-parallel ranks 0 and 1"),
        ("norm", "2.weight differs between data-parallel ranks 1 and 3"),
    ],
)
def test_debug_mode_names_the_parameter_that_a_rank_holds_differently(fault: str, message: str) -> None:
    for error in run_ranks(_drift, 4, fault, env={"DMUON_DEBUG": "1"}):
        assert error.startswith(message) and bool(error) is bool(message)


def test_debug_mode_is_off_by_default() -> None:
    assert run_ranks(_drift, 4, "norm") == [""] * 4
