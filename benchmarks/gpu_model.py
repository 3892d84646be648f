"""Sections of the GPU check about whole models: a Llama-shaped model of plain PyTorch, trained with Muon and AdamW."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_timing import Report, Setting, median_seconds
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon_hf.core as dmuon

__all__ = ["check_world_of_one", "compare_training", "one_rank"]


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    batch: int
    tokens: int


TINY = Shape(64, 96, 2, 4, 2, 128, batch=2, tokens=16)
LLAMA_1B = Shape(2048, 8192, 16, 32, 8, 128_256, batch=4, tokens=1024)
# Masters, gradients, momentum and AdamW's states of Llama-3.2-1B in float32, and room for activations and logits.
BYTES_FOR_1B = 36 << 30


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.hidden // shape.heads
        self.heads, self.key_value_heads = shape.heads, shape.key_value_heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, width * shape.key_value_heads, bias=False)
        self.v_proj = nn.Linear(shape.hidden, width * shape.key_value_heads, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for projection, heads in (
                (self.q_proj, self.heads),
                (self.k_proj, self.key_value_heads),
                (self.v_proj, self.key_value_heads),
            )
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden)
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        result: Tensor = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return result


class Llama(nn.Module):
    """The matrices and costs of a Llama with tied embeddings, without rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def make_model(shape: Shape, device: torch.device) -> Llama:
    """A model in float32 with the same random weights on every call."""
    torch.manual_seed(0)
    with device:
        model = Llama(shape)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return "layers." in name and parameter.ndim == 2


def batch_of(shape: Shape, device: torch.device, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens), generator=generator).to(device)


def build(
    shape: Shape, setting: Setting, mesh: DeviceMesh | None, ns: dmuon.NewtonSchulz | None, *, bf16: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer: Muon with ``ns``, fused AdamW without it; on FSDP2 where there is a mesh."""
    model = make_model(shape, setting.device)
    compute = torch.bfloat16 if bf16 else None
    if ns is not None:
        dmuon.dedicate_params(model, mesh, is_matrix, compute_dtype=compute)
    if mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    if ns is None:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, dmuon.Muon(model, lr=1e-3, adamw_lr=1e-4, ns_backend=ns, first_step_progress_log=False)


@contextmanager
def one_rank(device: torch.device) -> Iterator[DeviceMesh]:
    """A process group of this process alone, over NCCL on a GPU and gloo on a CPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    before = {key: os.environ.get(key) for key in address}
    os.environ.update(address)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)
    try:
        yield init_device_mesh(device.type, (1,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


def check_world_of_one(setting: Setting) -> Report:
    """Owned parameters on FSDP2 in a process group of one rank train as plain parameters do without a group."""
    report = Report(columns=["step", "loss without a group", "loss on FSDP2"])
    ns = dmuon.NewtonSchulz(dtype=torch.float32)
    losses = []
    weights = []
    plain, plain_optimizer = build(TINY, setting, None, ns)
    losses.append(_train(plain, plain_optimizer, TINY, setting, steps=5))
    weights.append({name: value.detach().clone() for name, value in plain.state_dict().items()})
    with one_rank(setting.device) as mesh:
        model, optimizer = build(TINY, setting, mesh, ns)
        losses.append(_train(model, optimizer, TINY, setting, steps=5))
        weights.append({name: value.full_tensor() for name, value in model.state_dict().items()})
        report.check(optimizer.ns_matrices == 5 * 7 * TINY.layers, f"{optimizer.ns_matrices} Newton-Schulz calls")  # type: ignore[attr-defined]
    for name, value in weights[0].items():
        distance = float((weights[1][name] - value).norm() / value.norm())
        report.check(distance < 1e-4, f"{name}: relative distance {distance:.1e}")
    report.check(losses[0][-1] != losses[0][0], "the loss did not move")
    report.rows = [[str(i), f"{a:.6f}", f"{b:.6f}"] for i, (a, b) in enumerate(zip(*losses, strict=True))]
    return report


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: Shape, setting: Setting, *, steps: int
) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(batch_of(shape, setting.device, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def compare_training(setting: Setting) -> Report:
    """A training step of a Llama of 1.2 B parameters with random weights: fused AdamW, and Muon with each kernel."""
    report = Report(columns=["optimizer", "step ms", "fwd+bwd ms", "optimizer ms", "step / AdamW", "peak GiB"])
    shape = _affordable(setting, report)
    contenders: dict[str, dmuon.NewtonSchulz | None] = {"AdamW fused": None}
    for kernel in ("auto", "cublas"):
        with report.part(f"Muon, {kernel}"):
            configured = dmuon.NewtonSchulz("auto", dtype=None if setting.cuda else torch.float32, kernel=kernel)
            contenders[f"Muon, {kernel} is {configured.kernel_name}"] = configured
    with one_rank(setting.device) as mesh:
        for name, ns in contenders.items():
            if setting.out_of_time:
                report.left_out.append(f"training with {name}: out of time")
                continue
            with report.part(f"training with {name}"):
                report.data[name] = _timed_training(shape, setting, mesh, ns, report, name)
    baseline = report.data.get("AdamW fused")
    for name, times in report.data.items():
        ratio = times["step"] / baseline["step"] if baseline else float("nan")
        cells = [f"{1e3 * times[key]:.1f}" for key in ("step", "forward_backward", "optimizer")]
        report.rows.append([name, *cells, f"{ratio:.2f}", f"{times['peak_bytes'] / 2**30:.1f}"])
    return report


def _affordable(setting: Setting, report: Report) -> Shape:
    if setting.tiny:
        return TINY
    free, _ = torch.get_device_module(setting.device).mem_get_info()
    layers = max(1, min(LLAMA_1B.layers, LLAMA_1B.layers * free // BYTES_FOR_1B))
    if layers < LLAMA_1B.layers:
        report.left_out.append(f"{LLAMA_1B.layers - layers} of {LLAMA_1B.layers} layers: {free >> 30} GiB are free")
    return replace(LLAMA_1B, layers=layers)


def _timed_training(
    shape: Shape, setting: Setting, mesh: DeviceMesh, ns: dmuon.NewtonSchulz | None, report: Report, name: str
) -> dict[str, float]:
    # Hooks and modules refer to each other: the last contender's memory comes back here.
    gc.collect()
    memory = torch.get_device_module(setting.device) if setting.cuda else None
    if memory is not None:
        memory.reset_peak_memory_stats()
    model, optimizer = build(shape, setting, mesh, ns, bf16=setting.cuda)
    ids = batch_of(shape, setting.device, 0)
    losses: list[Tensor] = []

    def forward_backward() -> None:
        loss = model(ids)
        loss.backward()
        losses.append(loss.detach())

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    parts = _time_parts(forward_backward, update, setting)
    # The same batch again and again: any optimizer that works learns it.
    began, ended = float(losses[0]), float(losses[-1])
    report.check(ended < began, f"{name}: the loss went from {began:.3f} to {ended:.3f}")
    peak = float(memory.max_memory_allocated()) if memory is not None else 0.0
    return {**parts, "peak_bytes": peak, "first_loss": began, "last_loss": ended}


def _time_parts(first: Callable[[], None], second: Callable[[], None], setting: Setting) -> dict[str, float]:
    """Medians of two functions called in turn, and of both together without a wait in between."""
    rounds = 2 if setting.tiny else 6
    runs = {"forward_backward": first, "optimizer": second}
    parts = median_seconds(runs, setting.device, rounds=2 * rounds, rotate=False)

    def both() -> None:
        first()
        second()

    parts |= median_seconds({"step": both}, setting.device, rounds=rounds)
    return parts
