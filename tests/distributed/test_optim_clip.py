"""Gradient clipping on several ranks: true global norms, the same on all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import dmuon_hf.core as dmuon
from dmuon_hf.core.clip import (
    GradClipBucket,
    clip_grad_norm_,
    clip_grad_norm_buckets_,
    try_clip_optimizer_grad_norm_buckets_,
)
from tests.distributed.optim_setup import MODES, backward, reference_mlp, sharded_mlp, whole
from tests.harness import run_ranks
from tests.harness.models import dense_batch


def reference_grads() -> dict[str, Tensor]:
    model, _ = reference_mlp()
    model(dense_batch(0, batch=12)).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def flat(grads: dict[str, Tensor], muon: bool) -> Tensor:
    return torch.cat([grad.flatten() for name, grad in grads.items() if ("proj" in name) == muon]).double()


def whole_grads(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: whole(param.grad) for name, param in model.named_parameters()}


def _global(rank: int, world: int, mode: str, norm_type: float) -> dict[str, Any]:
    model = sharded_mlp(mode)
    optimizer = dmuon.Muon(model)
    backward(model, 0)
    expected = reference_grads()
    norm = flat(expected, muon=True).norm(norm_type).item()
    stats = clip_grad_norm_(optimizer, norm / 2, norm_type=norm_type)
    assert stats.total_norm == pytest.approx(norm, rel=1e-4)
    assert stats.clip_coef == pytest.approx(0.5, rel=1e-4)
    for name, grad in whole_grads(model).items():
        factor = stats.clip_coef if "proj" in name else 1.0
        torch.testing.assert_close(grad, expected[name] * factor, rtol=1e-4, atol=1e-6)
    return {"total": stats.total_norm, "count": stats.param_count}


@pytest.mark.parametrize("mode", ["fsdp", "hsdp"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_muon_gradients_are_clipped_by_the_single_process_norm(mode: str, norm_type: float) -> None:
    results = run_ranks(_global, MODES[mode], mode, norm_type)
    assert all(result == results[0] for result in results)
    assert results[0]["count"] == 9


def _nonfinite(rank: int, world: int, norm_type: float) -> str:
    model = sharded_mlp("fsdp")
    optimizer = dmuon.Muon(model)
    backward(model, 0)
    if rank == 1:
        next(iter(optimizer.matrix_gradients().values()))[0, 0] = math.nan
    with pytest.raises(RuntimeError) as error:
        clip_grad_norm_(optimizer, 1.0, norm_type=norm_type, error_if_nonfinite=True)
    assert optimizer.last_muon_grad_clip_stats is not None
    assert optimizer.last_muon_grad_clip_stats.found_inf
    return str(error.value)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_nan_on_one_rank_is_found_on_all(norm_type: float) -> None:
    assert len(run_ranks(_nonfinite, 2, norm_type)) == 2


def _buckets(rank: int, world: int, mode: str, named: bool) -> None:
    model = sharded_mlp(mode)
    backward(model, 0)
    expected = reference_grads()
    segments = {
        "norms": [name for name in expected if ".ln." in name],
        "matrices": [name for name in expected if "proj" in name],
        "head": [name for name in expected if "head" in name],
    }
    grads = {name: param.grad for name, param in model.named_parameters()}
    buckets = [GradClipBucket(key, [grads[name] for name in names]) for key, names in segments.items()]
    norms = {key: torch.cat([expected[n].flatten() for n in names]).norm().item() for key, names in segments.items()}
    bound = 0.5 * min(norms.values())
    result = clip_grad_norm_buckets_(buckets, bound, process_group=dist.group.WORLD if named else None)
    assert {stats.name: stats.total_norm for stats in result.bucket_stats} == pytest.approx(norms, rel=1e-4)
    assert result.total_norm.item() == pytest.approx(math.hypot(*norms.values()), rel=1e-4)
    factors = {name: stats.clip_coef for stats in result.bucket_stats for name in segments[stats.name]}
    assert all(factor < 0.6 for factor in factors.values())
    for name, grad in whole_grads(model).items():
        torch.testing.assert_close(grad, expected[name] * factors[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("named", [False, True], ids=["default group", "world"])
@pytest.mark.parametrize("mode", MODES)
def test_buckets_are_clipped_by_whole_norms_that_count_each_element_once(mode: str, named: bool) -> None:
    run_ranks(_buckets, MODES[mode], mode, named)


def _parts(rank: int, world: int) -> None:
    # As many plain parts as the rank's number, of its own sizes.
    parts = [torch.full((rank + i + 1,), float(rank)) for i in range(rank)]
    norm = math.sqrt(sum(r * r * (r + i + 1) for r in range(world) for i in range(r)))
    result = clip_grad_norm_buckets_([GradClipBucket("empty", []), GradClipBucket("parts", parts)], norm / 4)
    empty, segment = result.bucket_stats
    assert (empty.total_norm, empty.clipped) == (0.0, False)
    assert (segment.total_norm, segment.clip_coef) == pytest.approx((norm, 0.25), rel=1e-4)
    assert segment.param_count == rank
    for part in parts:
        torch.testing.assert_close(part, torch.full_like(part, rank * segment.clip_coef))
    bad = torch.tensor([math.nan if rank == 1 else 1.0, 3.0])
    before = bad.clone()
    stats = clip_grad_norm_buckets_([GradClipBucket("bad", [bad])], 0.1).bucket_stats[0]
    assert (stats.found_inf, stats.clipped, stats.clip_coef) == (True, False, 1.0)
    torch.testing.assert_close(bad, before, rtol=0, atol=0, equal_nan=True)


def test_unequal_parts_and_a_nan_on_one_rank_are_treated_alike_on_all_ranks() -> None:
    run_ranks(_parts, 3)


def _copies(rank: int, world: int) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    value = torch.arange(1.0, 9.0).reshape(4, 2)
    layouts: list[tuple[DeviceMesh, list[Placement]]] = [
        (grid, [Replicate(), Replicate()]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(0), Shard(1)]),
        (grid["dp"], [Shard(0)]),
        (grid["dp"], [Replicate()]),
        (grid["tp"], [Shard(1)]),
    ]
    groups = {None: value.norm().item(), dist.group.WORLD: value.norm().item()}
    for mesh, placements in layouts:
        for group, norm in groups.items():
            grad = distribute_tensor(value.clone(), mesh, placements)
            result = clip_grad_norm_buckets_([GradClipBucket("a", [grad, grad.clone()])], 1.0, process_group=group)
            assert result.total_norm.item() == pytest.approx(math.sqrt(2) * norm, rel=1e-6), (mesh, placements)
            torch.testing.assert_close(grad.full_tensor(), value / (math.sqrt(2) * norm), rtol=1e-4, atol=0)
    # A group along which the gradient is whole already.
    rows = distribute_tensor(value, grid["dp"], [Replicate()])
    alone = clip_grad_norm_buckets_([GradClipBucket("a", [rows])], None, process_group=grid["tp"].get_group())
    assert alone.total_norm.item() == pytest.approx(value.norm().item(), rel=1e-6)


def test_copies_of_a_gradient_count_once_in_every_layout() -> None:
    run_ranks(_copies, 4)


def _segments(rank: int, world: int, mode: str, named: bool) -> None:
    model = sharded_mlp(mode)
    optimizer = dmuon.Muon(model)
    backward(model, 0)
    expected = reference_grads()
    rest = [p.grad for n, p in model.named_parameters() if "proj" not in n]
    result = try_clip_optimizer_grad_norm_buckets_(
        optimizer,
        regular_grads=rest,
        adamw_grads=[],
        max_norm=1e-3,
        process_group=dist.group.WORLD if named else None,
    )
    assert result is not None
    regular, muon, adamw = result.bucket_stats
    assert regular.total_norm == pytest.approx(flat(expected, muon=False).norm().item(), rel=1e-4)
    assert muon.total_norm == pytest.approx(flat(expected, muon=True).norm().item(), rel=1e-4)
    assert adamw.total_norm == 0.0
    after = whole_grads(model)
    assert flat(after, muon=True).norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert flat(after, muon=False).norm().item() == pytest.approx(1e-3, rel=1e-2)
    stats = optimizer.last_muon_grad_clip_stats
    assert stats is not None
    assert (stats.total_norm, stats.clip_coef, stats.clipped) == (muon.total_norm, muon.clip_coef, True)
    assert (stats.max_norm, stats.norm_type, stats.found_inf) == (1e-3, 2.0, False)
    assert stats.param_count == sum("proj" in name for name in expected)


@pytest.mark.parametrize("named", [False, True], ids=["default group", "world"])
@pytest.mark.parametrize("mode", MODES)
def test_optimizer_segments_are_clipped_by_whole_norms(mode: str, named: bool) -> None:
    run_ranks(_segments, MODES[mode], mode, named)
