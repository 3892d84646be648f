"""NorMuon computes the update of one process in every mode, and keeps the same second moments."""

from __future__ import annotations

import pytest

from tests.distributed.training import Run, assert_same_training, reference, train
from tests.harness import run_ranks

MUON = {"update_rule": "normuon", "normuon_beta2": 0.8}
REFERENCE = {"normuon_beta2": 0.8}


@pytest.mark.parametrize(
    ("mode", "world"), [("local", 1), ("z2", 2), ("z3", 4), ("hsdp", 4), ("hsdp_sync", 4), ("ddp", 2), ("replicate", 3)]
)
def test_owners_train_like_one_process(mode: str, world: int) -> None:
    run = Run(mode, "uneven", steps=3, muon=MUON, reference=REFERENCE)
    for result in run_ranks(train, world, run, init=mode != "local"):
        assert_same_training(run, result, reference(run))
