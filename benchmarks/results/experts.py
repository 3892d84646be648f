"""A tiny mixture of experts from scratch: are its stacks of experts better on AdamW or on Muon?

    python benchmarks/results/experts.py
    python benchmarks/results/experts.py --full --jobs 2 --docs

Both ways have the attention matrices on Muon and routers, embeddings and norms on AdamW; each at its best rate, which
is one for all weights, as the default scale of Muon's rate allows.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import from_scratch
from command import main
from from_scratch import Budget, train_with
from study import Run, Study

METHODS: dict[str, dict[str, Any]] = {
    "stacks on AdamW": {"routes": {"*.mlp.experts.*": "adamw"}},
    "stacks on Muon": {},
}
SMALL = replace(from_scratch.SMALL, hidden_size=128, layers=3, experts=8)
FULL = replace(from_scratch.FULL, experts=8)


def train_run(budget: Budget, run: Run) -> dict[str, Any]:
    return train_with(budget, run, METHODS[run.method])


def study(full: bool) -> Study:
    budget = FULL if full else SMALL
    return replace(
        from_scratch.study(full),
        name="experts",
        budget=budget,
        rates=dict.fromkeys(METHODS, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)),
        train=train_run,
        said=budget.said(),
    )


if __name__ == "__main__":
    sys.exit(main(study, __doc__))
