"""The ways to train the models of the benchmarks that are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_models import is_matrix, make_llama, make_moe, spec_of, tp_plan
from peers import Together, make_muon, why_missing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime import runtime_of

__all__ = [
    "ALL_MODES",
    "EXPERTS",
    "MODES",
    "OURS",
    "PEERS",
    "REPLICATED",
    "TENSOR_PARALLEL",
    "Contender",
    "Mode",
    "NewtonSchulzProbe",
    "build",
    "choose_modes",
    "multiplies_bfloat16",
]


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to train.

    Attributes:
        optimizer: ``"adamw"`` is FSDP2 with foreach AdamW, ``"dmuon"`` this package with owned matrices, ``"sharded"``
            with matrices where FSDP2 puts them, ``"ddp"`` with matrices that every rank keeps whole under
            ``DistributedDataParallel``, and ``"adamw-ddp"`` AdamW there; others are those of ``peers``.
        reshard: Whether whole weights are freed between forward and backward (Z3, FSDP2's default) or kept (Z2).
        hsdp: Two replicas instead of one.
        dtype: What Newton-Schulz iterates in.
        rival: The AdamW mode of the same model with the same sharding.
        experts: The model is a mixture of experts.
        tensor_parallel: Ranks of the tensor-parallel dimension, inside of which the ranks share a batch.
    """

    optimizer: str
    reshard: bool
    rival: str
    hsdp: bool = False
    dtype: torch.dtype = torch.float32
    experts: bool = False
    tensor_parallel: int = 1

    @property
    def replicated(self) -> bool:
        """Whether every rank keeps whole weights."""
        return self.optimizer.endswith("ddp")


MODES: dict[str, Mode] = {
    "adamw-z3": Mode("adamw", reshard=True, rival="adamw-z3"),
    "adamw-z2": Mode("adamw", reshard=False, rival="adamw-z2"),
    "adamw-hsdp": Mode("adamw", reshard=True, rival="adamw-hsdp", hsdp=True),
    "dmuon-z3": Mode("dmuon", reshard=True, rival="adamw-z3"),
    "dmuon-z2": Mode("dmuon", reshard=False, rival="adamw-z2"),
    "dmuon-hsdp": Mode("dmuon", reshard=True, rival="adamw-hsdp", hsdp=True),
    "dmuon-z3-bf16": Mode("dmuon", reshard=True, rival="adamw-z3", dtype=torch.bfloat16),
    "dmuon-z2-bf16": Mode("dmuon", reshard=False, rival="adamw-z2", dtype=torch.bfloat16),
    "dmuon-hsdp-bf16": Mode("dmuon", reshard=True, rival="adamw-hsdp", hsdp=True, dtype=torch.bfloat16),
    "sharded-z3": Mode("sharded", reshard=True, rival="adamw-z3"),
    "sharded-z3-bf16": Mode("sharded", reshard=True, rival="adamw-z3", dtype=torch.bfloat16),
    "sharded-z2-bf16": Mode("sharded", reshard=False, rival="adamw-z2", dtype=torch.bfloat16),
    "sharded-hsdp-bf16": Mode("sharded", reshard=True, rival="adamw-hsdp", hsdp=True, dtype=torch.bfloat16),
}

REPLICATED: dict[str, Mode] = {
    "adamw-ddp": Mode("adamw-ddp", reshard=False, rival="adamw-ddp"),
    "ddp": Mode("ddp", reshard=False, rival="adamw-ddp"),
    "ddp-bf16": Mode("ddp", reshard=False, rival="adamw-ddp", dtype=torch.bfloat16),
}
"""Whole weights on every rank. C++ issues the collectives of DistributedDataParallel, where nothing counts them."""

EXPERTS: dict[str, Mode] = {
    "moe-adamw-z3": Mode("adamw", reshard=True, rival="moe-adamw-z3", experts=True),
    "moe-sharded-z3-bf16": Mode("sharded", reshard=True, rival="moe-adamw-z3", dtype=torch.bfloat16, experts=True),
    "moe-dmuon-z3-bf16": Mode("dmuon", reshard=True, rival="moe-adamw-z3", dtype=torch.bfloat16, experts=True),
    "moe-adamw-ddp": Mode("adamw-ddp", reshard=False, rival="moe-adamw-ddp", experts=True),
    "moe-ddp-bf16": Mode("ddp", reshard=False, rival="moe-adamw-ddp", dtype=torch.bfloat16, experts=True),
}
"""Stacks of experts, which FSDP2 cuts between experts: only matrices of attention are owned, or travel."""

