"""Show where the time of one training step goes.

    python benchmarks/profile_step.py --modes adamw-z3 dmuon-z3

Functions of the runtime, the optimizer and FSDP2 are wrapped with timers that do not overlap: a section counts neither
what is counted by a section inside it nor anything after it. What no section covers is the model's own forward and
backward. Timing a call costs about a microsecond, and a step has a few hundred.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import defaultdict
from typing import Any

import torch.distributed as dist
from contenders import MODES, batch_of, build
from launch import run_ranks
from report import machine, print_header, print_table, write_json


class Sections:
    """Exclusive wall and CPU seconds per section of the calling thread."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._stack: list[str] = []
        self._mark = (0.0, 0.0)

    def enter(self, base: str) -> None:
        """From here on, what no wrapped function covers is counted as ``base``."""
        if self._stack:
            self._charge()
        else:
            self._mark = (time.perf_counter(), time.thread_time())
        self._stack = [base]

    def leave(self) -> None:
        self._charge()
        self._stack = []

    def _charge(self) -> None:
        now = (time.perf_counter(), time.thread_time())
        self.wall[self._stack[-1]] += now[0] - self._mark[0]
        self.cpu[self._stack[-1]] += now[1] - self._mark[1]
        self._mark = now

    def wrap(self, owner: Any, attribute: str, section: str | None) -> None:
        """Count a function of a module, or a method of a class; ``None``: as waiting, on behalf of its caller."""
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._stack:
                return original(*args, **kwargs)
            self._charge()
            name = section or f"{self._stack[-1]} (wait)"
            self._stack.append(name)
            self.calls[name] += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._charge()
                self._stack.pop()

        setattr(owner, attribute, timed)


def instrument(sections: Sections) -> None:
    """Wrap what the sections name. Before any contender is built, since hooks bind what they find."""
    from contenders import NewtonSchulzProbe
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.optim import AdamW

    from dmuon_hf.core.optim import muon, update, verdict
    from dmuon_hf.core.runtime import unit
    from dmuon_hf.core.runtime.collectives import InFlight
    from dmuon_hf.core.runtime.hooks import _UnitHooks
    from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
    from dmuon_hf.core.runtime.placement import OwnerBroadcast
    from dmuon_hf.core.runtime.publish import ColumnCopy, PublishBucket
    from dmuon_hf.core.runtime.reduction import OwnerReduction, PendingReduction, _Stage
    from dmuon_hf.core.runtime.runtime import Runtime
    from dmuon_hf.core.runtime.schedule import BackwardPass

    for owner, attribute, section in (
        (_UnitHooks, "pre_forward", "hook: before forward"),
        (_UnitHooks, "post_forward", "hook: after forward"),
        (_UnitHooks, "_pre_backward", "hook: before backward"),
        (_UnitHooks, "_on_leave", "hook: leaving a module"),
        (unit.Unit, "grad_arrived", "hook: gradient arrived"),
        (BackwardPass, "_end", "hook: end of backward"),
        (unit.Unit, "_show_owned", "swap parameters"),
        (unit.Unit, "_unshard", "swap parameters"),
        (OwnerBroadcast, "gather", "gather: issue"),
        (OwnerBroadcast, "_copy_in", "gather: copy in"),
        (unit.Unit, "wait_gather", "gather: finish"),
        (unit.Unit, "reshard", "gather: free"),
        (unit.Unit, "_fold", "reduce: fold gradients"),
        (OwnerReduction, "launch", "reduce: pack"),
        (_Stage, "issue", "reduce: issue"),
        (PendingReduction, "finish_first_stage", "reduce: sum"),
        (PendingReduction, "finish", "reduce: mean"),
        (InFlight, "wait", None),
        (unit.Unit, "finish_reduction", "reduce: hand over .grad"),
        (OwnedTensor, "like", "reduce: OwnedTensor.like"),
        (muon, "agree_on_step", "step: agreement"),
        (verdict, "check_and_unscale_", "step: finite check"),
        (Runtime, "_all_reduce", "step: agreement, all-reduce"),
        (muon, "apply_muon", "step: momentum and update"),
        (update, "_orthogonal_updates", "step: stack, scale, split"),
        (NewtonSchulzProbe, "__call__", "step: Newton-Schulz"),
        (muon, "apply_adamw", "step: AdamW"),
        (AdamW, "step", "step: AdamW"),
        (Runtime, "publish", "step: publish"),
        (PublishBucket, "issue", "step: publish"),
        (ColumnCopy, "wait", "publish: finish"),
        (muon.Muon, "zero_grad", "zero_grad"),
        (FSDPParamGroup, "unshard", "FSDP2: all-gather"),
        (FSDPParamGroup, "wait_for_unshard", "FSDP2: all-gather"),
        (FSDPParamGroup, "post_backward", "FSDP2: reduce-scatter"),
        (FSDPParamGroup, "finalize_backward", "FSDP2: hooks"),
        (FSDPState, "_pre_forward", "FSDP2: hooks"),
        (FSDPState, "_post_forward", "FSDP2: hooks"),
        (FSDPState, "_pre_backward", "FSDP2: hooks"),
        (FSDPState, "_root_post_backward_final_callback", "FSDP2: hooks"),
    ):
        sections.wrap(owner, attribute, section)


