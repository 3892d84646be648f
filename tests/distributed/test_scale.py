"""Plans and collectives of worlds far larger than this machine, on torch's fake process group."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from tests.distributed.training import is_matrix
from tests.harness import run_ranks
from tests.harness.comm import CollectiveCounter
from tests.harness.fake import fake_world
from tests.harness.models import loss_of, tiny_llama, token_batch


def step_in_a_large_world(rank: int, world: int, size: int, replicas: int, me: int) -> dict[str, Any]:
    with fake_world(size, rank=me):
        model = tiny_llama(n_layers=4)
        mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(model, mesh["shard"], is_matrix, replicate_mesh=mesh["replicate"])
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model)
        with CollectiveCounter() as counter:
            loss_of(model, token_batch(0, batch=1)).backward()
            optimizer.step()
        plan = dmuon.runtime_of(model).plan
        return {
            "digest": plan.digest(),
            "owners": len({entry.owner for entry in plan.entries}),
            "columns": len({entry.owner[0] for entry in plan.entries}),
            "kinds": [(r.kind, r.tag) for r in counter.records if r.tag.startswith("dmuon_shard")],
            "units": len(plan.units),
        }


@pytest.mark.parametrize(("size", "replicas"), [(1024, 32), (1024, 4), (64, 8)])
def test_every_rank_of_a_large_world_makes_the_same_plan_and_the_same_calls(size: int, replicas: int) -> None:
    seen = [
        run_ranks(step_in_a_large_world, 1, size, replicas, me, init=False)[0] for me in (0, 1, size // 2 + 1, size - 1)
    ]
    assert all(result == seen[0] for result in seen)
    assert seen[0]["owners"] == min(28, size)
    assert seen[0]["columns"] == min(28, size // replicas)
    reductions = [kind for kind, _ in seen[0]["kinds"] if kind.startswith("all_to_all")]
    assert len(reductions) == seen[0]["units"] == 4