TENSOR_PARALLEL: dict[str, Mode] = {"dmuon-tp": Mode("dmuon", reshard=True, rival="adamw-z3", tensor_parallel=2)}
"""For counting bytes: a benchmark of time would compare other products."""

PEERS: dict[str, Mode] = {
    "gathered-z3": Mode("gathered", reshard=True, rival="adamw-z3", dtype=torch.bfloat16),
    "gathered-z2": Mode("gathered", reshard=False, rival="adamw-z2", dtype=torch.bfloat16),
    "gathered-hsdp": Mode("gathered", reshard=True, rival="adamw-hsdp", hsdp=True, dtype=torch.bfloat16),
    "muon-fsdp2-z3": Mode("muon-fsdp2", reshard=True, rival="adamw-z3", dtype=torch.bfloat16),
    "muon-fsdp2-z2": Mode("muon-fsdp2", reshard=False, rival="adamw-z2", dtype=torch.bfloat16),
    "heavyball-z3": Mode("heavyball", reshard=True, rival="adamw-z3", dtype=torch.bfloat16),
    "heavyball-z2": Mode("heavyball", reshard=False, rival="adamw-z2", dtype=torch.bfloat16),
    "heavyball-hsdp": Mode("heavyball", reshard=True, rival="adamw-hsdp", hsdp=True, dtype=torch.bfloat16),
}
"""Muon by others. muon-fsdp2 knows 1-D meshes only."""
ALL_MODES = MODES | REPLICATED | EXPERTS | TENSOR_PARALLEL | PEERS
OURS = ("dmuon", "sharded", "ddp")
"""Optimizers of this package."""


def choose_modes(asked: Sequence[str] | None, world: int, known: Mapping[str, Mode]) -> list[str]:
    """The modes asked for, or all of ``known`` that ``world`` ranks and this machine can run. Prints what is left out.

    Raises:
        SystemExit: A mode that was asked for needs another number of ranks, or a package that is missing.
    """
    of_two = {name for name, mode in known.items() if mode.hsdp or mode.tensor_parallel > 1}
    impossible = of_two if world < 4 or world % 2 else set()
    optimizers = {known[name].optimizer for name in (known if asked is None else asked)}
    missing = {optimizer: reason for optimizer in sorted(optimizers) if (reason := why_missing(optimizer)) is not None}
    if asked is not None:
        refused = sorted(impossible.intersection(asked))
        if refused:
            raise SystemExit(f"{', '.join(refused)} trains on 2 x n/2 ranks: pass an even --ranks of at least 4")
        if missing:
            raise SystemExit("\n".join(missing.values()))
        return list(dict.fromkeys(asked))
    slow: set[str] = set()
    if not multiplies_bfloat16():
        slow = {name for name, mode in known.items() if mode.dtype == torch.bfloat16}
        print(f"left out, this CPU has no bfloat16 products: {', '.join(sorted(slow))}")
    if impossible:
        print(f"left out, for an even number of at least 4 ranks: {', '.join(sorted(impossible))}")
    for reason in missing.values():
        print(f"left out: {reason}")
    absent = {name for name, mode in known.items() if mode.optimizer in missing}
    return [name for name in known if name not in impossible | slow | absent]


def multiplies_bfloat16() -> bool:
    """Whether this CPU has products of bfloat16 matrices; without, they are slower than those of fp32."""
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(key)) for key in ("amx_bf16", "avx512_bf16", "bf16"))


