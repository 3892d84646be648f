"""The model of the benchmark and the ways to train it that are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon

__all__ = ["ADAMW", "MODES", "BATCH", "Contender", "batch_of", "build", "is_matrix", "make_model", "modes_for"]

BATCH = (2, 32)
"""Sequences and tokens of one rank's batch."""

ADAMW = "adamw-z3"
"""The mode that the others are compared with."""


def make_model() -> nn.Module:
    """A Llama of four layers, fp32, the same on every rank: 3.15 M of its 3.41 M parameters are Muon matrices."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=512,
            attn_implementation="eager",
            tie_word_embeddings=False,
        )
    )


def is_matrix(name: str, param: nn.Parameter) -> bool:
    """What Muon updates: every 2-D weight inside a layer."""
    return "layers." in name and param.ndim == 2


def batch_of(rank: int, step: int) -> Tensor:
    """Token ids, other ones on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 512, BATCH, generator=generator)


class CountedNewtonSchulz:
    """Newton-Schulz that remembers what it is called with: ``(shape, dtype)`` of each batch and the steps."""

    def __init__(self, inner: dmuon.NewtonSchulz) -> None:
        self.inner = inner
        self.calls: list[tuple[torch.Size, torch.dtype, int | None]] = []
        self.clock: Callable[[], float] | None = None
        self.spent = 0.0

    def __call__(self, matrices: Tensor, /, *, steps: int | None = None) -> Tensor:
        self.calls.append((matrices.shape, matrices.dtype, steps))
        if self.clock is None:
            return self.inner(matrices, steps=steps)
        started = self.clock()
        result = self.inner(matrices, steps=steps)
        self.spent += self.clock() - started
        return result


@dataclass
class Contender:
    """One way to train, set up on this rank."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    newton_schulz: CountedNewtonSchulz | None = None

    def loss(self, ids: Tensor) -> Tensor:
        result: Tensor = self.model(input_ids=ids, labels=ids).loss
        return result

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _shard(model: Any, mesh: DeviceMesh, *, reshard: bool) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def _adamw(name: str, world: int, *, reshard: bool) -> Contender:
    model = make_model()
    _shard(model, init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), reshard=reshard)
    return Contender(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, foreach=True))


def _ours(name: str, world: int, *, reshard: bool, hsdp: bool = False, dtype: torch.dtype = torch.float32) -> Contender:
    model = make_model()
    if hsdp:
        grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(
            model, grid["shard"], is_matrix, reshard_after_forward=reshard, replicate_mesh=grid["replicate"]
        )
        _shard(model, grid, reshard=reshard)
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dmuon.dedicate_params(model, mesh, is_matrix, reshard_after_forward=reshard)
        _shard(model, mesh, reshard=reshard)
    counted = CountedNewtonSchulz(dmuon.NewtonSchulz("auto", dtype=dtype))
    optimizer = dmuon.Muon(
        model,
        lr=1e-3,
        weight_decay=0.01,
        adamw_lr=1e-3,
        ns_backend=counted,  # type: ignore[arg-type]
        first_step_progress_log=False,
    )
    return Contender(name, model, optimizer, counted)


MODES: dict[str, Callable[[str, int], Contender]] = {
    "adamw-z3": lambda name, world: _adamw(name, world, reshard=True),
    "adamw-z2": lambda name, world: _adamw(name, world, reshard=False),
    "dmuon-z3": lambda name, world: _ours(name, world, reshard=True),
    "dmuon-z2": lambda name, world: _ours(name, world, reshard=False),
    "dmuon-hsdp": lambda name, world: _ours(name, world, reshard=True, hsdp=True),
    "dmuon-z3-bf16": lambda name, world: _ours(name, world, reshard=True, dtype=torch.bfloat16),
    "dmuon-z2-bf16": lambda name, world: _ours(name, world, reshard=False, dtype=torch.bfloat16),
}
"""FSDP2 with AdamW, and ours with Newton-Schulz in float32 or (``-bf16``) bfloat16; z3 frees whole weights after forward."""


def modes_for(world: int) -> list[str]:
    """The modes that a run of ``world`` ranks on this CPU compares by default."""
    native = torch.cpu.get_capabilities()
    skipped = {"dmuon-hsdp"} if world < 4 else set()
    if not any(native.get(key) for key in ("amx_bf16", "avx512_bf16", "bf16")):
        skipped |= {"dmuon-z3-bf16", "dmuon-z2-bf16"}
    return [name for name in MODES if name not in skipped]


def build(name: str, world: int) -> Contender:
    """Set up one mode. Collective over the default process group."""
    return MODES[name](name, world)
