"""One training run in every topology, and the same run in one process with the reference optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dmuon_hf.core as dmuon
from dmuon_hf.core.plan import canonical_name
from tests.harness import models
from tests.harness.comm import CollectiveCounter
from tests.harness.reference import ReferenceOptimizer

MODES = ("local", "z2", "z3", "hsdp", "hsdp_sync", "ddp", "ddp_sync", "replicate")
HYPER: dict[str, Any] = {
    "lr": 0.02,
    "momentum": 0.9,
    "weight_decay": 0.1,
    "adamw_lr": 3e-3,
    "adamw_weight_decay": 0.05,
}


@dataclass(frozen=True)
class Run:
    """What one training run is made of; ``mode`` is one of `MODES`."""

    mode: str
    model: str = "uneven"
    steps: int = 5
    accumulate: int = 1
    checkpointing: str | None = None
    dtype: torch.dtype = torch.float32
    pure: bool = False  # every parameter is managed, nothing sharded by FSDP2
    dedicate: dict[str, Any] = field(default_factory=dict)
    wrapper: dict[str, Any] = field(default_factory=dict)
    muon: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    no_sync: Callable[[nn.Module], Any] = dmuon.no_sync


def make_model(name: str) -> nn.Module:
    factories: dict[str, Callable[[], nn.Module]] = {
        "uneven": models.uneven_model,
        "mlp": models.tiny_mlp,
        "llama": models.tiny_llama,
        "llama_tied": lambda: models.tiny_llama(tied=True),
    }
    return factories[name]()


def is_matrix(name: str, param: nn.Parameter) -> bool:
    """Every 2-D weight inside a layer."""
    return "layers." in name and param.ndim == 2 and min(param.shape) > 1


def is_anything(name: str, param: nn.Parameter) -> bool:
    return True


def muon_for_matrices(name: str, param: nn.Parameter) -> dict[str, Any]:
    """A policy that gives every managed parameter the route that it has without being managed."""
    return {"route": "muon" if is_matrix(name, param) else "adamw"}


def shards_of_rows(name: str, param: nn.Parameter) -> dict[str, Any]:
    """The same, with what is largest beside the matrices, and a vector, cut into rows."""
    rows = not is_matrix(name, param) and (param.ndim == 2 or "norm" in name)
    return {"route": "muon" if is_matrix(name, param) else "sharded_adamw" if rows else "adamw"}


def batch_of(run: Run, step: int) -> torch.Tensor:
    if run.model.startswith("llama"):
        return models.token_batch(step, batch=48)
    width = 64 if run.model == "uneven" else 16
    return models.dense_batch(step, batch=48, width=width).to(run.dtype)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(model.model.layers if hasattr(model, "model") else model.layers)


def enable_checkpointing(model: nn.Module, kind: str) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind == "reentrant"})
    model.train()
    if kind == "reentrant":
        model.enable_input_require_grads()


def prepare(run: Run, world: int) -> tuple[nn.Module, dmuon.Muon]:
    """The model dedicated, sharded and with its optimizer, for this rank of a run."""
    model = make_model(run.model).to(run.dtype)
    if run.checkpointing:
        enable_checkpointing(model, run.checkpointing)
    options = {"predicate": is_anything if run.pure else is_matrix, **run.dedicate}
    if run.mode == "local":
        dmuon.dedicate_params(model, None, **options)
    elif run.mode in ("z2", "z3"):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        reshard = run.mode == "z3"
        dmuon.dedicate_params(model, mesh, reshard_after_forward=reshard, **options)
        if not run.pure:
            shard(model, mesh, reshard)
    elif run.mode in ("ddp", "ddp_sync", "replicate"):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dmuon.dedicate_params_ddp(model, mesh, **options)
        if run.mode == "replicate":
            model = model if run.pure else dmuon.replicate(model, mesh)
        else:
            model = DistributedDataParallel(model, **run.wrapper)
    else:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(model, mesh["shard"], replicate_mesh=mesh["replicate"], **options)
        if not run.pure:
            shard(model, mesh, True)
    optimizer = dmuon.Muon(model, replicate_async=not run.mode.endswith("_sync"), **{**HYPER, **run.muon})
    return model, optimizer


def dedicate_on(model: nn.Module, world: int, mode: str, predicate: Callable[[str, nn.Parameter], bool]) -> DeviceMesh:
    """Dedicate a model in mode ``z2``, ``z3`` or ``hsdp`` and return the mesh for `fully_shard`."""
    if mode == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(model, mesh["shard"], predicate, replicate_mesh=mesh["replicate"])
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dmuon.dedicate_params(model, mesh, predicate, reshard_after_forward=mode == "z3")
    return mesh


def second_backward_of_zeroed(run: Run, rank: int, world: int) -> float:
    """The loss of a backward pass after zeros were loaded into a model that has taken a step."""
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    optimizer.step()
    optimizer.zero_grad()
    whole = dmuon.get_model_state_dict(model, rank0_only=False)
    dmuon.set_model_state_dict(model, {name: torch.zeros_like(value) for name, value in whole.items()})
    return backward(model, run, 1, rank, world)


def count_second_step(model: nn.Module, optimizer: dmuon.Muon, run: Run, rank: int, world: int) -> CollectiveCounter:
    """What the ``"backward"`` and the ``"step"`` of the second step send; the first makes what lasts."""
    backward(model, run, 0, rank, world)
    optimizer.step()
    optimizer.zero_grad()
    with CollectiveCounter() as counter:
        with counter.phase("backward"):
            backward(model, run, 1, rank, world)
        with counter.phase("step"):
            optimizer.step()
    return counter


def shard(model: nn.Module, mesh: Any, reshard: bool) -> None:
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def backward(model: nn.Module, run: Run, step: int, rank: int, world: int) -> float:
    """The backward passes of one optimizer step; returns the mean loss on this rank."""
    total = 0.0
    for micro in range(run.accumulate):
        part = models.rank_part(batch_of(run, step), rank, world, micro=micro, n_micro=run.accumulate)
        last = micro == run.accumulate - 1
        with contextlib.nullcontext() if last else run.no_sync(model):
            loss = models.loss_of(model, part) / run.accumulate
            loss.backward()
        total += float(loss)
    return total


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The whole tensor on every rank. A collective for DTensors."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {canonical_name(name, model): full(param) for name, param in model.named_parameters()}


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {canonical_name(name, model): full(param.grad) for name, param in model.named_parameters()}


def row_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole second moments of rows by name, on every rank; none but with the update rule ``"normuon"``."""
    params = {canonical_name(name, model): param for name, param in model.named_parameters()}
    kept = {name: optimizer.state[param].get("second_moment") for name, param in params.items()}
    return {name: full(value) for name, value in kept.items() if value is not None}


