"""The monitor on an accelerator, whose hosts wait in calls like any other: late ranks are waited for."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch.distributed as dist

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime.lockstep_watch import LockstepWatch
from tests.distributed.lockstep_setup import part_of, prepare
from tests.harness import run_ranks

ENV = {"DMUON_HANG_SECONDS": "1", "DMUON_HANG_ABORT_SECONDS": "1"}
# Longer than rule 4 of the proofs needs, and than it takes to act on one.
LONG = 4.0


def followed(init: Any) -> Any:
    def of_an_accelerator(watch: LockstepWatch, *args: Any, **kwargs: Any) -> None:
        init(watch, *args, **kwargs)
        watch._follow_host = True

    return of_an_accelerator


def train_with_a_long_call(rank: int, world: int) -> int:
    """Rank 0 stands in one call, outside of any collective, wherever the others come to wait for it."""
    with mock.patch.object(LockstepWatch, "__init__", followed(LockstepWatch.__init__)):
        model, optimizer = prepare(world, "z3", norm=True)
    if rank == 0:
        time.sleep(LONG)
    model(part_of(0, rank, world)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        time.sleep(LONG)
    dmuon.get_model_state_dict(model)
    dist.barrier()
    return optimizer.skipped_steps


def test_rank_in_a_long_call_is_waited_for() -> None:
    assert run_ranks(train_with_a_long_call, 2, env=ENV) == [0, 0]
