"""Time a training step against FSDP2 with AdamW and against other ways to run Muon under FSDP2.

    pip install --no-deps --target outputs/rivals muon-fsdp2==0.3.0 heavyball==3.2.1
    python benchmarks/step.py --ranks 4 --rivals outputs/rivals

Peers that are not installed are named and left out; they compile during the warm-up. The gathered variant needs no
installation: every rank gathers every update and runs the Newton-Schulz of torch.optim.Muon on all of them.

All contenders live in the same processes, one compute thread each, and take turns step by step, so they meet the same
machine. The ranks share the cores of one machine and talk over gloo, so unlike on a cluster the owners' Newton-Schulz
cannot hide behind one another: its own time is measured apart and taken off.

How the figures are made (ms; medians over the rounds; ratios are formed within each round, then their median taken):

  total      from the first rank's start of forward to the last rank's end of optimizer.step() and zero_grad(), with the
             HSDP publish finished
  fwd+bwd    the part of it until the last rank has left backward(); optimizer is the rest
  NS         right after each step all ranks together repeat that step's batched Newton-Schulz calls on the same input:
             from the first rank's start to the last rank's end
  NS inside  time inside these calls during the step itself, mean / largest of the ranks
  NS calls   the most of a rank / matrices in those of all ranks
  CPU        processor time of all threads of all ranks during the step, of which optimizer and NS: depends little on
             other load
  ratios     of the total, with or without NS, to the total of AdamW: under FSDP2's default (adamw-z3), or with the same
             model and sharding ("same"), alone or with our NS added; of CPU likewise
  peers      ours over a peer with the same sharding: total, optimizer, and the optimizer's CPU. The gathered variant
             repeats on N ranks what ownership does once, so for it the goal of the optimizer is 1/N plus 10 %. Peers
             iterate in bfloat16, as only our modes named bf16 do. Sharded modes stand over owned ones too; goal: 1.10.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from bench_models import batch_of
from contenders import ALL_MODES, OURS, PEERS, TENSOR_PARALLEL, Contender, build, choose_modes
from launch import run_ranks
from report import machine, print_header, print_table, write_json

DEFAULT = "adamw-z3"
GOAL = 1.10
TIMED = {name: mode for name, mode in ALL_MODES.items() if name not in TENSOR_PARALLEL}


@dataclass(frozen=True, slots=True)
class Sample:
    """One step of one contender on one rank. Moments in seconds on the machine's monotonic clock, CPU in seconds."""

    start: float
    backward_end: float
    end: float
    cpu: float
    cpu_optimizer: float
    ns_inside: float
    ns_start: float
    ns_end: float
    ns_cpu: float
    ns_calls: int
    ns_matrices: int


@dataclass(frozen=True, slots=True)
class Round:
    """One step of one contender, all ranks together, in milliseconds."""

    total: float
    forward_backward: float
    optimizer: float
    cpu: float
    cpu_optimizer: float
    ns: float
    ns_cpu: float
    ns_inside_mean: float
    ns_inside_max: float
    ns_calls: int
    ns_matrices: int


def measure(
    rank: int, world: int, modes: list[str], steps: int, warmup: int, rivals: str | None
) -> list[dict[str, Sample]]:
    """On each rank: one sample of every mode for each of ``steps`` rounds. Packages may be imported from ``rivals``."""
    if rivals is not None:
        sys.path.append(rivals)
    contenders = [build(name, world, clock=time.perf_counter) for name in modes]
    rounds: list[dict[str, Sample]] = []
    for i in range(warmup + steps):
        ids = batch_of(rank, i)
        shift = i % len(contenders)
        samples = {c.name: _sample(c, ids) for c in contenders[shift:] + contenders[:shift]}
        gc.collect()
        if i >= warmup:
            rounds.append(samples)
        if rank == 0 and sys.stderr.isatty():
            print(f"\rround {i + 1} of {warmup + steps}", end="", file=sys.stderr, flush=True)
    if rank == 0 and sys.stderr.isatty():
        print(file=sys.stderr)
    return rounds


