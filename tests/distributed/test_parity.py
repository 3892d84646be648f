"""Every topology computes the update of one process on the whole batch."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.training import Run, assert_same_training, reference, train
from tests.harness import run_ranks

WORLDS = [("local", 1), ("z2", 2), ("z3", 2), ("z3", 3), ("z2", 4), ("z3", 4), ("hsdp", 4), ("hsdp_sync", 4)]


def check(run: Run, world: int) -> list[dict]:
    results = run_ranks(train, world, run, init=run.mode != "local")
    expected = reference(run)
    for result in results:
        assert_same_training(run, result, expected)
    return results


@pytest.mark.parametrize(("mode", "world"), WORLDS)
def test_uneven_shapes_train_like_one_process(mode: str, world: int) -> None:
    check(Run(mode, "uneven"), world)


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "nonreentrant"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(("mode", "world"), [("local", 1), ("z2", 2), ("z3", 4), ("hsdp", 4)])
def test_tied_llama_trains_like_one_process(mode: str, world: int, accumulate: int, checkpointing: str | None) -> None:
    check(Run(mode, "llama_tied", accumulate=accumulate, checkpointing=checkpointing), world)


def test_hsdp_sync_and_async_publish_are_bit_equal() -> None:
    sync = run_ranks(train, 4, Run("hsdp_sync", "llama"))[0]
    overlapped = run_ranks(train, 4, Run("hsdp", "llama"))[0]
    for a, b in zip(sync["weights"], overlapped["weights"], strict=True):
        for name in a:
            assert torch.equal(a[name], b[name]), name
