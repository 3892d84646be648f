"""Penalties on owned weights beside a loss on data: gradients and weights of one process, in every order and mode."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime import require_runtime
from tests.distributed.training import HYPER, Run, batch_of, grads, is_matrix, make_model, prepare, snapshot
from tests.harness import models, run_ranks
from tests.harness.reference import ReferenceOptimizer

# One way per optimizer step. "zeroed by hand": a pass under no_sync whose gradients the user sets to None one by one.
WAYS = ("one loss", "penalty first", "penalty last", "accumulated", "zeroed by hand", "penalty alone", "clipped")


def penalty(model: nn.Module, owned: bool, step: int) -> torch.Tensor:
    """Orthogonality and decay of every matrix; decay on the whole weight, or on the owned one itself."""
    total = torch.zeros(())
    for name, param in model.named_parameters():
        if not is_matrix(name, param):
            continue
        whole = param.full_tensor() if owned else param
        gram = whole.T @ whole
        total = total + 1e-3 * (gram - torch.eye(len(gram))).square().sum()
        total = total + 1e-2 * (param if step % 2 else whole).square().sum()
    return total


def losses(model: nn.Module, run: Run, step: int, rank: int, world: int, micro: int = 0, n_micro: int = 1) -> Any:
    part = models.rank_part(batch_of(run, step), rank, world, micro=micro, n_micro=n_micro)
    return models.loss_of(model, part)


def backward_of(way: str, model: nn.Module, run: Run, step: int, rank: int, world: int, owned: bool) -> None:
    def data() -> torch.Tensor:
        return losses(model, run, step, rank, world)

    if way == "penalty first":
        penalty(model, owned, step).backward()
        data().backward()
    elif way == "penalty last":
        data().backward()
        penalty(model, owned, step).backward()
    elif way == "accumulated":
        for micro in range(2):
            with dmuon.no_sync(model) if owned and micro == 0 else contextlib.nullcontext():
                loss = losses(model, run, step, rank, world, micro, 2) / 2 + penalty(model, owned, step) / 2
                loss.backward()
    elif way == "penalty alone":
        penalty(model, owned, step).backward()
    else:
        if way == "zeroed by hand" and owned:
            runtime = require_runtime(model)
            runtime.set_requires_sync(False)
            data().backward()
            runtime.set_requires_sync(True)
            for param in model.parameters():
                param.grad = None
        loss = data() + penalty(model, owned, step)
        loss.backward()
        if way == "clipped":
            torch.nn.utils.clip_grad_norm_([p for n, p in model.named_parameters() if is_matrix(n, p)], 0.1)


def train(rank: int, world: int, run: Run) -> list[dict[str, Any]]:
    model, optimizer = prepare(run, world)
    history = []
    for step, way in enumerate(WAYS):
        backward_of(way, model, run, step, rank, world, owned=True)
        found = grads(model)
        optimizer.step()
        optimizer.zero_grad()
        history.append({"grads": found, "weights": snapshot(model)})
    return history


def reference(run: Run) -> list[dict[str, Any]]:
    model = make_model(run.model)
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    history = []
    for step, way in enumerate(WAYS):
        backward_of(way, model, run, step, 0, 1, owned=False)
        found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        history.append({"grads": found, "weights": {n: p.detach().clone() for n, p in model.named_parameters()}})
    return history


@pytest.mark.parametrize(
    ("mode", "world", "model", "checkpointing"),
    [("z2", 2, "uneven", None), ("z3", 2, "llama", "non_reentrant"), ("hsdp", 4, "uneven", None)],
)
def test_penalty_trains_like_one_process(mode: str, world: int, model: str, checkpointing: str | None) -> None:
    run = Run(mode, model, checkpointing=checkpointing)
    expected = reference(run)
    for history in run_ranks(train, world, run):
        for way, got, want in zip(WAYS, history, expected, strict=True):
            for kind in ("grads", "weights"):
                for name, value in want[kind].items():
                    if value is None:
                        assert got[kind][name] is None, (way, kind, name)
                    else:
                        error = (got[kind][name] - value).norm() / value.norm()
                        assert error < 5e-4, (way, kind, name, error)
