"""Training over NCCL on several GPUs equals one process. The same program over gloo on CPUs tests the test."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from tests.distributed.training import HYPER, Run, assert_same_training, batch_of, full, is_matrix, reference
from tests.harness import run_ranks
from tests.harness.models import loss_of, rank_part, uneven_model

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
STEPS = 3


def build(mode: str, device: torch.device, world: int) -> tuple[nn.Module, dmuon.Muon]:
    model = uneven_model().to(device)
    replicate = 2 if mode == "hsdp" else 1
    mesh = init_device_mesh(device.type, (replicate, world // replicate), mesh_dim_names=("replicate", "shard"))
    shards = mesh if mode == "hsdp" else mesh["shard"]
    reshard = mode != "z2"
    dmuon.dedicate_params(
        model,
        mesh["shard"],
        is_matrix,
        reshard_after_forward=reshard,
        replicate_mesh=mesh["replicate"] if mode == "hsdp" else None,
    )
    for block in model.layers:
        fully_shard(block, mesh=shards, reshard_after_forward=reshard)
    fully_shard(model, mesh=shards, reshard_after_forward=reshard)
    return model, dmuon.Muon(model, ns_backend=dmuon.NewtonSchulz(dtype=torch.float32, kernel="cublas"), **HYPER)


def train(rank: int, world: int, kind: str, mode: str, accumulate: int) -> dict[str, Any]:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    # Without a backend, as accelerate and torchtitan do: NCCL for CUDA has to be recognised in it.
    dist.init_process_group()
    run = Run(mode, "uneven", steps=STEPS)
    model, optimizer = build(mode, device, world)
    history: dict[str, Any] = {"grads": [], "weights": []}
    for step in range(STEPS):
        for micro in range(accumulate):
            part = rank_part(batch_of(run, step), rank, world, micro=micro, n_micro=accumulate).to(device)
            with contextlib.nullcontext() if micro == accumulate - 1 else dmuon.no_sync(model):
                (loss_of(model, part) / accumulate).backward()
        history["grads"].append(whole({name: param.grad for name, param in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
        history["weights"].append(whole(dict(model.named_parameters())))
    counts = torch.tensor([float(optimizer.ns_matrices)], device=device)
    dist.all_reduce(counts)
    history["ns_matrices"] = int(counts)
    return history


def whole(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    gathered = {name: full(tensor) for name, tensor in tensors.items()}
    return {name: None if tensor is None else tensor.cpu() for name, tensor in gathered.items()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("mode", "world"), [("z2", 2), ("z3", 2), ("hsdp", 4)])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_training_on_many_devices_equals_one_process(kind: str, mode: str, world: int, accumulate: int) -> None:
    if kind == "cuda" and world > GPUS:
        pytest.skip(f"needs {world} GPUs, this machine has {GPUS}")
    run = Run(mode, "uneven", steps=STEPS)
    expected = reference(run)
    for result in run_ranks(train, world, kind, mode, accumulate, init=False, timeout=120):
        assert_same_training(run, result, expected, rtol=1e-3)