def _sample(contender: Contender, ids: Any) -> Sample:
    probe = contender.probe
    if probe is not None:
        probe.reset()
    gc.disable()
    dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    contender.loss(ids).backward()
    backward_end, cpu_backward = time.perf_counter(), time.process_time()
    contender.update()
    end, cpu_end = time.perf_counter(), time.process_time()
    ns_inside = 0.0 if probe is None else probe.seconds
    calls, matrices = (0, 0) if probe is None else (probe.calls, probe.matrices)
    ns_start = ns_end = ns_cpu = 0.0
    dist.barrier()
    if probe is not None:
        ns_cpu, ns_start = time.process_time(), time.perf_counter()
        probe.replay()
        ns_end, ns_cpu = time.perf_counter(), time.process_time() - ns_cpu
        probe.reset()
        dist.barrier()
    gc.enable()
    return Sample(
        start=start,
        backward_end=backward_end,
        end=end,
        cpu=cpu_end - cpu,
        cpu_optimizer=cpu_end - cpu_backward,
        ns_inside=ns_inside,
        ns_start=ns_start,
        ns_end=ns_end,
        ns_cpu=ns_cpu,
        ns_calls=calls,
        ns_matrices=matrices,
    )


def combine(ranks: list[Sample]) -> Round:
    """What the ranks saw of one step, as one."""
    start = min(sample.start for sample in ranks)
    backward = max(sample.backward_end for sample in ranks) - start
    total = max(sample.end for sample in ranks) - start
    inside = [1e3 * sample.ns_inside for sample in ranks]
    return Round(
        total=1e3 * total,
        forward_backward=1e3 * backward,
        optimizer=1e3 * (total - backward),
        cpu=1e3 * sum(sample.cpu for sample in ranks),
        cpu_optimizer=1e3 * sum(sample.cpu_optimizer for sample in ranks),
        ns=1e3 * (max(sample.ns_end for sample in ranks) - min(sample.ns_start for sample in ranks)),
        ns_cpu=1e3 * sum(sample.ns_cpu for sample in ranks),
        ns_inside_mean=statistics.fmean(inside),
        ns_inside_max=max(inside),
        ns_calls=max(sample.ns_calls for sample in ranks),
        ns_matrices=sum(sample.ns_matrices for sample in ranks),
    )


def summarise(rounds: dict[str, list[Round]]) -> dict[str, dict[str, float]]:
    """Per mode the medians, and the ratios to the AdamW modes that ran."""
    summary: dict[str, dict[str, float]] = {}
    for name, mine in rounds.items():
        figures = {key: statistics.median(asdict(r)[key] for r in mine) for key in asdict(mine[0])}
        default, same = rounds.get(DEFAULT), rounds.get(ALL_MODES[name].rival)
        if default is not None and not ALL_MODES[name].experts:
            figures["with_ns"] = _ratio(mine, default, _total, _total)
            # A peer's Newton-Schulz is not measured apart, so its step without it is not known.
            if name not in PEERS:
                figures["without_ns"] = _ratio(mine, default, lambda r: r.total - r.ns, _total)
        if same is not None and name not in PEERS:
            figures["with_ns_same"] = _ratio(mine, same, _total, _total)
            figures["without_ns_same"] = _ratio(mine, same, lambda r: r.total - r.ns, _total)
            figures["cpu_without_ns_same"] = _ratio(mine, same, lambda r: r.cpu - r.ns_cpu, lambda r: r.cpu)
            figures["over_same_and_ns"] = _over_sum(mine, same, _total, lambda r: r.ns)
            figures["cpu_over_same_and_ns"] = _over_sum(mine, same, lambda r: r.cpu, lambda r: r.ns_cpu)
        summary[name] = figures
    return summary


