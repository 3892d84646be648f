"""Fine-tune SmolLM2-135M on the source of the standard library: who fits best, moves least and forgets least?

    python benchmarks/results/finetune.py
    python benchmarks/results/finetune.py --full --jobs 2 --docs

AdamW, Muon and NorMuon on all weights, and LoRA adapters under AdamW or with Muon on the factors B, on the same
batches at the same budget, each over a small grid of learning rates. Measured at the end: the loss on held-out source,
the drift from the base (relative Frobenius distance of all weights, adapters merged), and the loss on English prose,
the descriptions of installed packages, whose rise over that of the base is what was forgotten.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import neighbours
import torch
from command import main
from plots import over_rates, scatter
from recipe_models import load_model
from study import Column, Outcome, Run, Study
from texts import prose, source
from torch import Tensor, nn
from training import Loop, make_optimizer, mean_loss, train

UNPACKED = neighbours.ROOT / "outputs" / "results"


@dataclass(frozen=True, slots=True)
class Method:
    """Options of `create_optimizer` (None is torch's AdamW), and the rank of LoRA adapters, 0 without."""

    options: Mapping[str, Any] | None
    rank: int = 0


METHODS = {
    "AdamW": Method(None),
    "Muon": Method({}),
    "NorMuon": Method({"update_rule": "normuon"}),
    "LoRA, AdamW": Method(None, rank=16),
    "LoRA, Muon on B": Method({"lora": "muon_b"}, rank=16),
}
RATES = {
    "AdamW": (4e-5, 1e-4, 2e-4, 4e-4),
    "Muon": (1e-4, 2e-4, 4e-4, 8e-4),
    "NorMuon": (1e-4, 2e-4, 4e-4, 8e-4),
    "LoRA, AdamW": (4e-4, 1e-3, 4e-3, 1e-2),
    "LoRA, Muon on B": (2e-3, 4e-3, 1e-2, 2e-2),
}


@dataclass(frozen=True, slots=True)
class Budget:
    """Model, text and training of every run."""

    loop: Loop
    model: str = "smollm2"
    train_blocks: int = 4096
    held_out_blocks: int = 16
    prose_blocks: int = 16

    def said(self) -> str:
        return (
            f"{self.model} in fp32 on the standard library's source; {self.loop.said()}, no weight decay; LoRA of "
            f"rank 16 on all linear layers; {self.held_out_blocks} held-out sequences of source, {self.prose_blocks} "
            "of prose"
        )


SMALL = Budget(Loop(steps=8, warmup=2, sequences=4, tokens=128, bf16=True))
FULL = replace(SMALL, loop=replace(SMALL.loop, steps=30, tokens=256), held_out_blocks=64, prose_blocks=64)


@dataclass(frozen=True, slots=True)
class Base:
    """What every run of a process starts from: weights, texts and the losses of the base."""

    weights: Mapping[str, Tensor]
    blocks: Tensor
    held_out: Tensor
    prose: Tensor
    held_out_loss: float
    prose_loss: float


@lru_cache(maxsize=1)
def base_of(budget: Budget) -> Base:
    model, tokenizer = load_model(budget.model, UNPACKED, torch.float32)
    tokens = budget.loop.tokens
    blocks, held_out = source(tokenizer, tokens, train=budget.train_blocks, held_out=budget.held_out_blocks)
    other = prose(tokenizer, tokens, budget.prose_blocks)
    losses = mean_loss(model, held_out, budget.loop), mean_loss(model, other, budget.loop)
    return Base(model.state_dict(), blocks, held_out, other, *losses)


def train_run(budget: Budget, run: Run) -> dict[str, Any]:
    """Fine-tune a fresh copy of the base; the seed decides the order of the text and the factors of LoRA."""
    base = base_of(budget)
    model: Any = load_model(budget.model, UNPACKED, torch.float32)[0]
    method = METHODS[run.method]
    if method.rank:
        model = _with_adapters(model, method.rank, run.seed)
    optimizer = make_optimizer(
        model, run.rate, method.options, weight_decay=0.0, betas=(0.9, 0.999), bf16=budget.loop.bf16
    )
    trace = train(model, optimizer, base.blocks, base.held_out, budget.loop, run.seed)
    after = mean_loss(model, base.prose, budget.loop)
    return {
        "held_out": trace.held_out[-1],
        "base_held_out": base.held_out_loss,
        "prose": after,
        "base_prose": base.prose_loss,
        "forgotten": after - base.prose_loss,
        "drift": _drift(model.merge_and_unload() if method.rank else model, base.weights),
        "cpu_seconds": trace.cpu[-1],
        "train": trace.train,
    }


def _with_adapters(model: nn.Module, rank: int, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config)


@torch.no_grad()
def _drift(model: nn.Module, base: Mapping[str, Tensor]) -> float:
    """`|W - W0| / |W0|` over all weights together."""
    distance = total = 0.0
    for name, parameter in model.named_parameters():
        distance += (parameter.double() - base[name].double()).square().sum().item()
        total += base[name].double().square().sum().item()
    return float((distance / total) ** 0.5)


COLUMNS = (
    Column("held-out loss", "held_out"),
    Column("of the base", "base_held_out"),
    Column("drift", "drift", ".4f"),
    Column("prose: loss", "prose"),
    Column("over the base", "forgotten", "+.3f"),
    Column("CPU seconds", "cpu_seconds", ".0f"),
)


def draw(study: Study, outcomes: Sequence[Outcome], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    over_rates(left, study, outcomes, "held-out loss")
    left.axhline(outcomes[0].result["base_held_out"], color="gray", linestyle=":")
    scatter(right, study, outcomes, ("held_out", "held-out loss"), ("forgotten", "loss on prose over the base's"))
    right.axhline(0.0, color="gray", linestyle=":")


def study(full: bool) -> Study:
    budget = FULL if full else SMALL
    return Study(
        name="finetune",
        budget=budget,
        rates=RATES,
        seeds=(0, 1, 2),
        train=train_run,
        score="held_out",
        said=budget.said(),
        columns=COLUMNS,
        draw=draw,
        whole_grid=full,
    )


if __name__ == "__main__":
    sys.exit(main(study, __doc__))
