"""compute_dtype: weights travel and compute in bf16, gradients are summed and masters updated in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon_hf.core as dmuon
from tests.distributed.training import HYPER, full, grads, is_matrix, snapshot
from tests.harness import run_ranks
from tests.harness.comm import CollectiveCounter
from tests.harness.models import dense_batch, rank_part, uneven_model
from tests.harness.reference import ReferenceOptimizer

STEPS = 3
BF16 = torch.bfloat16


def batch(step: int) -> torch.Tensor:
    return dense_batch(step, batch=16, width=64)


def train(rank: int, world: int, mode: str) -> dict[str, Any]:
    model = uneven_model()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    if mode == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(model, mesh["shard"], is_matrix, BF16, replicate_mesh=mesh["replicate"])
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dmuon.dedicate_params(model, mesh, is_matrix, BF16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = dmuon.Muon(model, **HYPER)
    weights, first_grads = [], {}
    used: set[torch.dtype] = set()
    handle = model.layers[0].wide.register_forward_pre_hook(lambda module, args: used.add(module.weight.dtype))
    with CollectiveCounter() as counter:
        for step in range(STEPS):
            model(rank_part(batch(step), rank, world)).backward()
            assert all(param.param.grad.dtype == torch.float32 for param in dmuon.get_dedicated_params(model))
            first_grads = first_grads or grads(model)
            optimizer.step()
            optimizer.zero_grad()
            weights.append(snapshot(model))
    handle.remove()
    return {
        "weights": weights,
        "grads": first_grads,
        "used": used,
        "wire": {(r.kind, r.dtype) for r in counter.records if r.tag in ("dmuon_shard", "dmuon_replicate")},
    }


def reference(world: int) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Each rank's gradient in bf16 from weights rounded to bf16; mean and update in fp32."""
    masters = uneven_model()
    optimizer = ReferenceOptimizer(masters, is_matrix, **HYPER, dtype=torch.float32)
    weights, first_grads = [], {}
    for step in range(STEPS):
        for rank in range(world):
            twin = uneven_model()
            twin.load_state_dict(masters.state_dict())
            twin.to(BF16)(rank_part(batch(step), rank, world).to(BF16)).backward()
            for master, param in zip(masters.parameters(), twin.parameters(), strict=True):
                grad = param.grad.float() / world
                master.grad = grad if master.grad is None else master.grad + grad
        first_grads = first_grads or {name: param.grad.clone() for name, param in masters.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: param.detach().clone() for name, param in masters.named_parameters()})
    return first_grads, weights


@pytest.mark.parametrize(("mode", "world"), [("z3", 2), ("hsdp", 4)])
def test_bf16_compute_keeps_fp32_masters_and_sums(mode: str, world: int) -> None:
    first_grads, weights = reference(world)
    for result in run_ranks(train, world, mode):
        assert result["used"] == {BF16}
        wire = result["wire"]
        assert ("broadcast", BF16) in wire
        assert ("broadcast", torch.float32) not in wire
        assert {dtype for kind, dtype in wire if kind.startswith("all_to_all")} == {torch.float32}
        for name, want in first_grads.items():
            torch.testing.assert_close(result["grads"][name], want, rtol=1e-5, atol=1e-8)
        for step in range(STEPS):
            for name, want in weights[step].items():
                got = result["weights"][step][name]
                assert got.dtype == torch.float32
                # After the first step a last bit of a master may flip the rounding of a weight to bf16.
                assert (got - want).norm() < (1e-4 if step == 0 else 1e-2) * want.norm(), (step, name)


def half_precision_masters(rank: int, world: int) -> list[torch.dtype]:
    model = uneven_model().to(BF16)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    dmuon.dedicate_params(model, mesh, is_matrix, BF16, master_dtype=torch.float32)
    params: list[nn.Parameter] = [param.param for param in dmuon.get_dedicated_params(model)]
    assert torch.equal(
        full(params[0]), dict(uneven_model().to(BF16).named_parameters())["layers.0.wide.weight"].float()
    )
    return sorted({str(param.dtype) for param in params})


def test_master_dtype_upcasts_what_owners_keep() -> None:
    assert run_ranks(half_precision_masters, 2) == [["torch.float32"]] * 2
