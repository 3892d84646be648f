"""One tiny model in every mode, and training steps on it that are the same in all, for the table of checkpoints.

The model has what checkpoints trip over: a tied embedding, a buffer, bias and norms, a matrix whose 9 rows FSDP2 and
tensor parallelism cut otherwise than DTensor would, and a stack of experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dmuon_hf.core as dmuon
from tests.harness.models import rank_part

WIDTH, ROWS, EXPERTS, INNER, WORDS, BATCH = 12, 9, 6, 10, 21, 24


class Experts(nn.Module):
    """Every token goes to the expert of its number; the stack may lie on an expert-parallel axis."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        stack = self.stack
        if isinstance(stack, DTensor):
            ranks = stack.device_mesh.size()
            whole = stack.full_tensor(grad_placements=[Partial()] * stack.device_mesh.ndim)
            # Each rank of the axis has its own tokens, whose mean is wanted.
            stack = whole / ranks + (whole - whole / ranks).detach()
        return torch.einsum("bi,bih->bh", torch.tanh(torch.einsum("bh,bih->bi", x, stack[chosen])), stack[chosen])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, ROWS)
        self.down = nn.Linear(ROWS, WIDTH, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.experts(x, chosen)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words[:, 0])
        for layer in self.layers:
            x = layer(x, words[:, 1] % EXPERTS)
        return nn.functional.cross_entropy(self.head(x), words[:, 1])


@dataclass(frozen=True)
class Mode:
    """How the model is spread.

    Attributes:
        source: Who holds the matrices: ``owned``, ``sharded`` or ``ddp``.
        axes: Sizes of ``replicate`` and ``tp``, or of ``ep``; the rest of the ranks shard.
        reshard: Z3, or Z2.
        update_rule: Of the matrices.
    """

    source: str
    replicate: int = 1
    tp: int = 1
    ep: int = 1
    reshard: bool = True
    update_rule: str = "muon"


MODES: dict[str, Mode] = {
    "one_owned": Mode("owned"),
    "one_plain": Mode("sharded"),
    "ddp": Mode("ddp"),
    "ddp_tp": Mode("ddp", tp=2),
    "z2": Mode("owned", reshard=False),
    "z3": Mode("owned"),
    "hsdp": Mode("owned", replicate=2),
    "tp": Mode("owned", tp=2),
    "hsdp_tp": Mode("owned", replicate=2, tp=2),
    "sharded": Mode("sharded"),
    "sharded_hsdp": Mode("sharded", replicate=2),
    "sharded_tp": Mode("sharded", tp=2),
    "sharded_hsdp_tp": Mode("sharded", replicate=2, tp=2),
    "expert_parallel": Mode("sharded", ep=2),
}
MODES |= {f"{name}+normuon": replace(mode, update_rule="normuon") for name, mode in MODES.items()}


def is_matrix(name: str, param: Tensor) -> bool:
    return "layers" in name and param.ndim == 2


def is_stack(name: str, param: Tensor) -> bool:
    return param.ndim == 3


def is_either(name: str, param: Tensor) -> bool:
    return is_matrix(name, param) or is_stack(name, param)


def build(mode: str, world: int, *, seed: int, lr: float = 0.02) -> tuple[nn.Module, dmuon.Muon]:
    """Model and optimizer of ``seed`` on all ranks. ``one_...`` are for a process without a process group."""
    how = MODES[mode]
    mode = mode.partition("+")[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = Net()
    model.seen.fill_(seed)
    if mode == "one_owned":
        dmuon.dedicate_params(model, None, is_matrix)
    elif how.source == "ddp" and how.tp == 1:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dmuon.dedicate_params_ddp(model, mesh, is_matrix)
        model = DistributedDataParallel(model)
    elif mode != "one_plain":
        spread(model, how, world)
    predicate = is_either if how.source == "sharded" else is_stack
    rates: dict[str, Any] = {"lr": lr, "adamw_lr": lr / 10, "weight_decay": 0.1, "adamw_weight_decay": 0.1}
    return model, dmuon.Muon(model, predicate=predicate, update_rule=how.update_rule, **rates)


def spread(model: nn.Module, how: Mode, world: int) -> None:
    shards = world // (how.replicate * how.tp)
    mesh = init_device_mesh("cpu", (how.replicate, shards, how.tp), mesh_dim_names=("replicate", "shard", "tp"))
    if how.tp > 1:
        for layer in model.layers:
            plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
    if how.source == "ddp":
        dmuon.dedicate_params_ddp_tp(model, mesh["shard"], is_matrix)
        dmuon.replicate_tp(model, mesh["shard"])
        return
    data = mesh["replicate", "shard"] if how.replicate > 1 else mesh["shard"]
    if how.source == "owned":
        replicate = mesh["replicate"] if how.replicate > 1 else None
        dmuon.dedicate_params(
            model, mesh["shard"], is_matrix, replicate_mesh=replicate, reshard_after_forward=how.reshard
        )
    if how.ep > 1:
        experts = init_device_mesh("cpu", (world // how.ep, how.ep), mesh_dim_names=("efsdp", "ep"))
        for layer in model.layers:
            shard_experts(layer.experts, experts)
    for layer in model.layers:
        fully_shard(layer, mesh=data, reshard_after_forward=how.reshard)
    fully_shard(model, mesh=data, reshard_after_forward=how.reshard)


def shard_experts(experts: Experts, mesh: DeviceMesh) -> None:
    whole = experts.stack.detach()
    experts.stack = nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)], src_data_rank=None))
    fully_shard(experts, mesh=mesh["efsdp"])


def train(mode: str, model: nn.Module, optimizer: dmuon.Muon, rank: int, world: int, steps: range) -> None:
    """Steps on the same whole batches whatever the number of ranks; ranks of a tensor-parallel group share a part."""
    tp = MODES[mode].tp
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(WORDS, (BATCH, 2), generator=generator)
        model(rank_part(words, rank // tp, world // tp)).backward()
        optimizer.step()
        optimizer.zero_grad()
        next(buffer for buffer in model.buffers()).add_(1)
