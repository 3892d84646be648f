"""A tiny mixture of experts from scratch: are its stacks of experts better on AdamW or on Muon?

    python benchmarks/results/experts.py
    python benchmarks/results/experts.py --full --jobs 2 --docs

All ways have the attention matrices on Muon and routers, embeddings and norms on AdamW, each at its best rate. That is
one rate for all weights, or, since AdamW's best rates from scratch are lower, stacks at an eighth of it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import from_scratch
from command import main
from from_scratch import Budget, train_with
from study import Run, Study

_STACKS = "*.mlp.experts.*"
METHODS: dict[str, dict[str, Any]] = {
    "stacks on AdamW": {"routes": {_STACKS: "adamw"}},
    "stacks on AdamW, 1/8 of the rate": {"routes": {_STACKS: "adamw"}, "param_groups": {_STACKS: {"lr_factor": 1 / 8}}},
    "stacks on Muon": {},
}
RATES = {
    "stacks on AdamW": (2e-3, 4e-3, 8e-3, 1.6e-2),
    "stacks on AdamW, 1/8 of the rate": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "stacks on Muon": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
}
SMALL = replace(
    from_scratch.SMALL,
    loop=replace(from_scratch.SMALL.loop, steps=120, warmup=12),
    hidden_size=128,
    layers=3,
    experts=8,
)
FULL = replace(from_scratch.FULL, experts=8)


def train_run(budget: Budget, run: Run) -> dict[str, Any]:
    return train_with(budget, run, METHODS[run.method])


def study(full: bool) -> Study:
    budget = FULL if full else SMALL
    return replace(
        from_scratch.study(full),
        name="experts",
        budget=budget,
        rates=RATES,
        train=train_run,
        said=budget.said(),
    )


if __name__ == "__main__":
    sys.exit(main(study, __doc__))
