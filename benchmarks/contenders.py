"""The model of the benchmarks and the ways to train it that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peers import Together, make_muon, why_missing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime import runtime_of

__all__ = [
    "ALL_MODES",
    "BATCH",
    "MODES",
    "OURS",
    "PEERS",
    "REPLICATED",
    "Contender",
    "Mode",
    "NewtonSchulzProbe",
    "batch_of",
    "build",
    "choose_modes",
]

BATCH = (2, 32)
"""Sequences and tokens of one rank's batch."""
_VOCABULARY = 512


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
        rival: The AdamW mode with the same sharding.
    """

    optimizer: str
    reshard: bool
    rival: str
    hsdp: bool = False
    dtype: torch.dtype = torch.float32


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
ALL_MODES = MODES | REPLICATED | PEERS
OURS = ("dmuon", "sharded", "ddp")
"""Optimizers of this package."""


def choose_modes(asked: Sequence[str] | None, world: int, *, peers: bool = False) -> list[str]:
    """The modes asked for, or all that ``world`` ranks and this machine can run. Prints what it leaves out.

    ``peers`` adds those of others to what can be chosen from.

    Raises:
        SystemExit: A mode that was asked for needs another number of ranks, or a package that is missing.
    """
    known = ALL_MODES if peers else MODES
    impossible = {name for name, mode in known.items() if mode.hsdp and (world < 4 or world % 2)}
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
    if not _multiplies_bfloat16():
        slow = {name for name, mode in known.items() if mode.dtype == torch.bfloat16}
        print(f"left out, this CPU has no bfloat16 products: {', '.join(sorted(slow))}")
    if impossible:
        print(f"left out, for an even number of at least 4 ranks: {', '.join(sorted(impossible))}")
    for reason in missing.values():
        print(f"left out: {reason}")
    absent = {name for name, mode in known.items() if mode.optimizer in missing}
    return [name for name in known if name not in impossible | slow | absent]


def _multiplies_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(key)) for key in ("amx_bf16", "avx512_bf16", "bf16"))


class NewtonSchulzProbe:
    """Newton-Schulz that notes its calls and times them, so that they can be repeated without the step around them."""

    def __init__(self, inner: dmuon.NewtonSchulz, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._clock = clock
        self._calls: list[tuple[Tensor, int | None]] = []
        self.seconds = 0.0

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


def batch_of(rank: int, step: int) -> Tensor:
    """Token ids, other ones on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, _VOCABULARY, BATCH, generator=generator)


def build(name: str, world: int, *, clock: Callable[[], float]) -> Contender:
    """Set up one mode. Collective over the default process group; ``clock`` times Newton-Schulz."""
    mode = ALL_MODES[name]
    model = _make_model()
    if name in REPLICATED:
        return _build_replicated(name, mode, model, world, clock)
    if mode.hsdp:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        shard_mesh, replicate_mesh = mesh["shard"], mesh["replicate"]
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
        shard_mesh, replicate_mesh = mesh, None
    if mode.optimizer == "dmuon":
        dmuon.dedicate_params(
            model, shard_mesh, _is_matrix, reshard_after_forward=mode.reshard, replicate_mesh=replicate_mesh
        )
    else:
        # What ownership leaves of a layer, its norms, joins the group of the root, as in `dmuon_hf.small_rests`.
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=mode.reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=mode.reshard)
    if mode.optimizer == "adamw":
        return Contender(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))
    if mode.optimizer not in OURS:
        return Contender(name, model, _make_peer(mode.optimizer, model))
    return _with_muon(name, mode, model, clock, predicate=_is_matrix if mode.optimizer == "sharded" else None)


def _build_replicated(name: str, mode: Mode, model: nn.Module, world: int, clock: Callable[[], float]) -> Contender:
    if mode.optimizer == "adamw-ddp":
        model = DistributedDataParallel(model)
        return Contender(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))
    dmuon.dedicate_params_ddp(model, init_device_mesh("cpu", (world,), mesh_dim_names=("data",)), _is_matrix)
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
        (matrices if _is_matrix(name, param) else rest).append(param)
    return Together(make_muon(peer, matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, foreach=True))


def _make_model() -> Any:
    """A Llama in fp32, the same on every rank: 3.15 M of its 3.41 M parameters are matrices for Muon."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=_VOCABULARY,
            attn_implementation="eager",
            tie_word_embeddings=False,
        )
    )


def _is_matrix(name: str, param: nn.Parameter) -> bool:
    return "layers." in name and param.ndim == 2
