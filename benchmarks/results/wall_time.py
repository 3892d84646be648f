"""The wall time of a whole training run on 4 CPU processes: AdamW against this package's Muon, mode by mode.

    python benchmarks/results/wall_time.py
    python benchmarks/results/wall_time.py --full --docs

Both contenders of a mode live in the same 4 gloo processes, one compute thread each, and take turns of several steps,
so that other load meets both alike. Counted is everything from the start of a turn's first forward to the end of its
last step on the last rank: batches, forward, backward, clipping, optimizer, what is published. Setting up is not. The
small form trains the model of `benchmarks/step.py`, the full one the model of the demo. Needs a quiet machine.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import neighbours
import torch
import torch.distributed as dist
from bench_models import batch_of
from command import main
from contenders import Contender, build, multiplies_bfloat16
from launch import run_ranks
from plots import bars
from study import Column, Outcome, Run, Study

from dmuon_hf.core.runtime import runtime_of

PAIRS = {
    "FSDP2, Z3": ("adamw-z3", "dmuon-z3"),
    "FSDP2, Z2": ("adamw-z2", "dmuon-z2"),
    "HSDP 2x2": ("adamw-hsdp", "dmuon-hsdp"),
    "DDP": ("adamw-ddp", "ddp"),
}
"""AdamW and ours in the modes of `contenders`; Newton-Schulz in fp32."""
_BF16 = ", NS in bfloat16"
METHODS = PAIRS | {name + _BF16: (rival, f"{ours}-bf16") for name, (rival, ours) in PAIRS.items()}


@dataclass(frozen=True, slots=True)
class Budget:
    """Model and length of a run. `demo` is the demo's model instead of the benchmarks'; `turn` divides `steps`."""

    demo: bool
    steps: int
    turn: int
    batch: tuple[int, int]
    warmup: int = 2
    ranks: int = 4

    def said(self) -> str:
        model = (
            "SmolLM2-135M, the model of the demo" if self.demo else "a Llama of 3.4 M parameters (`bench_models.py`)"
        )
        return (
            f"{model}, in fp32; {self.steps} steps of {self.batch[0]} x {self.batch[1]} tokens on each of {self.ranks} "
            f"processes, in turns of {self.turn} steps, after {self.warmup} steps that do not count; clipping at 1"
        )


SMALL = Budget(demo=False, steps=40, turn=10, batch=(2, 32))
FULL = Budget(demo=True, steps=12, turn=3, batch=(2, 128), warmup=1)


def race(rank: int, world: int, budget: Budget, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """On each rank: wall seconds and processor seconds of this process that each contender's run took."""
    # On a mesh of two dimensions it says at every norm that one collective could be saved.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    contenders = [build(name, world, clock=time.perf_counter, model=_demo() if budget.demo else None) for name in names]
    for contender in contenders:
        _turn(contender, budget, rank, range(budget.warmup))
    spent = {name: {"seconds": 0.0, "cpu": 0.0} for name in names}
    for i, start in enumerate(range(0, budget.steps, budget.turn)):
        for contender in contenders if i % 2 == 0 else reversed(contenders):
            seconds, cpu = _turn(contender, budget, rank, range(start, start + budget.turn))
            spent[contender.name]["seconds"] += seconds
            spent[contender.name]["cpu"] += cpu
    return spent


def _turn(contender: Contender, budget: Budget, rank: int, steps: range) -> tuple[float, float]:
    dist.barrier()
    started, cpu = time.perf_counter(), time.process_time()
    for step in steps:
        contender.loss(batch_of(rank, step, budget.batch)).backward()
        torch.nn.utils.clip_grad_norm_(contender.model.parameters(), 1.0)
        contender.optimizer.step()
        contender.optimizer.zero_grad()
    runtime = runtime_of(contender.model)
    if runtime is not None:
        runtime.finish_publish()
    cpu = time.process_time() - cpu
    dist.barrier()
    return time.perf_counter() - started, cpu


def _demo() -> Any:
    from recipe_models import load_model

    return load_model("smollm2", neighbours.ROOT / "outputs" / "results", torch.float32)[0]


def train_run(budget: Budget, run: Run) -> dict[str, Any]:
    """One launch; the seed is only a count of repetitions."""
    rival, ours = METHODS[run.method]
    if budget.demo:
        # Unpacked before, since the ranks would do it at once.
        _demo()
    ranks = run_ranks(race, budget.ranks, budget, (rival, ours))
    seconds = {name: max(rank[name]["seconds"] for rank in ranks) for name in (rival, ours)}
    cpu = {name: sum(rank[name]["cpu"] for rank in ranks) for name in (rival, ours)}
    return {
        "adamw": seconds[rival],
        "ours": seconds[ours],
        "ratio": seconds[ours] / seconds[rival],
        "adamw_cpu": cpu[rival],
        "ours_cpu": cpu[ours],
        "cpu_ratio": cpu[ours] / cpu[rival],
    }


COLUMNS = (
    Column("AdamW, s", "adamw", ".1f"),
    Column("ours, s", "ours", ".1f"),
    Column("ours / AdamW", "ratio", ".2f"),
    Column("CPU: AdamW, s", "adamw_cpu", ".1f"),
    Column("CPU: ours, s", "ours_cpu", ".1f"),
    Column("CPU: ours / AdamW", "cpu_ratio", ".2f"),
)


def draw(study: Study, outcomes: Sequence[Outcome], figure: Any) -> None:
    bars(figure.subplots(), study, outcomes, {"adamw": "AdamW", "ours": "ours"}, "wall seconds of a run")


def study(full: bool) -> Study:
    budget = FULL if full else SMALL
    names = [name for name in METHODS if multiplies_bfloat16() or not name.endswith(_BF16)]
    return Study(
        name="wall_time",
        budget=budget,
        rates=dict.fromkeys(names, (1e-3,)),
        seeds=(0, 1, 2),
        train=train_run,
        score="ratio",
        said=budget.said(),
        columns=COLUMNS,
        draw=draw,
        alone=True,
    )


if __name__ == "__main__":
    sys.exit(main(study, __doc__))
