"""NorMuon computes the update of one process in every mode, and keeps the same second moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dmuon_hf.core as dmuon
from tests.distributed import test_sharded_training, test_tensor_parallel
from tests.distributed.sharded_training import ShardedRun
from tests.distributed.tp_training import TpRun
from tests.distributed.training import Run, assert_same_training, backward, prepare, reference, snapshot, train
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


@pytest.mark.parametrize("mode", ["hsdp", "fsdp_tp"])
def test_sharded_matrices_train_like_one_process(mode: str) -> None:
    test_sharded_training.check(ShardedRun(mode, Run("sharded", "uneven", steps=3, muon=MUON, reference=REFERENCE)))


@pytest.mark.parametrize(
    ("mode", "gram"), [("tp_3", False), ("shard_tp", False), ("ddp_tp", False), ("tp_3", True), ("shard_tp", True)]
)
def test_parts_train_like_one_process(mode: str, gram: bool) -> None:
    """With Gram matrices alone on the axis, sums of squares of rows travel beside them."""
    columns: dict[str, Any] = {"tp_distributed_gram": True, "tp_distributed_gram_policy": "always"} if gram else {}
    run = Run("tp", "uneven", steps=3, muon={**MUON, **columns}, reference=REFERENCE)
    test_tensor_parallel.check(TpRun(mode, run, everything=True))


def _change_rule_on_last_rank(rank: int, world: int, run: Run) -> str:
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    before = snapshot(model)
    muon = next(group for group in optimizer.param_groups if group["route"] == "muon")
    if rank == world - 1:
        muon["update_rule"] = "normuon"
    with pytest.raises(dmuon.ConfigurationError) as refused:
        optimizer.step()
    after = snapshot(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    muon["update_rule"] = "muon"
    optimizer.step()
    return str(refused.value)


@pytest.mark.parametrize(("mode", "world"), [("z3", 2), ("hsdp", 4), ("ddp", 2)])
def test_rule_that_one_rank_changes_is_refused_on_all_before_the_step(mode: str, world: int) -> None:
    for message in run_ranks(_change_rule_on_last_rank, world, Run(mode)):
        assert "default/muon' has update_rule='normuon' now and was made with 'muon'" in message
