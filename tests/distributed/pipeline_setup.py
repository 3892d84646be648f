"""A model cut into pipeline stages, trained in every data-parallel mode, and the same run in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dmuon_hf.core as dmuon
from tests.harness.models import UnevenBlock, dense_batch
from tests.harness.reference import ReferenceOptimizer

LAYERS = 4
STAGES = 2
MICRO = 4
BATCH = 32
WIDTH = 64
HYPER: dict[str, Any] = {
    "lr": 0.02,
    "momentum": 0.9,
    "weight_decay": 0.1,
    "adamw_lr": 3e-3,
    "adamw_weight_decay": 0.05,
}
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Stage(nn.Module):
    """Some layers of the whole model, under their names there; the last stage has the head."""

    def __init__(self, layers: Mapping[str, nn.Module], head: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


@dataclass(frozen=True)
class Run:
    """One training run: how the ranks of a stage share its weights, and in which order microbatches pass."""

    mode: str = "z3"
    schedule: str = "1f1b"
    steps: int = 5
    muon: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return 2 if self.schedule == "interleaved" else 1


def whole_model(seed: int = 0) -> Stage:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = {str(i): UnevenBlock() for i in range(LAYERS)}
        return Stage(layers, nn.Linear(WIDTH, 3, bias=False))


def stages_of(model: Stage, count: int) -> list[Stage]:
    """The model cut into ``count`` stages of equally many layers."""
    names, size = list(model.layers), LAYERS // count
    return [
        Stage({name: model.layers[name] for name in names[i * size : (i + 1) * size]}, model.head if last else None)
        for i in range(count)
        for last in [i == count - 1]
    ]


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return "layers." in name and param.ndim == 2


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    return dense_batch(step, batch=BATCH, width=WIDTH), dense_batch(step, batch=BATCH, width=3, seed=1)


def pipeline_mesh(mode: str = "z3") -> DeviceMesh:
    """Two stages of two ranks; the two are replicas of each other under HSDP."""
    if mode == "tp":
        return init_device_mesh("cpu", (STAGES, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    return init_device_mesh("cpu", (STAGES, 2, 1), mesh_dim_names=("pp", "dp", "shard"))


def wrap(model: nn.Module, chunks: list[nn.Module], mesh: DeviceMesh, mode: str) -> list[nn.Module]:
    """Dedicate ``model``, this rank's stages, over its data-parallel ranks; what the pipeline is to run."""
    dp = mesh["dp"]
    if mode in ("ddp", "replicate"):
        dmuon.dedicate_params_ddp(model, dp, is_matrix)
        if mode == "ddp":
            return [DistributedDataParallel(chunk, process_group=dp.get_group()) for chunk in chunks]
        dmuon.replicate(model, dp)
        return chunks
    reshard = mode != "z2"
    if mode == "tp":
        for chunk in chunks:
            for layer in chunk.layers.values():
                parallelize_module(layer, mesh["tp"], {"wide": ColwiseParallel(output_layouts=Replicate())})
    if mode == "hsdp":
        dmuon.dedicate_params(model, mesh["shard"], is_matrix, replicate_mesh=dp)
        dp = mesh["dp", "shard"]
    elif mode == "pure":
        dmuon.dedicate_params(model, dp, lambda name, param: True, param_policy_fn=_route)
        return chunks
    elif mode != "sharded":
        dmuon.dedicate_params(model, dp, is_matrix, reshard_after_forward=reshard)
    for chunk in chunks:
        for layer in chunk.layers.values():
            fully_shard(layer, mesh=dp, reshard_after_forward=reshard)
        fully_shard(chunk, mesh=dp, reshard_after_forward=reshard)
    return chunks


def _route(name: str, param: nn.Parameter) -> dict[str, str]:
    return {"route": "muon" if is_matrix(name, param) else "adamw"}


def prepare(run: Run, mesh: DeviceMesh, parts: list[Stage]) -> tuple[nn.Module, list[nn.Module], dmuon.Muon]:
    """This rank's stages in one module, what runs them, and the optimizer."""
    chunks = list(parts[mesh.get_local_rank("pp") :: STAGES])
    model = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
    wrapped = wrap(model, chunks, mesh, run.mode)
    selected = {"predicate": is_matrix} if run.mode == "sharded" else {}
    return model, wrapped, dmuon.Muon(model, **{**HYPER, **selected, **run.muon})


def schedule_of(run: Run, mesh: DeviceMesh, wrapped: list[nn.Module], micro: int = MICRO) -> Any:
    group, count = mesh.get_group("pp"), STAGES * run.chunks
    stages = [
        PipelineStage(chunk, mesh.get_local_rank("pp") + i * STAGES, count, torch.device("cpu"), group=group)
        for i, chunk in enumerate(wrapped)
    ]
    if run.chunks > 1:
        return ScheduleInterleaved1F1B(stages, micro, loss_fn)
    return SINGLE[run.schedule](stages[0], micro, loss_fn)


def feed(schedule: Any, mesh: DeviceMesh, step: int) -> None:
    """One pass of this rank's half of the batch through the pipeline, forward and backward."""
    inputs, targets = batch_of(step)
    part, parts = mesh.get_local_rank("dp"), mesh["dp"].size()
    given = (inputs.chunk(parts)[part],) if mesh.get_local_rank("pp") == 0 else ()
    target = targets.chunk(parts)[part] if mesh.get_local_rank("pp") == STAGES - 1 else None
    schedule.step(*given, target=target)


def whole(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def name_in_whole(name: str) -> str:
    """Without the place of the stage among those of its rank."""
    first, _, rest = name.partition(".")
    return rest if first.isdigit() else name


def train(rank: int, world: int, run: Run) -> dict[str, Any]:
    """Train; gradients and weights of this rank's stages after every step, whole."""
    mesh = pipeline_mesh(run.mode)
    model, wrapped, optimizer = prepare(run, mesh, stages_of(whole_model(), STAGES * run.chunks))
    schedule = schedule_of(run, mesh, wrapped)
    history: dict[str, Any] = {"grads": [], "weights": []}
    for step in range(run.steps):
        feed(schedule, mesh, step)
        history["grads"].append({name_in_whole(n): whole(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        history["weights"].append({name_in_whole(n): whole(p) for n, p in model.named_parameters()})
    return history


def reference(steps: int = 5) -> dict[str, Any]:
    """The same run in one process on whole batches."""
    model = whole_model()
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    history: dict[str, Any] = {"grads": [], "weights": []}
    for step in range(steps):
        inputs, targets = batch_of(step)
        loss_fn(model(inputs), targets).backward()
        history["grads"].append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        history["weights"].append({n: p.detach().clone() for n, p in model.named_parameters()})
    return history


def assert_same_training(results: list[dict[str, Any]], expected: dict[str, Any], *, rtol: float = 2e-4) -> None:
    """Gradients and weights of every stage and step agree with those of one process; no stage is left out."""
    for kind in ("grads", "weights"):
        for step, wanted in enumerate(expected[kind]):
            seen: set[str] = set()
            for rank, result in enumerate(results):
                for name, got in result[kind][step].items():
                    seen.add(name)
                    want = wanted[name].double()
                    assert got is not None, f"rank {rank} {kind} {name} step {step}: missing"
                    error = (got.double() - want).norm() / want.norm().clamp_min(1e-12)
                    assert error < rtol, f"rank {rank} {kind} {name} step {step}: relative error {error:.2e}"
            assert seen == set(wanted)