class NewtonSchulzProbe:
    """Newton-Schulz that notes its calls and times them, so that they can be repeated without the step around them."""

    def __init__(self, inner: dmuon.NewtonSchulz, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._clock = clock
        self._calls: list[tuple[Tensor, int | None]] = []
        self.seconds = 0.0

    @property
    def calls(self) -> int:
        """Calls since the last reset."""
        return len(self._calls)

    @property
    def matrices(self) -> int:
        """Matrices in them."""
        return sum(math.prod(matrices.shape[:-2]) for matrices, _ in self._calls)

    def reset(self) -> None:
        self._calls.clear()
        self.seconds = 0.0

    def __call__(self, matrices: Tensor, /, *, steps: int | None = None) -> Tensor:
        self._calls.append((matrices, steps))
        started = self._clock()
        result = self._inner(matrices, steps=steps)
        self.seconds += self._clock() - started
        return result

    def computes_in(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        return self._inner.computes_in(dtype, device)

    def replay(self) -> None:
        """Repeat the calls since the last reset, on the same input."""
        for matrices, steps in self._calls:
            self._inner(matrices, steps=steps)


@dataclass(frozen=True, slots=True)
class Contender:
    """A mode set up on this rank."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer | Together
    probe: NewtonSchulzProbe | None = None

    def loss(self, ids: Tensor) -> Tensor:
        result: Tensor = self.model(input_ids=ids, labels=ids).loss
        return result

    def update(self) -> None:
        """``step()`` and ``zero_grad()``, and the end of what ``step()`` left running (the HSDP publish)."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        runtime = runtime_of(self.model)
        if runtime is not None:
            runtime.finish_publish()


def build(name: str, world: int, *, clock: Callable[[], float], model: Any = None) -> Contender:
    """Set up one mode. Collective over the default process group; ``clock`` times Newton-Schulz.

    ``model`` is the same on every rank, with blocks in ``model.layers``; by default that of the benchmarks.
    """
    mode = ALL_MODES[name]
    if model is None:
        model = make_moe() if mode.experts else make_llama()
    if mode.replicated:
        return _build_replicated(name, mode, model, world, clock)
    axis = mode.tensor_parallel
    replicas = 2 if mode.hsdp else 1
    names, sizes = ["shard"], [world // replicas // axis]
    if mode.hsdp:
        names, sizes = ["replicate", *names], [replicas, *sizes]
    if axis > 1:
        names, sizes = [*names, "tp"], [*sizes, axis]
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))
    data = mesh["replicate", "shard"] if mode.hsdp else mesh["shard"]
    if axis > 1:
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], tp_plan())
    if mode.optimizer == "dmuon":
        dmuon.dedicate_params(
            model,
            mesh["shard"],
            is_matrix,
            reshard_after_forward=mode.reshard,
            replicate_mesh=mesh["replicate"] if mode.hsdp else None,
            matrix_spec_fn=spec_of,
        )
    if mode.optimizer != "dmuon" or mode.experts:
        # What ownership leaves of a layer, its norms, joins the group of the root, as in `dmuon_hf.small_rests`.
        for layer in model.model.layers:
            fully_shard(layer, mesh=data, reshard_after_forward=mode.reshard)
    fully_shard(model, mesh=data, reshard_after_forward=mode.reshard)
    if mode.optimizer == "adamw":
        return Contender(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))
    if mode.optimizer not in OURS:
        return Contender(name, model, _make_peer(mode.optimizer, model))
    selection = {"predicate": is_matrix, "matrix_spec_fn": spec_of} if mode.optimizer == "sharded" else {}
    return _with_muon(name, mode, model, clock, **selection)


def _build_replicated(name: str, mode: Mode, model: nn.Module, world: int, clock: Callable[[], float]) -> Contender:
    if mode.optimizer == "adamw-ddp":
        model = DistributedDataParallel(model)
        return Contender(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    dmuon.dedicate_params_ddp(model, mesh, is_matrix, matrix_spec_fn=spec_of)
    return _with_muon(name, mode, DistributedDataParallel(model), clock)


def _with_muon(name: str, mode: Mode, model: nn.Module, clock: Callable[[], float], **options: Any) -> Contender:
    probe = NewtonSchulzProbe(dmuon.NewtonSchulz("auto", dtype=mode.dtype), clock)
    optimizer = dmuon.Muon(
        model,
        lr=1e-3,
        ns_backend=probe,  # type: ignore[arg-type]
        first_step_progress_log=False,
        **options,
    )
    return Contender(name, model, optimizer, probe)


def _make_peer(peer: str, model: nn.Module) -> Together:
    """A peer's Muon for the matrices and AdamW for the rest of a model that FSDP2 has sharded."""
    matrices, rest = [], []
    for name, param in model.named_parameters():
        (matrices if is_matrix(name, param) else rest).append(param)
    return Together(make_muon(peer, matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, foreach=True))