def compare(rounds: dict[str, list[Round]]) -> dict[str, dict[str, dict[str, float]]]:
    """Per mode of ours and per peer with the same sharding: medians of the ratios of ours to the peer's."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, mine in rounds.items():
        mode = ALL_MODES[name]
        if mode.optimizer not in OURS:
            continue
        peers = [p for p in rounds if p in PEERS and PEERS[p].rival == mode.rival]
        if mode.optimizer == "sharded":
            peers += [p for p in rounds if ALL_MODES[p] == replace(mode, optimizer="dmuon")]
        found[name] = {
            peer: {
                "total": _ratio(mine, rounds[peer], _total, _total),
                "optimizer": _ratio(mine, rounds[peer], lambda r: r.optimizer, lambda r: r.optimizer),
                "cpu_optimizer": _ratio(mine, rounds[peer], lambda r: r.cpu_optimizer, lambda r: r.cpu_optimizer),
            }
            for peer in peers
        }
    return found


def _total(measured: Round) -> float:
    return measured.total


def _ratio(
    mine: list[Round], theirs: list[Round], part: Callable[[Round], float], whole: Callable[[Round], float]
) -> float:
    return statistics.median(part(a) / whole(b) for a, b in zip(mine, theirs, strict=True))


def _over_sum(
    mine: list[Round], theirs: list[Round], whole: Callable[[Round], float], own: Callable[[Round], float]
) -> float:
    """Mine over the sum of theirs and a part of mine."""
    return statistics.median(whole(a) / (whole(b) + own(a)) for a, b in zip(mine, theirs, strict=True))


def _print(summary: dict[str, dict[str, float]], world: int) -> None:
    times = []
    for name, s in summary.items():
        ns = [
            f"{s['ns']:.0f}",
            f"{s['ns_inside_mean']:.0f} / {s['ns_inside_max']:.0f}",
            f"{s['ns_calls']:.0f} / {s['ns_matrices']:.0f}",
            f"{s['ns_cpu']:.0f}",
        ]
        if ALL_MODES[name].optimizer not in OURS:
            ns = ["-"] * len(ns)
        shown = [f"{s[key]:.0f}" for key in ("total", "forward_backward", "optimizer")]
        cpu = [f"{s[key]:.0f}" for key in ("cpu", "cpu_optimizer")]
        times.append([name, *shown, *ns[:3], *cpu, ns[3]])
    columns = ["mode", "total", "fwd+bwd", "optimizer", "NS", "NS inside", "NS calls", "CPU", "optimizer's", "NS's"]
    print_table(f"A training step on {world} gloo ranks, ms", columns, times)
    shown_ratios = {
        f"total / {DEFAULT}": "with_ns",
        "without NS": "without_ns",
        "total / same": "with_ns_same",
        "without NS / same": "without_ns_same",
        "CPU without NS / same": "cpu_without_ns_same",
        "total / (same + NS)": "over_same_and_ns",
        "CPU / (same + NS)": "cpu_over_same_and_ns",
    }
    ratios = [
        [name, *(f"{s[key]:.2f}" if key in s else "-" for key in shown_ratios.values())]
        for name, s in summary.items()
        if ALL_MODES[name].optimizer in OURS
    ]
    print_table(
        f"Ratios ('same': AdamW with the same model and sharding); goals: without NS at most {GOAL:.2f}, DDP over "
        "(same + NS) at most 1.05",
        ["mode", *shown_ratios],
        ratios,
    )


def _print_peers(comparison: dict[str, dict[str, dict[str, float]]], world: int) -> None:
    rows = []
    for name, peers in comparison.items():
        for peer, ratios in peers.items():
            row = [f"{name} / {peer}", *(f"{ratios[key]:.2f}" for key in ("total", "optimizer", "cpu_optimizer"))]
            gathered = ALL_MODES[peer].optimizer == "gathered"
            shares = [f"{world * ratios[key]:.2f}" if gathered else "-" for key in ("optimizer", "cpu_optimizer")]
            rows.append([*row, *shares])
    if rows:
        columns = ["ours / peer", "total", "optimizer", "CPU of it", f"{world} x optimizer", f"{world} x CPU of it"]
        print_table(f"Peers; goals: total below 1, {world} x optimizer at most {GOAL:.2f} (bf16 modes)", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="rounds that count (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them (default: %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=list(TIMED), help="default: all that can run here")
    parser.add_argument("--rivals", metavar="DIR", help="where pip installed the peers, if not here")
    parser.add_argument("--json", metavar="PATH", help="write everything, every round included")
    options = parser.parse_args()
    if options.rivals is not None:
        sys.path.append(options.rivals)
    where = machine()
    print_header(where)
    modes = choose_modes(options.modes, options.ranks, TIMED)
    ranks = run_ranks(measure, options.ranks, modes, options.steps, options.warmup, options.rivals)
    rounds = {name: [combine([rank[i][name] for rank in ranks]) for i in range(options.steps)] for name in modes}
    summary, comparison = summarise(rounds), compare(rounds)
    print("".join((__doc__ or "").partition("How the figures")[1:]))
    _print(summary, options.ranks)
    _print_peers(comparison, options.ranks)
    result = {"machine": where, "ranks": options.ranks, "summary": summary, "peers": comparison}
    write_json(options.json, {**result, "rounds": {name: [asdict(r) for r in rounds[name]] for name in modes}})


if __name__ == "__main__":
    main()
