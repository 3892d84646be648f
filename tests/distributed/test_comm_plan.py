"""The payloads that ``summarize_comm_plan`` names are those that are sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dmuon_hf.core as dmuon
from tests.distributed import tp_training
from tests.distributed.tp_training import TpRun
from tests.distributed.training import Run, backward, batch_of, prepare, shards_of_rows
from tests.harness import models, run_ranks
from tests.harness.comm import CollectiveCounter

ROWS = {"param_policy_fn": shards_of_rows}
RUNS: dict[str, tuple[Run | TpRun, int]] = {
    "owners": (Run("z2", "uneven"), 2),
    "owners under HSDP": (Run("hsdp", "uneven"), 4),
    "rows": (Run("z2", "uneven", pure=True, dedicate=ROWS), 2),
    "even shards": (Run("z2", "uneven", dedicate={"muon_forward_unshard": "all_gather"}), 2),
    "replicas": (Run("replicate", "uneven"), 2),
    "replicas under DDP": (Run("ddp", "uneven"), 2),
    "replicas of parts": (TpRun("ddp_tp", Run("tp", "uneven")), 4),
}
WHOLE = ("replicas", "replicas under DDP", "replicas of parts")


def planned_and_sent(rank: int, world: int, name: str) -> dict[str, Any]:
    run, _ = RUNS[name]
    plain = run if isinstance(run, Run) else run.run
    model, optimizer = prepare(run, world) if isinstance(run, Run) else tp_training.prepare(run)
    with CollectiveCounter() as counter:
        with counter.phase("forward"), torch.no_grad():
            models.loss_of(model, models.rank_part(batch_of(plain, 9), 0, 4))
        with counter.phase("backward"):
            if isinstance(run, Run):
                backward(model, run, 0, rank, world)
            else:
                tp_training.backward(model, run, 0, rank)
        with counter.phase("step"):
            optimizer.step()
            optimizer.zero_grad()

    def payload(phase: str, *kinds: str, tags: tuple[str, ...] = ("dmuon_shard",)) -> int:
        return sum(r.payload for r in counter.select(phase=phase) if r.tag in tags and r.kind in kinds)

    return {
        "plan": dmuon.summarize_comm_plan(model),
        "gather": payload("forward", "broadcast", "all_gather"),
        "average": payload("backward", "all_reduce"),
        "publish": payload("step", "broadcast", tags=("dmuon_shard", "dmuon_replicate")),
    }


@pytest.mark.parametrize("name", RUNS)
def test_planned_payloads_are_those_that_are_sent(name: str) -> None:
    for found in run_ranks(planned_and_sent, RUNS[name][1], name):
        plan = found["plan"]
        assert plan["gather_bytes"] == found["gather"]
        assert (plan["gather_bytes"] == 0) == (name in WHOLE)
        if name in WHOLE:
            assert plan["reduce_bytes"] == found["average"] > 0
            owned = sum(bucket["bytes"] for group in plan["groups"] for bucket in group["buckets"])
            assert plan["publish_bytes"] == found["publish"] == owned > 0
        elif "HSDP" in name:
            assert plan["publish_bytes"] == found["publish"] > 0
        assert plan["num_groups"] == len(plan["groups"])
        totals = {key: sum(group[key] for group in plan["groups"]) for key in ("gather_bytes", "reduce_bytes")}
        assert totals == {key: plan[key] for key in totals}


def test_what_replicate_averages_is_listed_without_owners() -> None:
    for found in run_ranks(planned_and_sent, 2, "replicas"):
        groups = {group["name"]: group for group in found["plan"]["groups"]}
        rest = groups["replicated parameters, part 0"]
        assert "head.weight" in [param["name"] for param in rest["params"]]
        assert {param["owner"] for param in rest["params"]} == {None} and rest["publish_bytes"] == 0
