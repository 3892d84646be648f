"""Show where the time of one training step goes.

    python benchmarks/profile_step.py --modes adamw-z3 dmuon-z3

Functions of the runtime, the optimizer and FSDP2 are wrapped with timers that do not overlap: a section counts neither
what is counted by a section inside it nor anything after it. What no section covers is the model's own forward and
backward. Timing a call costs about a microsecond, and a step has a few hundred.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import time
from collections import defaultdict
from typing import Any

import torch.distributed as dist
from bench_models import batch_of
from contenders import MODES, REPLICATED, build
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


FSDP = "torch.distributed.fsdp._fully_shard"
CORE = "dmuon_hf.core"
SECTIONS = (
    (f"{CORE}.runtime.hooks:UnitHooks.enter", "hook: before forward"),
    (f"{CORE}.runtime.hooks:UnitHooks.leave", "hook: after forward"),
    (f"{CORE}.runtime.hooks:UnitHooks._pre_backward", "hook: before backward"),
    (f"{CORE}.runtime.hooks:UnitHooks._on_leave", "hook: leaving a module"),
    (f"{CORE}.runtime.gradients:UnitGrads.arrived", "hook: gradient arrived"),
    (f"{CORE}.runtime.schedule:BackwardPass._end", "hook: end of backward"),
    (f"{CORE}.runtime.weights:UnitWeights.show_owned", "swap parameters"),
    (f"{CORE}.runtime.weights:UnitWeights.show_whole", "swap parameters"),
    (f"{CORE}.runtime.placement:OwnerBroadcast.gather", "gather: issue"),
    (f"{CORE}.runtime.placement:OwnerBroadcast._copy_in", "gather: copy in"),
    (f"{CORE}.runtime.weights:UnitWeights.wait", "gather: finish"),
    (f"{CORE}.runtime.weights:UnitWeights.reshard", "gather: free"),
    (f"{CORE}.runtime.gradients:UnitGrads._collect", "reduce: collect gradients"),
    (f"{CORE}.runtime.reduction:Reduction.launch", "reduce: pack"),
    (f"{CORE}.runtime.reduction:OwnerStage.issue", "reduce: issue"),
    (f"{CORE}.runtime.reduction:PendingReduction.finish_first_stage", "reduce: sum"),
    (f"{CORE}.runtime.reduction:PendingReduction.finish", "reduce: mean"),
    (f"{CORE}.runtime.collectives:InFlight.wait", None),
    (f"{CORE}.runtime.gradients:UnitGrads.finish", "reduce: hand over .grad"),
    (f"{CORE}.runtime.owned_tensor:OwnedTensor.like", "reduce: OwnedTensor.like"),
    (f"{CORE}.runtime.publish:PublishBucket.issue", "step: publish"),
    (f"{CORE}.runtime.publish:ColumnCopy.wait", "publish: finish"),
    (f"{CORE}.replicated.averaging:GradientAveraging._arrived", "average: hook"),
    (f"{CORE}.replicated.averaging:GradientAveraging._end", "average: end of backward"),
    (f"{CORE}.replicated.bucket:GradBucket.launch", "average: pack and issue"),
    (f"{CORE}.replicated.bucket:GradBucket.finish", "average: finish"),
    (f"{CORE}.replicated.publish:UnitPublish.issue", "step: publish"),
    (f"{CORE}.replicated.publish:UnitPublish.wait", "publish: finish"),
    (f"{CORE}.runtime.runtime:Runtime.prepare_grads", "step: prepare"),
    (f"{CORE}.sharded.surroundings:Surroundings.prepare_grads", "step: prepare"),
    (f"{CORE}.optim.binding:Binding.inspect", "step: inspect model"),
    (f"{CORE}.optim.muon:agree_on_step", "step: agreement"),
    (f"{CORE}.optim.verdict:check_and_unscale_", "step: finite check"),
    (f"{CORE}.runtime.runtime:Runtime._all_reduce", "step: agreement, all-reduce"),
    (f"{CORE}.sharded.ranks:Team.all_reduce", "step: agreement, all-reduce"),
    (f"{CORE}.optim.sweep:apply_muon", "step: stack, scale, split"),
    (f"{CORE}.optim.update:advance_momentum", "step: momentum"),
    (f"{CORE}.optim.update:apply_updates", "step: apply updates"),
    (f"{CORE}.sharded.source:ShardedSource.update", "step: sharded, rest"),
    (f"{CORE}.sharded.source:ShardedSource.flags", "step: flags"),
    (f"{CORE}.sharded.step:ShardedStep._sent", "sharded: prepare bucket"),
    (f"{CORE}.sharded.bucket:Bucket.send_directions", "sharded: pack directions"),
    (f"{CORE}.sharded.bucket:Bucket._assembled", "sharded: unpack directions"),
    (f"{CORE}.sharded.bucket:Bucket.orthogonalize", "sharded: scale, split"),
    (f"{CORE}.sharded.bucket:Bucket.send_updates", "sharded: pack updates"),
    (f"{CORE}.sharded.bucket:Bucket.apply", "sharded: unpack updates"),
    (f"{CORE}.sharded.bucket:advance_momentum", "step: momentum"),
    (f"{CORE}.sharded.bucket:apply_updates", "step: apply updates"),
    (f"{CORE}.sharded.exchange:Exchange.issue", "sharded: issue"),
    ("contenders:NewtonSchulzProbe.__call__", "step: Newton-Schulz"),
    (f"{CORE}.optim.step:apply_adamw", "step: AdamW"),
    ("torch.optim:AdamW.step", "step: AdamW"),
    (f"{CORE}.optim.muon:Muon.zero_grad", "zero_grad"),
    (f"{FSDP}._fsdp_param_group:FSDPParamGroup.unshard", "FSDP2: all-gather"),
    (f"{FSDP}._fsdp_param_group:FSDPParamGroup.wait_for_unshard", "FSDP2: all-gather"),
    (f"{FSDP}._fsdp_param_group:FSDPParamGroup.post_backward", "FSDP2: reduce-scatter"),
    (f"{FSDP}._fsdp_param_group:FSDPParamGroup.finalize_backward", "FSDP2: hooks"),
    (f"{FSDP}._fsdp_state:FSDPState._pre_forward", "FSDP2: hooks"),
    (f"{FSDP}._fsdp_state:FSDPState._post_forward", "FSDP2: hooks"),
    (f"{FSDP}._fsdp_state:FSDPState._pre_backward", "FSDP2: hooks"),
    (f"{FSDP}._fsdp_state:FSDPState._root_post_backward_final_callback", "FSDP2: hooks"),
)
"""What is timed, as ``module:attribute`` where the caller looks it up, and its section; ``None`` is waiting."""


def owner_of(path: str) -> tuple[Any, str]:
    """The module or class that has the last name of a ``module:attribute``."""
    module, _, attribute = path.partition(":")
    *outer, name = attribute.split(".")
    return functools.reduce(getattr, outer, importlib.import_module(module)), name


def instrument(sections: Sections) -> None:
    """Wrap what the sections name. Before any contender is built, since hooks bind what they find."""
    for path, section in SECTIONS:
        sections.wrap(*owner_of(path), section)


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
    parser.add_argument("--modes", nargs="+", choices=list(MODES | REPLICATED), default=["adamw-z3", "dmuon-z3"])
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
