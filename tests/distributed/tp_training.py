"""The training run of `training.py` with owners over the data-parallel ranks of a mesh with a tensor-parallel axis."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import dmuon_hf.core as dmuon
from tests.distributed.sharded_training import tp_plan
from tests.distributed.training import HYPER, Run, batch_of, blocks_of, full, is_matrix, make_model, row_state
from tests.harness import models

MODES: dict[str, dict[str, int]] = {
    "tp": {"shard": 1, "tp": 2},
    "tp_3": {"shard": 1, "tp": 3},
    "shard_tp": {"shard": 2, "tp": 2},
    "hsdp_tp": {"replicate": 2, "shard": 2, "tp": 2},
    "ddp_tp": {"dp": 2, "tp": 2},
}


def world_of(mode: str) -> int:
    return torch.Size(MODES[mode].values()).numel()


class Whole(ParallelStyle):
    """Parameters replicated over the axis; each rank computes on all of the input, or on its rows of it."""

    def __init__(self, rows: bool = False) -> None:
        self.placement: Placement = Shard(0) if rows else Replicate()

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def before(module: nn.Module, args: Any, mesh: DeviceMesh) -> Any:
            (x,) = args
            x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
            return x.redistribute(placements=[self.placement])

        def after(module: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
            return out.redistribute(placements=[Replicate()]).to_local()

        return distribute_module(module, mesh, None, before, after)


@dataclass(frozen=True)
class TpRun:
    """A run of ``training.py`` in a mode of this file.

    Attributes:
        everything: Every parameter is a DTensor on the axis, so that torch's own clipping takes them together.
        reshard: Z3, or Z2.
        max_norm: Clip with torch's function.
    """

    mode: str
    run: Run = field(default_factory=lambda: Run("tp"))
    everything: bool = False
    reshard: bool = True
    max_norm: float | None = None

    @property
    def world(self) -> int:
        return world_of(self.mode)


def parallelize(model: nn.Module, mesh: DeviceMesh, *, everything: bool) -> None:
    for block in blocks_of(model):
        plan = tp_plan(block)
        if everything:
            rest = [name for name, child in block.named_children() if name not in plan]
            # One of them computes on rows, so that its gradients are partial sums.
            plan |= {name: Whole(rows=name in ("odd", "gate_proj")) for name in rest}
        parallelize_module(block, mesh, plan)
    if everything:
        parallelize_module(model, mesh, {"head": Whole()})


def prepare_model(tp: TpRun, **dedicate: Any) -> nn.Module:
    sizes = MODES[tp.mode]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = make_model(tp.run.model).to(tp.run.dtype)
    parallelize(model, mesh["tp"], everything=tp.everything)
    dedicate = {**tp.run.dedicate, **dedicate}
    if "dp" in sizes:
        dmuon.dedicate_params_ddp_tp(model, mesh["dp"], is_matrix, **dedicate)
        return dmuon.replicate_tp(model, mesh["dp"])
    replicate = mesh["replicate"] if "replicate" in sizes else None
    dmuon.dedicate_params(
        model,
        mesh["shard"],
        is_matrix,
        replicate_mesh=replicate,
        reshard_after_forward=tp.reshard,
        **dedicate,
    )
    data = mesh["replicate", "shard"] if replicate is not None else mesh["shard"]
    for block in blocks_of(model):
        fully_shard(block, mesh=data, reshard_after_forward=tp.reshard)
    fully_shard(model, mesh=data, reshard_after_forward=tp.reshard)
    return model


def prepare(tp: TpRun) -> tuple[nn.Module, dmuon.Muon]:
    model = prepare_model(tp)
    return model, dmuon.Muon(model, **{**HYPER, **tp.run.muon})


def backward(model: nn.Module, tp: TpRun, step: int, rank: int) -> None:
    """Ranks of one tensor-parallel group have the same part of the batch."""
    axis = MODES[tp.mode]["tp"]
    run = tp.run
    for micro in range(run.accumulate):
        with contextlib.nullcontext() if micro == run.accumulate - 1 else dmuon.no_sync(model):
            batch = models.rank_part(
                batch_of(run, step), rank // axis, tp.world // axis, micro=micro, n_micro=run.accumulate
            )
            (models.loss_of(model, batch) / run.accumulate).backward()


def snapshot(model: nn.Module, optimizer: dmuon.Muon, kind: str) -> dict[str, torch.Tensor | None]:
    """Whole gradients, weights or momenta by name, on every rank."""
    if kind == "grads":
        return {name: full(param.grad) for name, param in model.named_parameters()}
    if kind == "weights":
        return {name: full(param) for name, param in model.named_parameters()}
    buffers = {name: optimizer.state[param].get("momentum_buffer") for name, param in model.named_parameters()}
    return {name: full(buffer) for name, buffer in buffers.items() if buffer is not None}


def train(rank: int, world: int, tp: TpRun) -> dict[str, Any]:
    """Train; on every rank the gradients, weights and momenta after every step, whole."""
    model, optimizer = prepare(tp)
    history: dict[str, Any] = {"grads": [], "weights": [], "momenta": [], "second_moments": [], "norms": []}
    for step in range(tp.run.steps):
        backward(model, tp, step, rank)
        if tp.max_norm is not None:
            history["norms"].append(float(full(torch.nn.utils.clip_grad_norm_(model.parameters(), tp.max_norm))))
        history["grads"].append(snapshot(model, optimizer, "grads"))
        optimizer.step()
        optimizer.zero_grad()
        history["weights"].append(snapshot(model, optimizer, "weights"))
        history["momenta"].append(snapshot(model, optimizer, "momenta"))
        history["second_moments"].append(row_state(model, optimizer))
    counts = torch.tensor([float(optimizer.ns_matrices)])
    dist.all_reduce(counts)
    history["ns_matrices"] = int(counts)
    return history