def profile(rank: int, world: int, modes: list[str], steps: int, warmup: int) -> dict[str, dict[str, list[float]]]:
    """On each rank: ``mode -> section -> [wall ms, CPU ms, calls]``, means over the steps."""
    sections = Sections()
    instrument(sections)
    contenders = [build(mode, world, clock=time.perf_counter) for mode in modes]
    totals: dict[str, dict[str, list[float]]] = {mode: defaultdict(lambda: [0.0, 0.0, 0.0]) for mode in modes}
    for step in range(warmup + steps):
        ids = batch_of(rank, step)
        for contender in contenders:
            for counts in (sections.wall, sections.cpu, sections.calls):
                counts.clear()
            dist.barrier()
            process = time.process_time()
            sections.enter("model: forward")
            loss = contender.loss(ids)
            sections.enter("model: backward")
            loss.backward()
            sections.enter("step: rest")
            contender.update()
            sections.leave()
            process = time.process_time() - process
            if step < warmup:
                continue
            table = totals[contender.name]
            for name, wall in sections.wall.items():
                for column, value in enumerate((1e3 * wall, 1e3 * sections.cpu[name], sections.calls[name])):
                    table[name][column] += value / steps
            table["all"][0] += 1e3 * sum(sections.wall.values()) / steps
            table["all"][1] += 1e3 * process / steps
    return {mode: dict(table) for mode, table in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["adamw-z3", "dmuon-z3"])
    parser.add_argument("--json", help="write the result here")
    options = parser.parse_args()
    where = machine()
    print_header(where)
    ranks = run_ranks(profile, options.ranks, options.modes, options.steps, options.warmup)
    for mode in options.modes:
        _print_mode(mode, [rank[mode] for rank in ranks])
    write_json(options.json, {"machine": where, "ranks": ranks})


def _print_mode(mode: str, ranks: list[dict[str, list[float]]]) -> None:
    names = sorted({name for rank in ranks for name in rank})

    def mean(name: str, column: int) -> float:
        return statistics.fmean(rank.get(name, [0.0, 0.0, 0.0])[column] for rank in ranks)

    names.sort(key=lambda name: -mean(name, 0))
    rows = [[name, f"{mean(name, 0):.2f}", f"{mean(name, 1):.2f}", f"{mean(name, 2):.1f}"] for name in names]
    print_table(
        f"{mode}: per step, mean of {len(ranks)} ranks ('all': CPU of every thread of the process)",
        ["section", "wall ms", "CPU ms", "calls"],
        rows,
    )


if __name__ == "__main__":
    main()
