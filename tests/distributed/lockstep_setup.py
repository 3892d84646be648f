"""A small model whose layers can be left out, dedicated and sharded, for tests of ranks that do different things."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from tests.distributed.training import dedicate_on
from tests.harness.launcher import host_store

WIDTH = 12
LAYERS = 4
HYPER: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "adamw_lr": 1e-2, "adamw_weight_decay": 0.0}


class Layer(nn.Module):
    """Two matrices for Muon and, with `norm`, a layer norm that FSDP2 shards."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Layers and a head; input `(batch, WIDTH)`, output a scalar loss.

    Layers in `skip` do not run; those in `unused` run and their output is dropped, so that they get no gradient; those
    in `twice` run twice.
    """

    def __init__(self, *, norm: bool, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(norm=norm) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(
        self,
        x: torch.Tensor,
        skip: Collection[int] = (),
        unused: Collection[int] = (),
        twice: Collection[int] = (),
    ) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i not in skip:
                y = layer(x)
                x = x if i in unused else layer(y) if i in twice else y
        return self.head(x).square().mean()


def make_net(*, norm: bool) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(norm=norm)


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return "layers." in name and param.ndim == 2


def prepare(world: int, mode: str, *, norm: bool) -> tuple[Net, dmuon.Muon]:
    """The model on this rank of `world`, in mode `z2`, `z3`, `hsdp`, or `sharded`: by FSDP2 alone."""
    model = make_net(norm=norm)
    if mode == "sharded":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    else:
        mesh = dedicate_on(model, world, mode, is_matrix)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, dmuon.Muon(model, predicate=is_matrix if mode == "sharded" else None, **HYPER)


def batch_of(step: int, rows: int) -> torch.Tensor:
    """The whole batch of a step."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def part_of(step: int, rank: int, world: int) -> torch.Tensor:
    """This rank's two rows of the batch of a step."""
    return batch_of(step, 2 * world).chunk(world)[rank]


def run_script(script: str, *arguments: str, agent: bool = True, **env: str) -> list[tuple[int, str]]:
    """Exit codes and errors of two ranks that run `script` as programs of their own.

    Without `agent` the first rank hosts the rendezvous store.
    """
    root = str(Path(__file__).parents[2])
    store = host_store()
    port = str(store.port)
    variables = {**os.environ, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **env}
    variables |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if agent:
        variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    else:
        del store  # its port is free for the first rank
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            cwd=root,
            env=variables | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]
