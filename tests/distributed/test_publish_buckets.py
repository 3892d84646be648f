"""HSDP: several units published in one bucket; same bytes, same weights, fewer collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import ConfigurationError
from tests.distributed.training import (
    Run,
    assert_same_training,
    backward,
    muon_for_matrices,
    prepare,
    reference,
    second_backward_of_zeroed,
    train,
)
from tests.harness import run_ranks
from tests.harness.comm import CollectiveCounter
from tests.harness.models import tiny_mlp

WHOLE_MODEL = 64.0


def run_with(bucket: float, *, mode: str = "hsdp", model: str = "llama", **options: Any) -> Run:
    return Run(mode, model, dedicate={"replicate_broadcast_bucket_mb": bucket}, **options)


@pytest.mark.parametrize("bucket", [0.01, WHOLE_MODEL])
@pytest.mark.parametrize("mode", ["hsdp", "hsdp_sync"])
def test_buckets_train_bitwise_like_a_publish_of_each_unit(mode: str, bucket: float) -> None:
    plain = run_ranks(train, 4, run_with(0.0, mode=mode, steps=3))[0]
    for result in run_ranks(train, 4, run_with(bucket, mode=mode, steps=3)):
        for step, weights in enumerate(plain["weights"]):
            assert all(torch.equal(result["weights"][step][name], want) for name, want in weights.items())


def test_managed_parameters_in_buckets_train_like_one_process() -> None:
    options = {"param_policy_fn": muon_for_matrices, "replicate_broadcast_bucket_mb": WHOLE_MODEL}
    run = Run("hsdp", "uneven", pure=True, accumulate=2, steps=3, dedicate=options)
    expected = reference(run)
    for result in run_ranks(train, 4, run):
        assert_same_training(run, result, expected, rtol=1e-3)


def count(rank: int, world: int, bucket: float) -> dict[str, Any]:
    model, optimizer = prepare(run_with(bucket, model="mlp"), world)
    backward(model, run_with(bucket, model="mlp"), 0, rank, world)
    with CollectiveCounter() as counter:
        with counter.phase("step"):
            optimizer.step()
        optimizer.zero_grad()
        with counter.phase("forward"):
            backward(model, run_with(bucket, model="mlp"), 1, rank, world)
        records = counter.select("broadcast", tag="dmuon_replicate")
        phases = [record.phase for record in records]
    units = len(optimizer.runtime.plan.units)
    return {
        "calls": len(records),
        "phases": set(phases),
        "bytes": sum(record.payload for record in records),
        "units": units,
    }


def test_bucket_sends_the_same_bytes_in_one_broadcast_per_replica_and_only_in_step() -> None:
    plain = run_ranks(count, 4, 0.0)
    for without, result in zip(plain, run_ranks(count, 4, WHOLE_MODEL), strict=True):
        assert result["bytes"] == without["bytes"]
        assert result["calls"] <= 2 < without["calls"]
        assert result["phases"] == {"step"}


def load(rank: int, world: int) -> list[float]:
    return [second_backward_of_zeroed(run_with(WHOLE_MODEL, model="mlp"), rank, world)]


def test_weights_that_were_loaded_are_published_when_they_are_wanted() -> None:
    assert run_ranks(load, 4) == [[0.0]] * 4


def test_bucket_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="replicate_broadcast_bucket_mb"):
        dmuon.dedicate_params(tiny_mlp(), None, lambda n, p: "proj" in n, replicate_broadcast_bucket_mb=-1.0)
