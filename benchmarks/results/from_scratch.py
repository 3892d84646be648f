"""How many steps, and how much processor time, to the same loss when a small model is trained from scratch?

    python benchmarks/results/from_scratch.py
    python benchmarks/results/from_scratch.py --full --jobs 2 --docs

A Llama over the bytes of the standard library's source: torch's AdamW against Muon and NorMuon, each at its best
learning rate of a grid. The loss to reach is the one that AdamW, at its best rate, has reached at its end with every
seed. Time is the processor time of the training steps of one process with one thread, since the machine may be shared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import neighbours  # noqa: F401
import torch
from command import main
from plots import over_rates, over_steps
from pretrain import ModelArguments, make_model
from recipe_models import byte_tokenizer
from study import Column, Outcome, Run, Study
from texts import source
from torch import Tensor
from training import Loop, make_optimizer, train

METHODS: dict[str, dict[str, Any] | None] = {"AdamW": None, "Muon": {}, "NorMuon": {"update_rule": "normuon"}}
"""Options of `create_optimizer`; None is torch's AdamW."""
RATES = {
    "AdamW": (5e-4, 1e-3, 2e-3, 4e-3),
    "Muon": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "NorMuon": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
}


@dataclass(frozen=True, slots=True)
class Budget:
    """Model, text and training of every run."""

    loop: Loop
    hidden_size: int = 192
    layers: int = 4
    experts: int = 0
    train_blocks: int = 8192
    held_out_blocks: int = 32
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)

    def said(self) -> str:
        kind = f"mixture of {self.experts} experts (2 for each token)" if self.experts else "Llama"
        parameters = sum(parameter.numel() for parameter in make_on_meta(self).parameters())
        return (
            f"{kind} of {self.layers} layers, width {self.hidden_size}, {parameters / 1e6:.1f} M parameters, over the "
            f"bytes of the standard library; {self.loop.said()}, weight decay {self.weight_decay}, AdamW's "
            f"betas {self.betas}; {self.held_out_blocks} held-out sequences"
        )


SMALL = Budget(Loop(steps=200, warmup=20, sequences=8, tokens=128, bf16=True, measure_every=10))
FULL = replace(SMALL, loop=replace(SMALL.loop, steps=1000, warmup=100, tokens=256, measure_every=25), hidden_size=256)


def make_on_meta(budget: Budget) -> Any:
    """The model without its weights."""
    with torch.device("meta"):
        return _make(budget)


def _make(budget: Budget) -> Any:
    sizes = ModelArguments(hidden_size=budget.hidden_size, layers=budget.layers, experts=budget.experts)
    return make_model(sizes, byte_tokenizer())


@lru_cache(maxsize=1)
def _text(tokens: int, train_blocks: int, held_out_blocks: int) -> tuple[Tensor, Tensor]:
    return source(byte_tokenizer(), tokens, train=train_blocks, held_out=held_out_blocks)


def train_with(budget: Budget, run: Run, options: dict[str, Any] | None) -> dict[str, Any]:
    """Train a new model; the seed decides its weights and the order of the text."""
    torch.manual_seed(run.seed)
    model = _make(budget)
    blocks, held_out = _text(budget.loop.tokens, budget.train_blocks, budget.held_out_blocks)
    optimizer = make_optimizer(
        model,
        run.rate,
        options,
        weight_decay=budget.weight_decay,
        betas=budget.betas,
        bf16=budget.loop.bf16,
    )
    trace = train(model, optimizer, blocks, held_out, budget.loop, run.seed)
    return {
        "held_out": trace.held_out[-1],
        "cpu_seconds": trace.cpu[-1],
        "measured_at": trace.measured_at,
        "curve": trace.held_out,
        "cpu_curve": trace.cpu,
        "train": sum(trace.train[-10:]) / len(trace.train[-10:]),
    }


def train_run(budget: Budget, run: Run) -> dict[str, Any]:
    return train_with(budget, run, METHODS[run.method])


def reach(study: Study, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Add when each run first had the loss that the first method, at its best rate, has reached with every seed."""
    reference = study.best(outcomes).get(next(iter(study.rates)))
    if reference is None:
        return list(outcomes)
    target = max(outcome.result["held_out"] for outcome in reference)
    found: list[Outcome] = []
    for outcome in outcomes:
        result = dict(outcome.result)
        first = next((i for i, loss in enumerate(result["curve"]) if loss <= target), None)
        result["target"] = target
        result["steps_to"] = None if first is None else result["measured_at"][first]
        result["cpu_to"] = None if first is None else result["cpu_curve"][first]
        found.append(replace(outcome, result=result))
    return found


COLUMNS = (
    Column("held-out loss", "held_out"),
    Column("steps to the loss of {first}", "steps_to", ".0f"),
    Column("CPU seconds to it", "cpu_to", ".1f"),
    Column("CPU seconds in all", "cpu_seconds", ".1f"),
)


def draw(study: Study, outcomes: Sequence[Outcome], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    over_rates(left, study, outcomes, "held-out loss at the end")
    over_steps(right, study, outcomes, "held-out loss")


def study(full: bool) -> Study:
    budget = FULL if full else SMALL
    return Study(
        name="from_scratch",
        budget=budget,
        rates=RATES,
        seeds=(0, 1, 2),
        train=train_run,
        score="held_out",
        said=budget.said(),
        columns=COLUMNS,
        draw=draw,
        derive=reach,
        whole_grid=full,
    )


if __name__ == "__main__":
    sys.exit(main(study, __doc__))
