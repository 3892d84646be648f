"""Bytes on the wire, counted at the collective calls, equal the formulas; nothing but the publish moves in step()."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.training import Run, count_second_step, prepare
from tests.harness import run_ranks

ALIGNED = 8


def count_one_step(rank: int, world: int, run: Run) -> dict[str, Any]:
    model, optimizer = prepare(run, world)
    counter = count_second_step(model, optimizer, run, rank, world)
    # The agreement of a step goes over the groups of weights and gradients.
    agreements = [record for record in counter.select("all_reduce") if record.tag.startswith("dmuon_")]
    counter.records = [record for record in counter.records if record not in agreements]
    plan = optimizer.runtime.plan
    padded = sum(-(-entry.numel // ALIGNED) * ALIGNED for entry in plan.entries)
    return {
        "matrix_bytes": 4 * padded,
        "units": len(plan.units),
        "shard": counter.ring_bytes(tag="dmuon_shard"),
        "replicate": counter.ring_bytes(tag="dmuon_replicate"),
        "replicate_in_step": counter.ring_bytes(tag="dmuon_replicate", phase="step"),
        "calls": counter.calls(tag="dmuon_shard"),
        "step": [(record.kind, record.tag) for record in counter.select(phase="step")],
        "agreements": [(record.phase, record.tag, record.payload) for record in agreements],
    }


def mean(results: list[dict[str, Any]], key: str) -> float:
    return sum(result[key] for result in results) / len(results)


@pytest.mark.parametrize("model", ["uneven", "llama"])
@pytest.mark.parametrize(("mode", "world", "passes"), [("z2", 2, 2), ("z3", 2, 3), ("z2", 4, 2), ("z3", 4, 3)])
def test_bytes_per_step_equal_the_formula(mode: str, world: int, passes: int, model: str) -> None:
    results = run_ranks(count_one_step, world, Run(mode, model))
    expected = passes * (world - 1) / world * results[0]["matrix_bytes"]
    assert mean(results, "shard") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", ["z3", "hsdp"])
def test_step_moves_only_the_agreement_and_the_publish(mode: str) -> None:
    groups = ["dmuon_shard", "dmuon_replicate"] if mode == "hsdp" else ["dmuon_shard"]
    for result in run_ranks(count_one_step, 4, Run(mode, "llama")):
        assert set(result["step"]) == ({("broadcast", "dmuon_replicate")} if mode == "hsdp" else set())
        assert [(phase, tag) for phase, tag, _ in result["agreements"]] == [("step", group) for group in groups]
        assert all(payload < 1024 for _, _, payload in result["agreements"])


def test_hsdp_bytes_equal_the_formula() -> None:
    results = run_ranks(count_one_step, 4, Run("hsdp", "llama"))
    matrix_bytes = results[0]["matrix_bytes"]
    # Shard groups of two: gather for forward and backward, and the first stage. Columns hold half of the matrices each.
    assert mean(results, "shard") == pytest.approx(3 / 2 * matrix_bytes)
    assert mean(results, "replicate_in_step") == pytest.approx(matrix_bytes / 2 / 2)
    assert mean(results, "replicate") == pytest.approx(2 * matrix_bytes / 2 / 2)


def test_collectives_are_few_per_unit() -> None:
    """At most one broadcast per owner and gather, and one exchange per reduction."""
    for result in run_ranks(count_one_step, 4, Run("z3", "llama")):
        assert result["calls"] <= result["units"] * (2 * 4 + 1)
