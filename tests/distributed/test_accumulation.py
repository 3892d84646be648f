"""Gradients under no_sync: kept on the rank, reduced once, dropped by every way to zero them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon_hf.core as dmuon
from tests.distributed.training import full
from tests.harness import run_ranks
from tests.harness.comm import CollectiveCounter
from tests.harness.models import dense_batch, rank_part, tiny_mlp


def is_proj(name: str, param: nn.Parameter) -> bool:
    return "proj" in name


def dedicated_mlp(world: int, **arguments: Any) -> nn.Module:
    """Dedicated matrices only matter here, so the rest stays plain and is not trained."""
    model = tiny_mlp()
    for name, param in model.named_parameters():
        param.requires_grad_("proj" in name)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    dmuon.dedicate_params(model, mesh, is_proj, **arguments)
    return model


def run_backward(model: nn.Module, step: int, rank: int, world: int) -> None:
    model(rank_part(dense_batch(step), rank, world)).backward()


def owned_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {param.name: full(param.param.grad) for param in dmuon.get_dedicated_params(model)}


def expected_grads(steps: list[int]) -> dict[str, torch.Tensor]:
    model = tiny_mlp()
    for step in steps:
        model(dense_batch(step)).backward()
    return {name: param.grad for name, param in model.named_parameters() if "proj" in name}


def zeroed_midway(rank: int, world: int, how: str) -> dict[str, torch.Tensor]:
    model = dedicated_mlp(world)
    optimizer = dmuon.Muon(model)
    with dmuon.no_sync(model):
        run_backward(model, 0, rank, world)
    if how == "optimizer":
        optimizer.zero_grad()
    elif how == "module":
        model.zero_grad()
    elif how == "parameter":
        for param in model.parameters():
            param.grad = None
    run_backward(model, 1, rank, world)
    return owned_grads(model)


@pytest.mark.parametrize("how", ["optimizer", "module", "parameter"])
def test_gradients_accumulated_before_any_kind_of_zeroing_are_dropped(how: str) -> None:
    expected = expected_grads([1])
    for grads in run_ranks(zeroed_midway, 2, how):
        for name, want in expected.items():
            torch.testing.assert_close(grads[name], want, rtol=1e-4, atol=1e-7)


def test_gradients_accumulate_until_they_are_zeroed() -> None:
    expected = expected_grads([0, 1])
    for grads in run_ranks(zeroed_midway, 2, "not at all"):
        for name, want in expected.items():
            torch.testing.assert_close(grads[name], want, rtol=1e-4, atol=1e-7)


def traffic_under_no_sync(rank: int, world: int) -> tuple[int, int]:
    model = dedicated_mlp(world, reshard_after_forward=False)
    with CollectiveCounter() as counter:
        with counter.phase("no_sync"), dmuon.no_sync(model):
            run_backward(model, 0, rank, world)
        with counter.phase("sync"):
            run_backward(model, 1, rank, world)
    reductions = [record.phase for record in counter.records if record.kind.startswith("all_to_all")]
    return reductions.count("no_sync"), reductions.count("sync")


def test_no_sync_reduces_nothing() -> None:
    for quiet, loud in run_ranks(traffic_under_no_sync, 2):
        assert quiet == 0 and loud == 3


def step_before_reduction(rank: int, world: int) -> str:
    model = dedicated_mlp(world)
    optimizer = dmuon.Muon(model)
    with dmuon.no_sync(model):
        run_backward(model, 0, rank, world)
    with pytest.raises(dmuon.DMuonError) as error:
        optimizer.step()
    return str(error.value)


def test_step_with_gradients_that_were_never_reduced_is_refused() -> None:
    for message in run_ranks(step_before_reduction, 2):
        assert "no_sync" in message and "zero_grad" in message
