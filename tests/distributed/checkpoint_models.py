"""Dedicated models on every topology, and training steps on them, for checkpoint tests."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dmuon_hf.core import Muon, dedicate_params
from tests.harness.models import dense_batch, loss_of, rank_part, tiny_llama, token_batch, uneven_model

Layout = Literal["single", "fsdp", "hsdp"]

BATCH = 24


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return "layers" in name and param.ndim == 2


def build(kind: str, layout: Layout, world: int, *, seed: int, lr: float = 0.02) -> tuple[nn.Module, Muon]:
    """``kind``: ``uneven``, ``llama`` or ``tied``; with a buffer added, on a mesh of all ranks or in one process."""
    model = uneven_model(seed) if kind == "uneven" else tiny_llama(seed, tied=kind == "tied")
    model.register_buffer("steps_seen", torch.tensor([float(seed)]))
    if layout == "single":
        dedicate_params(model, None, is_matrix)
    else:
        shards = world if layout == "fsdp" else 2
        mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard"))
        replicate = mesh["replicate"] if layout == "hsdp" else None
        dedicate_params(model, mesh["shard"], is_matrix, replicate_mesh=replicate)
        sharded = mesh if layout == "hsdp" else mesh["shard"]
        for layer in model.layers if kind == "uneven" else model.model.layers:
            fully_shard(layer, mesh=sharded)
        fully_shard(model, mesh=sharded)
    optimizer = Muon(model, lr=lr, adamw_lr=lr / 10, adamw_weight_decay=0.1, weight_decay=0.1)
    return model, optimizer


def train(kind: str, model: nn.Module, optimizer: Muon, rank: int, world: int, steps: range) -> None:
    """Steps on the same whole batches whatever the number of ranks."""
    for step in steps:
        whole = dense_batch(step, batch=BATCH, width=64) if kind == "uneven" else token_batch(step, batch=BATCH)
        loss_of(model, rank_part(whole, rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()


def single_run(kind: str, steps: range, *, seed: int = 1) -> tuple[nn.Module, Muon]:
    model, optimizer = build(kind, "single", 1, seed=seed)
    train(kind, model, optimizer, 0, 1, steps)
    return model, optimizer


def flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """Tensors and numbers of nested dicts by path."""
    if isinstance(nested, dict):
        return {path: value for key, item in nested.items() for path, value in flat(item, f"{prefix}/{key}").items()}
    if isinstance(nested, (list, tuple)):
        return {path: value for key, item in enumerate(nested) for path, value in flat(item, f"{prefix}/{key}").items()}
    return {prefix: nested}


def assert_close(left: Any, right: Any, *, atol: float = 2e-5) -> None:
    """Equal structure, equal numbers and names, tensors equal up to the rounding of another summation order."""
    ours, theirs = flat(left), flat(right)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                value, theirs[path], rtol=1e-4, atol=atol, msg=lambda text, path=path: f"{path}: {text}"
            )
        else:
            assert value == theirs[path], path