def train(rank: int, world: int, run: Run) -> dict[str, Any]:
    """Train; on every rank the gradients and weights after every step, whole."""
    model, optimizer = prepare(run, world)
    history: dict[str, Any] = {"grads": [], "weights": [], "losses": []}
    for step in range(run.steps):
        history["losses"].append(backward(model, run, step, rank, world))
        history["grads"].append(grads(model))
        optimizer.step()
        optimizer.zero_grad()
        history["weights"].append(snapshot(model))
    history["second_moments"] = row_state(model, optimizer)
    counts = torch.tensor([float(optimizer.ns_matrices)])
    if dist.is_initialized():
        dist.all_reduce(counts)
    history["ns_matrices"] = int(counts)
    return history


def reference(run: Run) -> dict[str, Any]:
    """The same run in one process on the whole batch, with plain autograd and the reference optimizer."""
    model = make_model(run.model).to(run.dtype)
    optimizer = ReferenceOptimizer(model, is_matrix, **{**HYPER, **run.reference})
    history: dict[str, Any] = {"grads": [], "weights": [], "matrices": len(optimizer.matrices)}
    for step in range(run.steps):
        models.loss_of(model, batch_of(run, step)).backward()
        history["grads"].append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        history["weights"].append({n: p.detach().clone() for n, p in model.named_parameters()})
    if optimizer.normuon_beta2 is not None:
        history["second_moments"] = {name: rows[:, 0].clone() for name, rows in optimizer.second_moments.items()}
    return history


def assert_same_training(run: Run, result: dict[str, Any], expected: dict[str, Any], *, rtol: float = 2e-4) -> None:
    """Gradients and weights of every step agree, relative to the size of each tensor."""
    for kind in ("grads", "weights"):
        for step in range(run.steps):
            for name, want in expected[kind][step].items():
                got = result[kind][step][name]
                if want is None:
                    assert got is None or not got.any(), f"{kind} {name} step {step}: expected none"
                    continue
                assert got is not None, f"{kind} {name} step {step}: missing"
                error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12)
                assert error < rtol, f"{run.mode} {kind} {name} step {step}: relative error {error:.2e}"
    for name, want in expected.get("second_moments", {}).items():
        error = (result["second_moments"][name].double() - want).norm() / want.norm()
        assert error < rtol, f"{run.mode} second moments of {name}: relative error {error:.2e}"
    assert result["ns_matrices"] == run.steps * expected["matrices"]
