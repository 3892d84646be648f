"""Parameters of every layout with gradients from a seed, and the same steps in one process with the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dmuon_hf.core.ns import NewtonSchulz
from dmuon_hf.core.optim.state import fresh_state
from dmuon_hf.core.optim.update import MuonRule
from dmuon_hf.core.plan import LinkCosts, MatrixSpec
from dmuon_hf.core.sharded import ShardedMatrix, ShardedSource
from tests.harness.comm import CollectiveCounter
from tests.harness.reference import ReferenceOptimizer

RULE = MuonRule(lr=0.02, momentum=0.9, nesterov=True, ns_steps=5, weight_decay=0.1, lr_scale="match_rms_adamw")
SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (33, 64),
    "flat": (7, 32),
    "small": (3, 5),
    "square": (32, 32),
    "twin": (32, 32),
    "experts": (6, 12, 10),
    "few": (2, 9, 20),
}
ALL_NEAR = LinkCosts(near=0, far=0)
"""Links that cost nothing: copies share the work."""
ALL_FAR = LinkCosts(near=0, far=1 << 40)
"""Copies that are too far apart to share it."""

S, R = Shard, Replicate


@dataclass(frozen=True)
class Layout:
    """Mesh and placements of matrices and of stacks."""

    mesh: tuple[int, ...]
    matrix: tuple[Any, ...]
    stack: tuple[Any, ...]
    names: tuple[str, ...] | None = None

    @property
    def world(self) -> int:
        return torch.Size(self.mesh).numel()


LAYOUTS: dict[str, Layout] = {
    "one_rank": Layout((1,), (S(0),), (S(0),)),
    "shard_2": Layout((2,), (S(0),), (S(0),)),
    "shard_3": Layout((3,), (S(0),), (S(0),)),
    "shard_4": Layout((4,), (S(0),), (S(0),)),
    "columns": Layout((4,), (S(1),), (S(2),)),
    "rows_of_experts": Layout((4,), (S(0),), (S(1),)),
    "replicated": Layout((4,), (R(),), (R(),)),
    "hsdp": Layout((2, 2), (R(), S(0)), (R(), S(0))),
    "hsdp_columns": Layout((2, 2), (R(), S(1)), (R(), S(1))),
    "tp_replicated": Layout((2, 2), (S(0), R()), (S(0), R())),
    "colwise": Layout((2, 2), (_StridedShard(0, split_factor=2), S(0)), (S(0), S(1))),
    "rowwise": Layout((2, 2), (S(0), S(1)), (S(0), S(2))),
    "twice": Layout((2, 2), (S(0), S(0)), (S(0), S(0))),
    "expert_mesh": Layout((1, 4), (S(0), S(1)), (_StridedShard(0, split_factor=4), S(0))),
    "three": Layout((2, 2, 2), (R(), _StridedShard(0, split_factor=2), S(0)), (R(), S(0), S(1))),
    "three_rowwise": Layout((2, 2, 2), (R(), S(0), S(1)), (S(0), R(), S(2))),
}


@dataclass(frozen=True)
class Steps:
    """What is trained: ``idle`` members of the stacks have no gradient in the first steps."""

    layout: str
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: dict(SHAPES))
    specs: dict[str, MatrixSpec] = field(default_factory=dict)
    steps: int = 5
    idle: tuple[int, ...] = ()
    rule: MuonRule = RULE
    dtype: torch.dtype = torch.float32
    gradient_scale: float = 1.0
    bucket_numel: int = 2500
    links: LinkCosts = ALL_NEAR
    ns: dict[str, Any] = field(default_factory=dict)


def start(run: Steps) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).to(run.dtype) for name, shape in run.shapes.items()}


def gradients(run: Steps, step: int) -> dict[str, torch.Tensor | None]:
    """Whole gradients; a matrix called ``small`` has none in the second step."""
    generator = torch.Generator().manual_seed(100 + step)
    grads: dict[str, torch.Tensor | None] = {}
    for name, shape in run.shapes.items():
        grad = run.gradient_scale * torch.randn(shape, generator=generator)
        if len(shape) == 3 and step < 3:
            for member in run.idle:
                grad[member] = 0.0
        grads[name] = None if name == "small" and step == 1 else grad.to(run.dtype)
    return grads


def sharded_params(run: Steps) -> dict[str, nn.Parameter]:
    layout = LAYOUTS[run.layout]
    mesh = init_device_mesh("cpu", layout.mesh)
    return {
        name: nn.Parameter(_distributed(value, mesh, layout.matrix if value.ndim == 2 else layout.stack))
        for name, value in start(run).items()
    }


def _distributed(value: torch.Tensor, mesh: Any, placements: Any) -> DTensor:
    """Split here: scattering uneven parts of a ``_StridedShard`` is an assertion error of torch."""
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def make_source(run: Steps, params: dict[str, nn.Parameter]) -> ShardedSource:
    matrices = [ShardedMatrix(name, param, run.specs.get(name, MatrixSpec())) for name, param in params.items()]
    return ShardedSource(matrices, bucket_numel=run.bucket_numel, links=run.links)


def fresh_states(run: Steps, params: dict[str, nn.Parameter]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    return {
        param: fresh_state(
            param, "muon", normalised=run.specs.get(name, MatrixSpec()) if run.rule.normalises_rows else None
        )
        for name, param in params.items()
    }


def step_once(run: Steps, source: ShardedSource, params: Any, state: Any, step: int, ns: Any) -> int:
    for name, grad in gradients(run, step).items():
        param = params[name]
        param.grad = None if grad is None else _distributed(grad, param.device_mesh, param.placements)
    flags = source.flags()
    if dist.is_initialized():
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    rules = {id(param): run.rule for param in params.values()}
    return source.update(rules, state, [flag > 0 for flag in flags.tolist()], ns)


def train_sharded(rank: int, world: int, run: Steps) -> dict[str, Any]:
    """Train; on every rank the weights and momenta after every step, whole, and what the steps sent."""
    params = sharded_params(run)
    state = fresh_states(run, params)
    source = make_source(run, params)
    ns = NewtonSchulz("direct", **run.ns)
    history: dict[str, Any] = {"weights": [], "momenta": [], "second_moments": [], "ns_matrices": 0}
    with CollectiveCounter() as counter:
        for step in range(run.steps):
            with counter.phase("step"):
                history["ns_matrices"] += step_once(run, source, params, state, step, ns)
            history["weights"].append({name: param.detach().full_tensor().clone() for name, param in params.items()})
            for kind, key in (("momenta", "momentum_buffer"), ("second_moments", "second_moment")):
                kept = {name: state[param].get(key) for name, param in params.items()}
                history[kind].append({name: v.full_tensor().clone() for name, v in kept.items() if v is not None})
    history["records"] = [
        (record.kind, record.ring_bytes, record.dtype) for record in counter.select(tag="dmuon_sharded", phase="step")
    ]
    history["plan"] = source.plan
    return history


def reference_steps(run: Steps) -> dict[str, Any]:
    """The same in one process: every member of a stack is a parameter of its own."""
    values = start(run)
    flat: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        flat.update({f"{name}__{i}": member.clone() for i, member in enumerate(value.reshape(-1, *value.shape[-2:]))})
    holder = nn.Module()
    for name, value in flat.items():
        holder.register_parameter(name, nn.Parameter(value))
    optimizer = ReferenceOptimizer(
        holder,
        list(flat),
        lr=run.rule.lr,
        momentum=run.rule.momentum,
        nesterov=run.rule.nesterov,
        weight_decay=run.rule.weight_decay,
        normuon_beta2=run.rule.normuon_beta2 if run.rule.normalises_rows else None,
        split={name: run.specs[name.split("__")[0]].split for name in flat if name.split("__")[0] in run.specs},
    )
    history: dict[str, Any] = {"weights": [], "momenta": [], "second_moments": []}
    for step in range(run.steps):
        for name, grad in gradients(run, step).items():
            for i in range(len(values[name]) if values[name].ndim == 3 else 1):
                part = None if grad is None else grad[i] if grad.ndim == 3 else grad
                holder.get_parameter(f"{name}__{i}").grad = part if part is not None and part.any() else None
        optimizer.step()
        history["weights"].append(_stacked(values, dict(holder.named_parameters())))
        history["momenta"].append(_stacked(values, optimizer.buffers))
        if run.rule.normalises_rows:
            moments = _stacked(values, optimizer.second_moments)
            history["second_moments"].append({name: _rows(run, name, value) for name, value in moments.items()})
    return history


def _rows(run: Steps, name: str, values: torch.Tensor) -> torch.Tensor:
    """One value a row of what has it in each element."""
    return values[..., 0, :] if run.specs.get(name, MatrixSpec()).transposed else values[..., 0]


def _stacked(values: dict[str, torch.Tensor], flat: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.stack([flat[f"{name}__{i}"].detach() for i in range(len(value))])
        if value.ndim == 3
        else flat[f"{name}__0"].detach().clone()
        for name, value in values.items()
    }


def assert_same_steps(run: Steps, result: dict[str, Any], expected: dict[str, Any], *, rtol: float = 2e-5) -> None:
    for kind in ("weights", "momenta", "second_moments"):
        for step, wanted in enumerate(expected[kind]):
            for name, want in wanted.items():
                got = result[kind][step][name].double()
                error = (got - want.double()).norm() / want.double().norm().clamp_min(1e-12)
                assert error < rtol, f"{run.layout} {kind} {name} step {step}: relative error {error:.2e}"
