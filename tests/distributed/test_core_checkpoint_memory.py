"""Gathering a state dict needs room for one whole tensor beside what the rank keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dmuon_hf.core as dmuon
from tests.harness import run_ranks

WIDTH = 64
WHOLE = 4 * WIDTH * WIDTH
"""Bytes of every large tensor of the model."""


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators have made inside the block and that are still referenced; their peak.

    A thread of gloo lets go of a collective's buffers a moment after it is over, so what goes beyond `expected` is
    given time to go away: only what somebody holds on to counts.
    """

    def __init__(self, expected: int) -> None:
        super().__init__()
        self.peak = 0
        self._expected = expected
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {reference for reference, _ in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self._made |= {reference: size for reference, size in _storages(result) if reference not in given}
        until = time.monotonic() + 20
        while self._live() > self._expected and time.monotonic() < until:
            time.sleep(0.001)
        self.peak = max(self.peak, self._live())
        return result

    def _live(self) -> int:
        self._made = {reference: size for reference, size in self._made.items() if not reference.expired()}
        return sum(self._made.values())


def _storages(values: Any) -> Iterator[tuple[StorageWeakRef, int]]:
    for value in tree_leaves(values):
        if type(value) in (torch.Tensor, nn.Parameter):
            yield StorageWeakRef(value.untyped_storage()), value.untyped_storage().nbytes()


class Net(nn.Module):
    """Four matrices for Muon between an embedding and a head that FSDP2 shards, all of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


MODEL, OPTIMIZER = 6, 8  # momentum of four matrices, two moments of two


def peaks(rank: int, world: int, rank0_only: bool) -> dict[str, int]:
    """Peak while each state dict is gathered, and what it returned, in whole tensors."""
    model = Net()
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, lambda name, param: "layers" in name)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model)
    assert isinstance(model.head.weight, DTensor)
    dmuon.get_model_state_dict(model)  # what is made once per process is no part of the peak
    measured = {}
    for name, size, call in (
        ("model", MODEL, lambda: dmuon.get_model_state_dict(model, rank0_only=rank0_only)),
        ("optimizer", OPTIMIZER, lambda: dmuon.get_optimizer_state_dict(model, optimizer, rank0_only=rank0_only)),
    ):
        keeps = rank == 0 or not rank0_only
        with LiveBytes((size if keeps else 1) * WHOLE + WHOLE // 2) as live:
            state = call()
        measured[name] = round(live.peak / WHOLE)
        measured[f"{name} kept"] = round(sum(dict(_storages(state)).values()) / WHOLE)
    return measured


@pytest.mark.parametrize("rank0_only", [True, False])
def test_gathering_a_state_dict_holds_one_whole_tensor_beside_what_is_kept(rank0_only: bool) -> None:
    everything = {"model": MODEL, "model kept": MODEL, "optimizer": OPTIMIZER, "optimizer kept": OPTIMIZER}
    nothing = {"model": 1, "model kept": 0, "optimizer": 1, "optimizer kept": 0}
    first, second = run_ranks(peaks, 2, rank0_only)
    assert first == everything
    assert second == (nothing if rank0_only else everything)
