"""Time planning and set-up for up to 1,024 ranks, in one process that pretends to be one of them.

    python benchmarks/planning.py

Planning: the matrices of models on the meta device, of the sizes of published ones and with the layouts that
`dmuon_hf.routes` knows, get owners (`make_plan`), or workers where they stay sharded by rows (`make_sharded_plan`;
experts then lie whole, where no plan can change it). The digest is what ranks compare. Every rank does all of it.
`owners` are the ranks that have a matrix. `over mean` is how much the most loaded rank exceeds the mean of all ranks in
the plan's cost; with fewer matrices than ranks it says how many ranks have nothing to do in `step()`, not that the plan
is bad: `over bound` is how much it exceeds a bound below which no plan could bring it (`least_possible_load`), at most
2 % if the goal is met.

Set-up: `dedicate_params`, `fully_shard` on every layer and the root, and `Muon`, on the fake process group, whose
collectives move nothing: the time of the host's work, without that of real groups and of comparing the plans. The small
model is real, on rank 0. The 8B model stays on the meta device, on the last of 1,024 ranks, which owns no matrix.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from launch import ROOT
from llama_shapes import MODELS, LlamaShape
from report import machine, print_header, print_table, write_json
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from dmuon_hf import routes
from dmuon_hf.core.plan import Candidate, LinkCosts, MatrixSpec, least_possible_load, make_plan, matrix_cost
from dmuon_hf.core.sharded import ShardedEntry, make_sharded_plan
from dmuon_hf.core.shards.layout import Cut, ShardLayout
from dmuon_hf.presets import muon_specs

Matrices: TypeAlias = "list[tuple[str, nn.Parameter, MatrixSpec]]"

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": (
        "Llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8},
    ),
    "llama-3-70b": (
        "Llama",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
    "gemma-2-9b": (
        "Gemma2",
        {
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
        },
    ),
    "phi-3-mini": ("Phi3", {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32}),
    "gpt2": ("GPT2", {}),
    "qwen3-30b-a3b": (
        "Qwen3Moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
}
"""Configuration class of transformers and sizes."""
LAYOUTS = ((8, 1), (64, 1), (256, 1), (1024, 1), (8, 8), (8, 128), (64, 16))
"""Ranks of the shard and of the replicate dimension."""
SETUP_WORLDS = (8, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Planned:
    """One plan: milliseconds, and its balance."""

    planning: float
    digest: float
    owners: int
    over_mean: float
    over_bound: float | None


@dataclass(frozen=True, slots=True)
class SetUp:
    """One set-up, in milliseconds."""

    dedicate: float
    shard: float
    optimizer: float
    imbalance: float


class _Clock:
    """Processor milliseconds of a block, which other programs hardly change."""

    def __init__(self) -> None:
        self.ms = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        started = time.process_time()
        yield
        self.ms = 1e3 * (time.process_time() - started)


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


def make_family(name: str) -> Any:
    """The model of transformers with the sizes of a published one, without values."""
    import transformers

    kind, sizes = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    architecture = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    with torch.device("meta"):
        return getattr(transformers, architecture)(config)


def matrices_of(model: nn.Module) -> list[tuple[str, nn.Parameter, MatrixSpec]]:
    """What Muon takes of a model."""
    specs = muon_specs(routes(model))
    return [(name, param, specs[name]) for name, param in model.named_parameters() if name in specs]


def plan(matrices: Matrices, shard: int, replicate: int) -> Planned:
    """Owners of the 2-D matrices, a unit per layer; stacks stay where they are."""
    candidates = [
        Candidate(name=name, shape=tuple(param.shape), dtype=param.dtype, unit=_layer(name), spec=spec)
        for name, param, spec in matrices
        if param.ndim == 2
    ]
    units = list(dict.fromkeys(candidate.unit for candidate in candidates))
    planning, digesting = _Clock(), _Clock()
    with planning.running():
        made = make_plan(candidates, units=units, shard_size=shard, replicate_size=replicate)
    with digesting.running():
        made.digest()
    return _balance(planning, digesting, made.loads(), [entry.cost for entry in made.entries])


def plan_sharded(matrices: Matrices, shard: int, replicate: int) -> Planned:
    """Workers of matrices and stacks that are cut by rows, in replicas that share the work."""
    mesh = (shard,) if replicate == 1 else (replicate, shard)
    cuts = (Cut(0),) if replicate == 1 else (None, Cut(0))
    ranks = tuple(range(shard * replicate))
    entries = [
        ShardedEntry(name, param.dtype, spec, ShardLayout(tuple(param.shape), mesh, ranks, cuts))
        for name, param, spec in matrices
    ]
    planning, digesting = _Clock(), _Clock()
    with planning.running():
        made = make_sharded_plan(entries, ranks, links=LinkCosts(near=0, far=0))
    with digesting.running():
        made.digest()
    # Experts that lie whole are computed where they are, in every replica: no bound of what can be moved.
    costs = [] if any(one.is_stack for one in entries) else [matrix_cost(one.stored, one.spec) for one in entries]
    return _balance(planning, digesting, made.loads, costs)


def _layer(name: str) -> str:
    parts = name.split(".")
    number = next(place for place, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[: number + 1])


def _balance(planning: _Clock, digesting: _Clock, loads: Sequence[int], costs: Sequence[int]) -> Planned:
    largest, mean = max(loads), sum(loads) / len(loads)
    over_bound = largest / least_possible_load(costs, len(loads)) - 1 if costs else None
    return Planned(planning.ms, digesting.ms, sum(map(bool, loads)), largest / mean - 1, over_bound)


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
    matrices = matrices_of(make_family(name))
    rows, figures = [], {}
    for kind, make in (("owned", plan), ("sharded", plan_sharded)):
        if kind == "owned" and any(param.ndim == 3 for _, param, _ in matrices):
            continue
        for shard, replicate in LAYOUTS:
            planned = min((make(matrices, shard, replicate) for _ in range(rounds)), key=lambda each: each.planning)
            ranks = f"{shard * replicate}" if replicate == 1 else f"{replicate} x {shard}"
            figures[f"{kind} {ranks}"] = asdict(planned)
            rows.append(
                [
                    f"{name} ({len(matrices)})",
                    kind,
                    ranks,
                    f"{planned.planning:.0f}",
                    f"{planned.digest:.0f}",
                    f"{planned.owners}",
                    f"{100 * planned.over_mean:.1f} %",
                    "-" if planned.over_bound is None else f"{100 * planned.over_bound:.1f} %",
                ]
            )
    return rows, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="plans made, of which the fastest counts (default: 3)")
    parser.add_argument("--models", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), help="default: all")
    parser.add_argument("--json", metavar="PATH", help="write the result here")
    options = parser.parse_args()
    where = machine()
    print_header(where)
    # Imports, caches and threads of a first set-up.
    set_up(MODELS["benchmark"], 2, rank=0, device="cpu")
    rows: list[list[str]] = []
    plans: dict[str, Any] = {}
    for name in options.models:
        more, plans[name] = _plan_rows(name, options.rounds)
        rows += more
    columns = ["model (parameters)", "kind", "ranks", "plan ms", "digest ms", "owners", "over mean", "over bound"]
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
