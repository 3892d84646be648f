"""The training run of `training.py` on models that plain torch has sharded, with `Muon` by predicate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon_hf.core as dmuon
from tests.distributed.training import HYPER, Run, batch_of, blocks_of, full, is_matrix, make_model, row_state
from tests.harness import models


@dataclass(frozen=True)
class Mode:
    """A mesh and what is done to the model on it.

    Attributes:
        mesh: Sizes of its dimensions.
        names: Their names; ``tp`` is tensor parallelism, the others are FSDP2's.
        reshard: Z3, or Z2.
    """

    mesh: tuple[int, ...]
    names: tuple[str, ...]
    reshard: bool = True

    @property
    def world(self) -> int:
        return torch.Size(self.mesh).numel()

    @property
    def data_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name != "tp")

    def shard(self, model: nn.Module) -> DeviceMesh:
        mesh = init_device_mesh("cpu", self.mesh, mesh_dim_names=self.names)
        if "tp" in self.names:
            for block in blocks_of(model):
                parallelize_module(block, mesh["tp"], tp_plan(block))
        if self.data_names:
            data = mesh[self.data_names] if "tp" in self.names else mesh
            for block in blocks_of(model):
                fully_shard(block, mesh=data, reshard_after_forward=self.reshard)
            fully_shard(model, mesh=data, reshard_after_forward=self.reshard)
        return mesh

    def data_rank(self, rank: int) -> tuple[int, int]:
        """Which part of the batch this rank has, of how many: ranks of one tensor-parallel group have the same."""
        tp = self.mesh[self.names.index("tp")] if "tp" in self.names else 1
        return rank // tp, self.world // tp


MODES: dict[str, Mode] = {
    "z2": Mode((2,), ("dp",), reshard=False),
    "z3": Mode((4,), ("dp",)),
    "z3_1": Mode((1,), ("dp",)),
    "hsdp": Mode((2, 2), ("replicate", "shard")),
    "tp": Mode((2,), ("tp",)),
    "fsdp_tp": Mode((2, 2), ("dp", "tp")),
    "hsdp_tp": Mode((2, 2, 2), ("replicate", "shard", "tp")),
}


def tp_plan(block: nn.Module) -> dict[str, Any]:
    """Column- and row-wise; what is left out is whole on every rank of the tensor-parallel group."""
    if hasattr(block, "self_attn"):
        return {
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
    if hasattr(block, "fold"):
        # Local outputs of torch forget that they were cut unevenly.
        return {"wide": ColwiseParallel(use_local_output=False), "fold": RowwiseParallel()}
    return {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}


@dataclass(frozen=True)
class ShardedRun:
    """A run of ``training.py`` in a mode of this file; ``max_norm`` clips with torch's function."""

    mode: str
    run: Run = field(default_factory=lambda: Run("sharded"))
    max_norm: float | None = None


def prepare(sharded: ShardedRun) -> tuple[nn.Module, dmuon.Muon]:
    model = make_model(sharded.run.model).to(sharded.run.dtype)
    MODES[sharded.mode].shard(model)
    return model, dmuon.Muon(model, predicate=is_matrix, **{**HYPER, **sharded.run.muon})


def backward(model: nn.Module, sharded: ShardedRun, step: int, rank: int) -> None:
    part, parts = MODES[sharded.mode].data_rank(rank)
    run = sharded.run
    for micro in range(run.accumulate):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(micro == run.accumulate - 1)
        batch = models.rank_part(batch_of(run, step), part, parts, micro=micro, n_micro=run.accumulate)
        (models.loss_of(model, batch) / run.accumulate).backward()


def train(rank: int, world: int, sharded: ShardedRun) -> dict[str, Any]:
    """Train; on every rank the gradients, weights and momenta after every step, whole."""
    model, optimizer = prepare(sharded)
    names = {id(param): name for name, param in model.named_parameters()}
    history: dict[str, Any] = {"grads": [], "weights": [], "momenta": [], "second_moments": [], "norms": []}
    for step in range(sharded.run.steps):
        backward(model, sharded, step, rank)
        if sharded.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), sharded.max_norm)
            history["norms"].append(float(full(norm)))
        params = [param for group in optimizer.param_groups for param in group["params"]]
        history["grads"].append({names[id(param)]: full(param.grad) for param in params})
        optimizer.step()
        optimizer.zero_grad()
        history["weights"].append({names[id(param)]: full(param) for param in params})
        momenta = {names[id(p)]: full(s.get("momentum_buffer")) for p, s in optimizer.state.items()}
        history["momenta"].append({name: value for name, value in momenta.items() if value is not None})
        history["second_moments"].append(row_state(model, optimizer))
    history["ns_matrices"] = optimizer.ns_matrices
    return history
