"""Gradient clipping on several ranks: true global norms, the same on all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dmuon_hf.core as dmuon
from dmuon_hf.core.clip import (
    GradClipBucket,
    clip_grad_norm_,
    clip_grad_norm_buckets_,
    try_clip_optimizer_grad_norm_buckets_,
)
from dmuon_hf.core.errors import ConfigurationError
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
        next(iter(optimizer.owned_gradients().values()))[0, 0] = math.nan
    with pytest.raises(RuntimeError) as error:
        clip_grad_norm_(optimizer, 1.0, norm_type=norm_type, error_if_nonfinite=True)
    assert optimizer.last_muon_grad_clip_stats is not None
    assert optimizer.last_muon_grad_clip_stats.found_inf
    return str(error.value)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_nan_on_one_rank_is_found_on_all(norm_type: float) -> None:
    assert len(run_ranks(_nonfinite, 2, norm_type)) == 2


def _buckets(rank: int, world: int) -> None:
    model = sharded_mlp("fsdp")
    backward(model, 0)
    expected = reference_grads()
    norm_grads = [p.grad for n, p in model.named_parameters() if ".ln." in n]
    head_grads = [p.grad for n, p in model.named_parameters() if "head" in n]
    buckets = [GradClipBucket("norms", norm_grads), GradClipBucket("head", head_grads)]
    bound = 0.5 * torch.cat([g.flatten() for n, g in expected.items() if ".ln." in n]).norm().item()
    with pytest.raises(ConfigurationError, match="pass the process_group"):
        clip_grad_norm_buckets_(buckets, bound)
    result = clip_grad_norm_buckets_(buckets, bound, process_group=dist.group.WORLD)
    assert result.bucket_stats[0].total_norm == pytest.approx(2 * bound, rel=1e-4)
    assert result.bucket_stats[0].clip_coef == pytest.approx(0.5, rel=1e-4)
    head = result.bucket_stats[1].clip_coef
    for name, grad in whole_grads(model).items():
        factor = 0.5 if ".ln." in name else head if "head" in name else 1.0
        torch.testing.assert_close(grad, expected[name] * factor, rtol=1e-3, atol=1e-6)


def test_buckets_of_sharded_gradients_are_clipped_by_whole_norms() -> None:
    run_ranks(_buckets, 2)


def _segments(rank: int, world: int) -> None:
    model = sharded_mlp("fsdp3")
    optimizer = dmuon.Muon(model)
    backward(model, 0)
    expected = reference_grads()
    rest = [p.grad for n, p in model.named_parameters() if "proj" not in n]
    result = try_clip_optimizer_grad_norm_buckets_(
        optimizer, regular_grads=rest, adamw_grads=[], max_norm=1e-3, process_group=dist.group.WORLD
    )
    assert result is not None
    regular, muon, adamw = result.bucket_stats
    assert regular.total_norm == pytest.approx(flat(expected, muon=False).norm().item(), rel=1e-4)
    assert muon.total_norm == pytest.approx(flat(expected, muon=True).norm().item(), rel=1e-4)
    assert adamw.total_norm == 0.0
    after = whole_grads(model)
    assert flat(after, muon=True).norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert flat(after, muon=False).norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_optimizer_segments_are_clipped_by_whole_norms() -> None:
    run_ranks(_segments, 3)
