"""Predict a training step on 8 to 1,024 GPUs. A MODEL: nothing in its tables was measured on a GPU or a cluster.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --ns-rate 5e14 --network-latency 1e-5 --separate-buckets
    python benchmarks/scaling.py --validate step2.json step4.json     (written by benchmarks/step.py --json)

The formulas are in dmuon_hf/step_model.py. The rates are given on the command line; the defaults are round numbers in
the range of an H100 with one 400 Gbit/s network card per GPU, not measurements. The owners' work is that of the plan
which the package makes for each number of ranks. Every rank trains on the same number of tokens, so the batch grows.

  adamw     FSDP2 with a fused AdamW
  gathered  FSDP2, and a Muon that gathers every momentum and runs Newton-Schulz on every rank
  dmuon     this package
  z3, z2    whole weights freed or kept between forward and backward, one replica
  hsdp      z3 inside replicas of a few ranks

--validate measures on this machine, on as many gloo ranks as the file has, what the model takes as given (Newton-Schulz
on one matrix of each shape, elementwise updates, a broadcast, a small all-reduce, all ranks at once), and sets the
prediction of the optimizer phase beside the measured one. No number is fitted to the step that is predicted. The model
lets the gathered variant run our Newton-Schulz, which takes fewer flops than its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import ALL_MODES, Mode
from launch import run_ranks
from llama_shapes import MODELS, LlamaShape, plan_for
from report import machine, print_header, print_table, write_json
from torch import Tensor

import dmuon_hf.core as dmuon
from dmuon_hf.step_model import (
    Layout,
    Link,
    Machine,
    Method,
    OptimizerTime,
    entry_flops,
    forward_backward,
    optimizer_phase,
    owner_work,
)

METHODS: dict[str, Method] = {"dmuon": "dmuon", "gathered": "gathered", "adamw": "adamw"}
"""What the optimizers of the benchmark are in the model; it has no formulas for others."""
WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
HSDP_SHARD = {"llama-3-8b": 8, "llama-3-70b": 64}
"""Ranks of a replica: one node, or as many nodes as hold 16 bytes per parameter of the model with room to spare."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One column of the tables."""

    method: Method
    hsdp: bool = False
    reshard: bool = True

    def layout(self, model: str, world: int) -> Layout | None:
        """How ``world`` ranks are arranged, or ``None`` where they make no two replicas."""
        if not self.hsdp:
            return Layout(world, reshard=self.reshard)
        shard = HSDP_SHARD[model]
        return Layout(shard, world // shard, reshard=self.reshard) if world >= 2 * shard else None


STRATEGIES = {
    "adamw-z3": Strategy("adamw"),
    "gathered-z3": Strategy("gathered"),
    "dmuon-z3": Strategy("dmuon"),
    "dmuon-z2": Strategy("dmuon", reshard=False),
    "adamw-hsdp": Strategy("adamw", hsdp=True),
    "dmuon-hsdp": Strategy("dmuon", hsdp=True),
}


def predict(
    shape: LlamaShape, worlds: list[int], rates: Machine, *, tokens: int, sequence: int, overlap: float
) -> dict[int, dict[str, dict[str, float]]]:
    """By number of ranks and strategy: the parts of the step in seconds, and what the plan's balance is."""
    predictions: dict[int, dict[str, dict[str, float]]] = {}
    for world in worlds:
        predictions[world] = {}
        for name, strategy in STRATEGIES.items():
            layout = strategy.layout(shape.name, world)
            if layout is None:
                continue
            plan = plan_for(shape, layout)
            passes = forward_backward(shape, plan, strategy.method, layout, rates, tokens=tokens, sequence=sequence)
            phase = optimizer_phase(shape, plan, strategy.method, layout, rates)
            predictions[world][name] = {
                "step": passes.total(overlap) + phase.total,
                "forward_backward": passes.total(overlap),
                "compute": passes.compute,
                "communication": passes.communication,
                "optimizer": phase.total,
                **{f"optimizer_{part}": seconds for part, seconds in asdict(phase).items()},
                "imbalance": plan.imbalance(),
                "owners": sum(work.numel > 0 for work in owner_work(plan)),
            }
    return predictions


def show(shape: LlamaShape, predictions: dict[int, dict[str, dict[str, float]]]) -> None:
    for part, title in (("step", "the whole step"), ("optimizer", "of it optimizer.step()")):
        rows = [
            [str(world), *(f"{1e3 * row[name][part]:.1f}" if name in row else "-" for name in STRATEGIES)]
            for world, row in predictions.items()
        ]
        print_table(f"MODEL, not measured: {shape.name}, {title}, ms", ["GPUs", *STRATEGIES], rows)
    rows = []
    for world, row in predictions.items():
        ours, gathered = row["dmuon-z3"], row["gathered-z3"]
        rows.append(
            [
                str(world),
                f"{ours['owners']:.0f}",
                f"{100 * ours['imbalance']:.0f} %",
                f"{gathered['optimizer'] / ours['optimizer']:.1f}",
                f"{ours['step'] / row['adamw-z3']['step']:.3f}",
                f"{gathered['step'] / row['adamw-z3']['step']:.3f}",
                f"{row['dmuon-hsdp']['step'] / row['adamw-hsdp']['step']:.3f}" if "dmuon-hsdp" in row else "-",
            ]
        )
    columns = [
        "GPUs",
        "owners",
        "imbalance",
        "optimizer gathered / dmuon",
        "step dmuon / adamw",
        "gathered / adamw",
        "hsdp dmuon / adamw",
    ]
    print_table(f"MODEL, not measured: {shape.name}, ratios", columns, rows)


def measure_rates(rank: int, world: int, dtypes: list[torch.dtype]) -> dict[str, float]:
    """What the model takes as given, on this rank while all ranks do the same.

    Computation is timed by the processor time of this rank, which other programs hardly change, and then divided among
    the ranks that share a core; communication by the clock.
    """
    shape, share = MODELS["benchmark"], min(1.0, (os.cpu_count() or 1) / world)
    plan = plan_for(shape, Layout(1))
    layer = [entry for entry in plan.entries if entry.unit == plan.units[0]]
    flops = sum(entry_flops(entry) for entry in layer)
    matrices = [torch.randn(entry.shape) for entry in layer]
    rates = {}
    for dtype in dtypes:
        orthogonalize = dmuon.NewtonSchulz("auto", dtype=dtype)
        seconds = _median(partial(_call_each, orthogonalize, matrices), clock=time.process_time)
        rates[f"ns_rate {dtype}"] = share * flops / seconds
    # As many elements as a rank of the benchmark updates, a matrix at a time.
    tensors = [torch.randn(entry.shape) for entry in plan.entries[: max(1, len(plan.entries) // world)]]
    others = [torch.randn_like(tensor) for tensor in tensors]
    moved = 3 * sum(tensor.nbytes for tensor in tensors)
    seconds = _median(lambda: torch._foreach_add_(tensors, others, alpha=1e-3), clock=time.process_time)
    rates["memory_bandwidth"] = share * moved / seconds
    large, small = torch.zeros(1 << 20), torch.zeros(4)
    rates["latency"] = _median(lambda: dist.all_reduce(small)) / (2 * (world - 1).bit_length())
    seconds = _median(lambda: dist.broadcast(large, src=0)) - (world - 1) * rates["latency"]
    rates["bandwidth"] = (world - 1) / world * large.nbytes / max(seconds, 1e-9)
    return rates


def _call_each(fn: Callable[[Tensor], Tensor], arguments: list[Tensor]) -> None:
    for argument in arguments:
        fn(argument)


def _median(run: Callable[[], Any], *, clock: Callable[[], float] = time.perf_counter, repeats: int = 15) -> float:
    """Seconds of one run, all ranks starting together; the first two runs do not count."""
    seconds = []
    for i in range(repeats + 2):
        dist.barrier()
        started = clock()
        run()
        if i >= 2:
            seconds.append(clock() - started)
    return statistics.median(seconds)


def validate(path: str) -> dict[str, Any]:
    """Set predictions beside what ``benchmarks/step.py`` measured, in ms."""
    measured = json.loads(Path(path).read_text())
    world, summary = measured["ranks"], measured["summary"]
    modes = {name: ALL_MODES[name] for name in summary if name in ALL_MODES and ALL_MODES[name].optimizer in METHODS}
    ranks = run_ranks(measure_rates, world, sorted({mode.dtype for mode in modes.values()}, key=str))
    rates = {key: statistics.median(rank[key] for rank in ranks) for key in ranks[0]}
    rows, figures = [], {}
    for name, mode in modes.items():
        phase = predict_here(mode, world, rates)
        parts = {part: 1e3 * seconds for part, seconds in asdict(phase).items()}
        predicted, seen, seen_ns = 1e3 * phase.total, summary[name]["optimizer"], summary[name]["ns"]
        rows.append(
            [
                name,
                *(f"{value:.1f}" for value in (*parts.values(), predicted, seen, seen - predicted)),
                f"{predicted / seen:.2f}",
                f"{seen_ns:.1f}" if seen_ns else "-",
            ]
        )
        figures[name] = {**parts, "predicted": predicted, "measured": seen, "measured_ns": seen_ns}
    given = ", ".join(f"{key} {value:.3g}" for key, value in rates.items())
    print(f"\nMeasured here on each of {world} ranks (flop/s, bytes/s, s): {given}")
    columns = ["mode", "NS", "elementwise", "communication", "in all", "measured", "not in it", "ratio", "measured NS"]
    print_table(f"Optimizer phase on {world} ranks, ms: MODEL against {path}", columns, rows)
    return {"file": path, "ranks": world, "rates": rates, "modes": figures}


def predict_here(mode: Mode, world: int, rates: dict[str, float]) -> OptimizerTime:
    """The optimizer phase of the benchmark's model on this machine, where everything travels in float32."""
    shape, replicas = MODELS["benchmark"], 2 if mode.hsdp else 1
    layout = Layout(world // replicas, replicas, reshard=mode.reshard, gather_bytes=4)
    link = Link(rates["bandwidth"], rates["latency"])
    host = Machine(
        ns_rate=rates[f"ns_rate {mode.dtype}"],
        compute_rate=rates[f"ns_rate {mode.dtype}"],
        memory_bandwidth=rates["memory_bandwidth"],
        network=link,
        node=link,
    )
    return optimizer_phase(shape, plan_for(shape, layout), METHODS[mode.optimizer], layout, host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    models = [name for name in MODELS if name in HSDP_SHARD]
    add("--models", nargs="+", choices=models, default=models, help="default: %(default)s")
    add("--worlds", nargs="+", type=int, default=list(WORLDS), metavar="N", help="numbers of GPUs")
    add("--ns-rate", type=float, default=3e14, metavar="FLOPS", help="Newton-Schulz of one GPU (default: %(default)g)")
    add("--compute-rate", type=float, default=4e14, metavar="FLOPS", help="forward and backward (default: %(default)g)")
    add("--memory-bandwidth", type=float, default=2.5e12, metavar="BYTES", help="per second (default: %(default)g)")
    add(
        "--network-bandwidth",
        type=float,
        default=4e10,
        metavar="BYTES",
        help="of one GPU's card, per second (default: %(default)g)",
    )
    add(
        "--network-latency",
        type=float,
        default=5e-6,
        metavar="S",
        help="of one hop between nodes (default: %(default)g)",
    )
    add("--node-bandwidth", type=float, default=3e11, metavar="BYTES", help="inside a node (default: %(default)g)")
    add("--node-latency", type=float, default=2e-6, metavar="S", help="inside a node (default: %(default)g)")
    add("--node-size", type=int, default=8, metavar="N", help="GPUs of a node (default: %(default)s)")
    add("--tokens", type=int, default=8192, help="of one rank and step (default: %(default)s)")
    add("--sequence", type=int, default=8192, help="tokens that attend to one another (default: %(default)s)")
    add("--overlap", type=float, default=1.0, help="share that computation hides, 0 to 1 (default: %(default)s)")
    add("--separate-buckets", action="store_true", help="each owner's broadcast pays its own latency")
    add("--validate", nargs="+", metavar="JSON", help="only compare with results of benchmarks/step.py")
    add("--json", metavar="PATH", help="write the result here")
    options = parser.parse_args()
    where = machine()
    print_header(where)
    if options.validate:
        write_json(options.json, {"machine": where, "validation": [validate(path) for path in options.validate]})
        return
    rates = Machine(
        ns_rate=options.ns_rate,
        compute_rate=options.compute_rate,
        memory_bandwidth=options.memory_bandwidth,
        network=Link(options.network_bandwidth, options.network_latency),
        node=Link(options.node_bandwidth, options.node_latency),
        node_size=options.node_size,
        fused_buckets=not options.separate_buckets,
    )
    print(f"\nGiven, not measured: {rates}")
    print(f"{options.tokens} tokens per GPU, sequences of {options.sequence}, overlap {options.overlap:g}")
    result: dict[str, Any] = {}
    for name in options.models:
        result[name] = predict(
            MODELS[name],
            options.worlds,
            rates,
            tokens=options.tokens,
            sequence=options.sequence,
            overlap=options.overlap,
        )
        show(MODELS[name], result[name])
    print("\nA MODEL: formulas in dmuon_hf/step_model.py applied to the rates above.")
    write_json(options.json, {"machine": where, "rates": asdict(rates), "model": result})


if __name__ == "__main__":
    main()
