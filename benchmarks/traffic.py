"""Count the bytes that a training step puts on the wire, next to the formulas.

    python benchmarks/traffic.py --ranks 4

Bytes are counted where a collective is handed to its process group and converted with the ring model: (n-1)/n of the
payload for broadcast, reduce, all-gather and reduce-scatter on n ranks, twice that for all-reduce; for an all-to-all
what a rank really sends to others. All figures are the mean over ranks of what one rank sends in one step.

With P bytes of Muon matrices on N ranks:

  z2    2 (N-1)/N P    weights gathered once, gradients reduced once
  z3    3 (N-1)/N P    weights gathered for forward and for backward
  hsdp  on R replicas of G ranks: 3 (G-1)/G P inside a replica, and between replicas, on the 1/G of each rank's column,
        (R-1)/R P/G to reduce and (R-1)/R P/G to publish the updated weights
  sharded  2 (G-1)/G P/G inside a replica in step(), directions and updates, where replicas compute alike; what FSDP2
        sends of these matrices is counted as the rest
  ddp   3 (N-1)/N P    gradients averaged by an all-reduce, updated weights broadcast by their owners
  tp    on T tensor-parallel ranks times G: 3 (G-1)/G P/T for the parts, and in step() 2 (T-1)/T P/N on the axis,
        directions and updates
  moe   P without the stacks of experts, of which nothing is sent but by FSDP2; with them under DDP

Directions and updates travel in the dtype of Newton-Schulz. The rest is what FSDP2 and DTensor send; what
DistributedDataParallel sends of parameters without owners is issued by C++ and not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from bench_models import batch_of
from contenders import EXPERTS, MODES, REPLICATED, TENSOR_PARALLEL, Contender, Mode, build, choose_modes
from launch import ROOT, run_ranks
from report import machine, print_header, print_table, write_json

import dmuon_hf.core as dmuon

KNOWN = {
    name: mode
    for name, mode in (MODES | REPLICATED | EXPERTS | TENSOR_PARALLEL).items()
    if mode.optimizer != "adamw-ddp"
}
"""Modes whose collectives can be counted."""

# What the kinds of collectives do, by the group they run on (the descriptions of this package's process groups); in
# step() some do something else.
_ROLES = {
    ("dmuon_shard", "broadcast"): "gather",
    ("dmuon_shard", "all_to_all"): "reduce",
    ("dmuon_shard", "all_reduce"): "average",
    ("dmuon_replicate", "all_to_all"): "reduce replicas",
    ("dmuon_replicate", "broadcast"): "publish",
}
_ROLES_IN_STEP = {
    ("dmuon_shard", "broadcast"): "publish",
    ("dmuon_replicate", "broadcast"): "publish",
    ("dmuon_tensor", "all_to_all"): "exchange",
    ("dmuon_sharded", "all_to_all"): "exchange",
    ("dmuon_shard", "all_reduce"): "agreement",
    ("dmuon_replicate", "all_reduce"): "agreement",
    ("dmuon_tensor", "all_reduce"): "agreement",
    ("dmuon_sharded", "all_reduce"): "agreement",
}
_MUON = ("gather", "reduce", "reduce replicas", "average", "publish", "exchange")
_COLUMNS = (*_MUON, "agreement", "rest")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends in one step, and the collectives it takes part in, by role."""

    sent: dict[str, float]
    calls: dict[str, int]
    sent_in_step: dict[str, float]
    matrix_bytes: int


def count(rank: int, world: int, modes: list[str]) -> dict[str, Traffic]:
    """On each rank: the traffic of the second step of every mode; the first one sets things up."""
    result = {}
    for name in modes:
        contender = build(name, world, clock=time.perf_counter)
        data = rank // KNOWN[name].tensor_parallel
        _train(contender, batch_of(data, 0))
        result[name] = _count_step(contender, batch_of(data, 1), stacks=KNOWN[name].replicated)
    return result


def _train(contender: Contender, ids: Any) -> None:
    contender.loss(ids).backward()
    contender.update()


