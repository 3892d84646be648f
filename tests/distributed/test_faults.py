"""Ranks that do different things get an error that says who waits where, on every rank, and never hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import LockstepError
from tests.distributed.lockstep_setup import Net, part_of, prepare
from tests.harness import RankOutcome, run_ranks_outcomes
from tests.harness.faults import die, fail, on_call

LIMIT = 2.0
ODD = 1  # the rank that does something else
STEPS = 3


def train_step(model: Net, optimizer: dmuon.Muon, step: int, rank: int, world: int, **options: Any) -> None:
    model(part_of(step, rank, world), **options).backward()
    optimizer.step()
    optimizer.zero_grad()


def _drop_layer(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    train_step(model, optimizer, 1, rank, world, skip=(2,) if rank == ODD else ())


def _drop_two_layers(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    train_step(model, optimizer, 1, rank, world, skip=(1, 2) if rank == ODD else ())


def _skip_backward(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    loss = model(part_of(1, rank, world))
    if rank != ODD:
        loss.backward()
    optimizer.step()


def _skip_step(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    model(part_of(1, rank, world)).backward()
    if rank != ODD:
        optimizer.step()


def _skip_batch(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    if rank != ODD:
        train_step(model, optimizer, 1, rank, world)


def _save_alone(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    if rank == ODD:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _swallow_error(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    model.layers[1].register_full_backward_hook(lambda *_: fail() if rank == ODD else None)
    try:
        model(part_of(1, rank, world)).backward()
    except RuntimeError:
        optimizer.zero_grad()
        return
    optimizer.step()


def _raise_in_backward(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    model.layers[1].register_full_backward_hook(lambda *_: fail() if rank == ODD else None)
    model(part_of(1, rank, world)).backward()


def _die_in_backward(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    model.layers[1].register_full_backward_hook(lambda *_: die() if rank == ODD else None)
    model(part_of(1, rank, world)).backward()


FAULTS: dict[str, Callable[..., None]] = {
    f.__name__.lstrip("_"): f
    for f in (
        _drop_layer,
        _drop_two_layers,
        _skip_backward,
        _skip_step,
        _skip_batch,
        _save_alone,
        _swallow_error,
        _raise_in_backward,
        _die_in_backward,
    )
}


def train_with_fault(rank: int, world: int, fault: str, mode: str, norm: bool) -> None:
    model, optimizer = prepare(world, mode, norm=norm)
    train_step(model, optimizer, 0, rank, world)
    FAULTS[fault](model, optimizer, rank, world)
    for step in range(2, 2 + STEPS):
        train_step(model, optimizer, step, rank, world)
    dist.barrier()
