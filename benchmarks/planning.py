"""Time planning and set-up for up to 1,024 ranks, in one process that pretends to be one of them.

    python benchmarks/planning.py

Planning: the matrices of a Llama on the meta device become candidates; `make_plan` gives each an owner; the digest is
what ranks compare. Every rank does all of it. `owners` are the ranks that own a matrix, `imbalance` is how much the
most loaded rank exceeds the mean of all ranks in the plan's cost; with fewer matrices than ranks it says how many
ranks have nothing to do in `step()`, not that the plan is bad: `floor` is the least that any plan could reach.

Set-up: `dedicate_params`, `fully_shard` on every layer and the root, and `Muon`, on the fake process group, whose
collectives move nothing: the time of the host's work, without that of real groups and of comparing the plans. The small
model is real, on rank 0. The 8B model stays on the meta device, on the last of 1,024 ranks, which owns no matrix.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from launch import ROOT
from llama_shapes import MODELS, LlamaShape
from report import machine, print_header, print_table, write_json
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from dmuon_hf.core.plan import Candidate, make_plan

LAYOUTS = ((8, 1), (64, 1), (256, 1), (1024, 1), (8, 8), (8, 128), (64, 16))
"""Ranks of the shard and of the replicate dimension."""
SETUP_WORLDS = (8, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Planned:
    """One plan: milliseconds, and its balance."""

    make_plan: float
    digest: float
    imbalance: float
    floor: float
    owners: int


@dataclass(frozen=True, slots=True)
class SetUp:
    """One set-up, in milliseconds."""

    dedicate: float
    shard: float
    optimizer: float
    imbalance: float


class _Clock:
    """Milliseconds of a block."""

    def __init__(self) -> None:
        self.ms = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.ms = 1e3 * (time.perf_counter() - started)


def make_model(shape: LlamaShape, device: str) -> Any:
    """The model of transformers with these sizes; on ``"meta"`` it has no values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return "layers." in name and param.ndim == 2


def candidates_of(model: nn.Module) -> list[Candidate]:
    """The matrices of the layers, a unit per layer."""
    return [
        Candidate(name=name, shape=tuple(param.shape), dtype=param.dtype, unit=".".join(name.split(".")[:3]))
        for name, param in model.named_parameters()
        if is_matrix(name, param)
    ]


def plan(candidates: list[Candidate], shard: int, replicate: int) -> Planned:
    units = list(dict.fromkeys(candidate.unit for candidate in candidates))
    planning, digesting = _Clock(), _Clock()
    with planning.running():
        made = make_plan(candidates, units=units, shard_size=shard, replicate_size=replicate)
    with digesting.running():
        made.digest()
    mean = sum(made.loads()) / (shard * replicate)
    floor = max(max(entry.cost for entry in made.entries) / mean - 1.0, 0.0)
    owners = len({entry.owner for entry in made.entries})
    return Planned(planning.ms, digesting.ms, made.imbalance(), floor, owners)


def set_up(shape: LlamaShape, world: int, *, rank: int, device: str) -> SetUp:
    """Dedicate, shard and build the optimizer as rank ``rank`` of ``world``."""
    sys.path.insert(0, str(ROOT))
    from tests.harness.fake import fake_world

    model = make_model(shape, device)
    dedicating, sharding, building = _Clock(), _Clock(), _Clock()
    with fake_world(world, rank=rank):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
        with dedicating.running():
            dmuon.dedicate_params(model, mesh, is_matrix, compute_dtype=torch.bfloat16)
        with sharding.running():
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        with building.running():
            dmuon.Muon(model, first_step_progress_log=False)
        imbalance = dmuon.summarize_comm_plan(model)["imbalance"]
    return SetUp(dedicating.ms, sharding.ms, building.ms, imbalance)


def _plan_rows(name: str, rounds: int) -> tuple[list[list[str]], dict[str, Any]]:
    making, listing = _Clock(), _Clock()
    with making.running():
        model = make_model(MODELS[name], "meta")
    with listing.running():
        candidates = candidates_of(model)
    print(f"{name}: {len(candidates)} matrices; meta model {making.ms:.0f} ms, candidates {listing.ms:.1f} ms")
    rows, figures = [], {}
    for shard, replicate in LAYOUTS:
        planned = min((plan(candidates, shard, replicate) for _ in range(rounds)), key=lambda each: each.make_plan)
        ranks = f"{shard * replicate}" if replicate == 1 else f"{replicate} x {shard}"
        figures[ranks] = asdict(planned)
        rows.append(
            [
                name,
                ranks,
                f"{planned.make_plan:.1f}",
                f"{planned.digest:.1f}",
                f"{planned.owners}",
                f"{100 * planned.imbalance:.1f} %",
                f"{100 * planned.floor:.1f} %",
            ]
        )
    return rows, {"model_ms": making.ms, "candidates_ms": listing.ms, "matrices": len(candidates), "plans": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="plans made, of which the fastest counts (default: 3)")
    parser.add_argument("--json", metavar="PATH", help="write the result here")
    options = parser.parse_args()
    where = machine()
    print_header(where)
    # Imports, caches and threads of a first set-up.
    set_up(MODELS["benchmark"], 2, rank=0, device="cpu")
    rows: list[list[str]] = []
    plans: dict[str, Any] = {}
    for name in ("llama-3-8b", "llama-3-70b"):
        more, plans[name] = _plan_rows(name, options.rounds)
        rows += more
    columns = ["model", "ranks", "make_plan ms", "digest ms", "owners", "imbalance", "floor"]
    print_table("Planning, in one process; R x G is HSDP", columns, rows)

    cases = [("benchmark", world, 0, "cpu") for world in SETUP_WORLDS]
    cases.append(("llama-3-8b", SETUP_WORLDS[-1], SETUP_WORLDS[-1] - 1, "meta"))
    setups = {f"{name} {world}": set_up(MODELS[name], world, rank=rank, device=at) for name, world, rank, at in cases}
    rows = [
        [
            name,
            str(world),
            *(f"{value:.0f}" for value in (found.dedicate, found.shard, found.optimizer)),
            f"{100 * found.imbalance:.0f} %",
        ]
        for (name, world, _, _), found in zip(cases, setups.values(), strict=True)
    ]
    columns = ["model", "ranks", "dedicate_params", "fully_shard", "Muon", "imbalance"]
    print_table("Set-up of one rank on the fake process group, ms", columns, rows)
    result = {"machine": where, "planning": plans, "set_up": {key: asdict(value) for key, value in setups.items()}}
    write_json(options.json, result)


if __name__ == "__main__":
    main()