def _count_step(contender: Contender, ids: Any, *, stacks: bool) -> Traffic:
    sys.path.insert(0, str(ROOT))
    from tests.harness.comm import CollectiveCounter

    sent, in_step = dict.fromkeys(_COLUMNS, 0.0), dict.fromkeys(_COLUMNS, 0.0)
    calls = dict.fromkeys(_COLUMNS, 0)
    with CollectiveCounter() as counter:
        contender.loss(ids).backward()
        with counter.phase("step"):
            contender.update()
    for record in counter.select():
        role = "rest"
        if record.tag.startswith("dmuon_"):
            role = (_ROLES_IN_STEP if record.phase == "step" else _ROLES)[record.tag, record.kind]
        sent[role] += record.ring_bytes
        calls[role] += 1
        if record.phase == "step":
            in_step[role] += record.ring_bytes
    sources = contender.optimizer.sources if isinstance(contender.optimizer, dmuon.Muon) else ()
    muon = [param for source in sources for param in source.params.values()]
    matrices = [param for param in muon if stacks or param.ndim == 2]
    return Traffic(sent, calls, in_step, sum(param.numel() * param.element_size() for param in matrices))


def formula(mode: Mode, world: int, matrix_bytes: int) -> float:
    """Bytes of Muon weights and gradients that a rank sends per step; see the module. ``matrix_bytes`` in fp32."""
    if mode.replicated:
        return 3 * (world - 1) / world * matrix_bytes
    replicas = 2 if mode.hsdp else 1
    axis = mode.tensor_parallel
    inside = world // replicas // axis
    on_the_wire = matrix_bytes * mode.dtype.itemsize / 4
    if mode.optimizer == "sharded":
        # Matrices of this size are computed alike in every replica: directions in and updates home inside of it.
        return 2 * (inside - 1) / inside * on_the_wire / inside
    transfers = 3 if mode.reshard else 2
    within = transfers * (inside - 1) / inside * matrix_bytes / axis
    between = 2 * (replicas - 1) / replicas * matrix_bytes / inside / axis
    return within + between + 2 * (axis - 1) / axis * on_the_wire / world


def _mean(ranks: list[Traffic], field: str, role: str) -> float:
    return statistics.fmean(getattr(traffic, field)[role] for traffic in ranks)


def _row(name: str, ranks: list[Traffic], world: int) -> tuple[list[str], dict[str, Any]]:
    sent = {role: _mean(ranks, "sent", role) for role in _COLUMNS}
    in_step = {role: _mean(ranks, "sent_in_step", role) for role in _COLUMNS}
    muon = sum(sent[role] for role in _MUON)
    dedicated = ranks[0].matrix_bytes
    expected = formula(KNOWN[name], world, dedicated) if dedicated else 0.0
    row = [
        name,
        *(f"{sent[role] / 2**20:.2f}" for role in _COLUMNS if role != "agreement"),
        f"{muon / 2**20:.2f}" if dedicated else "-",
        f"{expected / 2**20:.2f}" if dedicated else "-",
        f"{muon / expected:.3f}" if dedicated else "-",
        f"{sum(in_step.values()) / 2**20:.4f}",
        f"{sum(ranks[0].calls.values())}",
    ]
    figures = {
        "sent": sent,
        "sent_in_step": in_step,
        "calls": ranks[0].calls,
        "muon": muon,
        "formula": expected,
        "matrix_bytes": dedicated,
    }
    return row, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=list(KNOWN), help="default: all that can run here")
    parser.add_argument("--json", metavar="PATH", help="write the result here")
    options = parser.parse_args()
    where = machine()
    print_header(where)
    chosen = choose_modes(options.modes, options.ranks, KNOWN)
    # Of two dtypes one, where both are there.
    modes = [name for name in chosen if options.modes or name.removesuffix("-bf16") == name or KNOWN[name].experts]
    ranks = run_ranks(count, options.ranks, modes)
    rows, figures = [], {}
    for name in modes:
        row, figures[name] = _row(name, [rank[name] for rank in ranks], options.ranks)
        rows.append(row)
    columns = [
        "mode",
        *(role for role in _COLUMNS if role != "agreement"),
        "Muon",
        "formula",
        "ratio",
        "in step()",
        "calls",
    ]
    print_table(f"MiB sent by a rank in one step, mean of {options.ranks} ranks", columns, rows)
    write_json(options.json, {"machine": where, "ranks": options.ranks, "modes": figures})


if __name__ == "__main__":
    main()
