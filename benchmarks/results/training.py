"""The one training loop of all studies, and the optimizers that they compare."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, get_cosine_schedule_with_warmup

import dmuon_hf
import dmuon_hf.core as dmuon

__all__ = ["Loop", "Trace", "make_optimizer", "mean_loss", "train"]


@dataclass(frozen=True, slots=True)
class Loop:
    """How a model is trained: linear warm-up, then a cosine to zero; gradients clipped to norm 1.

    Attributes:
        steps: optimizer steps.
        warmup: steps of them until the full rate.
        sequences: of a batch.
        tokens: of a sequence.
        bf16: autocast to bfloat16; weights and state are fp32 always.
        measure_every: steps between measurements of the held-out loss; 0 for one at the end.
    """

    steps: int
    warmup: int
    sequences: int
    tokens: int
    bf16: bool
    measure_every: int = 0

    def said(self) -> str:
        """In words."""
        return (
            f"{self.steps} steps of {self.sequences} x {self.tokens} tokens, cosine after {self.warmup} steps of "
            f"warm-up, clipping at 1, {'bfloat16 autocast and Newton-Schulz' if self.bf16 else 'fp32'}"
        )

    def precision(self) -> AbstractContextManager[Any]:
        """Of forward passes."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)


@dataclass(slots=True)
class Trace:
    """What was measured on the way. `measured_at`, `held_out` and `cpu` belong together, entry by entry.

    Attributes:
        train: loss of every batch.
        measured_at: steps made when the held-out loss was measured.
        held_out: that loss.
        cpu: seconds of this process's processor time that the steps until then took, without measurements.
    """

    train: list[float] = field(default_factory=list)
    measured_at: list[int] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def make_optimizer(
    model: nn.Module,
    lr: float,
    options: Mapping[str, Any] | None,
    *,
    weight_decay: float,
    betas: tuple[float, float],
    bf16: bool,
) -> torch.optim.Optimizer:
    """AdamW of torch where `options` is None, else `dmuon_hf.create_optimizer` with them; the same decay.

    `betas` are those of AdamW in either case. Newton-Schulz iterates in bfloat16 where the model does.
    """
    if options is not None:
        backend = dmuon.NewtonSchulz("auto", dtype=torch.bfloat16 if bf16 else torch.float32)
        return dmuon_hf.create_optimizer(
            model, lr=lr, weight_decay=weight_decay, betas=betas, ns_backend=backend, **options
        )
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for name, parameter in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in trained if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Tensor, held_out: Tensor, loop: Loop, seed: int
) -> Trace:
    """Train on batches of `blocks` (count, tokens), the same for a seed whatever trains on them."""
    scheduler = get_cosine_schedule_with_warmup(optimizer, loop.warmup, loop.steps)
    trace = Trace()
    cpu = 0.0
    for step, batch in enumerate(_batches(blocks, loop, seed), 1):
        model.train()
        started = time.process_time()
        with loop.precision():
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        cpu += time.process_time() - started
        trace.train.append(loss.item())
        if step == loop.steps or (loop.measure_every and step % loop.measure_every == 0):
            trace.measured_at.append(step)
            trace.held_out.append(mean_loss(model, held_out, loop))
            trace.cpu.append(cpu)
    return trace


@torch.no_grad()
def mean_loss(model: nn.Module, blocks: Tensor, loop: Loop) -> float:
    """Mean loss over blocks (count, tokens) of equal length."""
    model.eval()
    total = 0.0
    for batch in blocks.split(loop.sequences):
        with loop.precision():
            total += len(batch) * model(input_ids=batch, labels=batch).loss.item()
    return total / len(blocks)


def _batches(blocks: Tensor, loop: Loop, seed: int) -> Iterator[Tensor]:
    """Batches in an order that follows from the seed, without repetition until the blocks are used up."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(loop.steps):
        while len(order) < loop.sequences:
            order = torch.cat([order, torch.randperm(len(blocks), generator=generator)])
        yield blocks[order[: loop.sequences]]
        order = order[loop.sequences :]
