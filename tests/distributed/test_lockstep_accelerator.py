"""The monitor on an accelerator, whose hosts wait in calls like any other: late ranks are waited for."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.lockstep import watch as watch_module
from dmuon_hf.core.lockstep.watch import LockstepWatch
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


class _Said(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write_text(record.getMessage())


def save_alone(rank: int, world: int, directory: Path) -> None:
    """Rank 0 saves, rank 1 stands in a barrier, where it is left until rank 0 comes."""
    said = directory / "said by rank 1"
    watch_module._GRACE_ON_CPU = 0.5
    if rank == 1:
        logging.getLogger("dmuon_hf").addHandler(_Said(said))
    with mock.patch.object(LockstepWatch, "__init__", followed(LockstepWatch.__init__)):
        model, _ = prepare(world, "z3", norm=True)
    if rank == 0:
        with pytest.raises(LockstepError, match=r"rank 1 waits in torch\.distributed\.barrier"):
            dmuon.get_model_state_dict(model)
        while not said.exists():
            time.sleep(0.05)
        time.sleep(LONG)
    dist.barrier()
    assert "rank 0 waits in get_model_state_dict" in said.read_text()


def test_divergence_is_reported_on_every_rank_and_ends_no_process(tmp_path: Path) -> None:
    run_ranks(save_alone, 2, tmp_path, env={"DMUON_HANG_SECONDS": "1"})
