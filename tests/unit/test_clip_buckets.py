"""Independent gradient segments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dmuon_hf.core.clip import GradClipBucket, clip_grad_norm_buckets_, try_clip_optimizer_grad_norm_buckets_
from dmuon_hf.core.errors import ConfigurationError
from tests.unit.muon_fakes import MATRICES, backward, build


def draw(
    *shapes: tuple[int, ...], seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in shapes]


def norm(tensors: list[Tensor]) -> float:
    return torch.cat([tensor.flatten().double() for tensor in tensors]).norm().item()


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_each_bucket_is_clipped_by_its_own_norm(chunk_size: int | None) -> None:
    large, small = draw((4, 5), (7,), (3, 3), seed=1, scale=10.0), draw((6,), (2, 2), seed=2, scale=0.01)
    before = [tensor.clone() for tensor in large + small]
    norms = norm(large), norm(small)
    result = clip_grad_norm_buckets_(
        [GradClipBucket("large", large), GradClipBucket("small", small)], 1.0, chunk_size=chunk_size
    )
    first, second = result.bucket_stats
    assert (first.name, first.clipped, first.param_count) == ("large", True, 3)
    assert (second.name, second.clipped, second.clip_coef) == ("small", False, 1.0)
    assert (first.total_norm, second.total_norm) == pytest.approx(norms, rel=1e-5)
    assert result.total_norm.item() == pytest.approx(math.hypot(*norms), rel=1e-5)
    assert norm(large) == pytest.approx(1.0, rel=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(small, before[3:], strict=True))
    torch.testing.assert_close(large, [tensor * first.clip_coef for tensor in before[:3]])


def test_chunk_size_bounds_a_multi_tensor_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = torch._foreach_norm

    def record(tensors: list[Tensor], *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        sizes.append(len(tensors))
        return plain(tensors, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "_foreach_norm", record)
    clip_grad_norm_buckets_([GradClipBucket("all", draw(*[(3,)] * 5))], None, chunk_size=2)
    assert sizes == [2, 2, 1]


def test_mixed_dtypes_and_empty_tensors_share_a_bucket() -> None:
    grads = [*draw((8,), scale=300.0, dtype=torch.float16), *draw((3, 3), seed=3), torch.zeros(0, 4)]
    expected = norm(grads)
    result = clip_grad_norm_buckets_([GradClipBucket("mixed", grads)], expected / 2)
    assert result.bucket_stats[0].total_norm == pytest.approx(expected, rel=1e-3)
    assert norm(grads) == pytest.approx(expected / 2, rel=1e-2)


def test_nonfinite_bucket_is_left_and_the_other_clipped() -> None:
    bad, good = draw((3,), seed=4), draw((3,), seed=5)
    bad[0][1] = math.nan
    before = bad[0].clone()
    result = clip_grad_norm_buckets_([GradClipBucket("bad", bad), GradClipBucket("good", good)], 0.1)
    assert [stats.found_inf for stats in result.bucket_stats] == [True, False]
    torch.testing.assert_close(bad[0], before, rtol=0, atol=0, equal_nan=True)
    assert norm(good) == pytest.approx(0.1, rel=1e-4)


def test_no_buckets_and_empty_buckets_give_zero() -> None:
    assert clip_grad_norm_buckets_([], 1.0).total_norm.item() == 0.0
    result = clip_grad_norm_buckets_([GradClipBucket("empty", [])], 1.0)
    assert result.bucket_stats[0].total_norm == 0.0
    assert not result.bucket_stats[0].clipped


def test_result_says_why_the_kernels_of_a_gpu_were_not_used() -> None:
    result = clip_grad_norm_buckets_([GradClipBucket("all", draw((3,)))], None)
    assert not result.fastpath
    assert result.fallback_reason is not None and "on NVIDIA GPUs from SM80 on" in result.fallback_reason
    assert not result.bucket_stats[0].fastpath


@pytest.mark.parametrize(
    ("buckets", "arguments", "message"),
    [
        ([], {"max_norm": -1.0}, "max_norm must be at least 0"),
        ([], {"max_norm": 1.0, "chunk_size": 0}, "chunk_size must be at least 1"),
        ([GradClipBucket("a", []), GradClipBucket("a", [])], {"max_norm": 1.0}, "names must be distinct"),
    ],
)
def test_bad_argument_is_refused(buckets: list[GradClipBucket], arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        clip_grad_norm_buckets_(buckets, **arguments)  # type: ignore[arg-type]


def test_optimizer_segments_are_clipped_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    backward(setup.model, 0)
    named = {n: p.grad for n, p in setup.model.named_parameters() if p.grad is not None}
    muon = [named[name] for name in MATRICES]
    adamw = [named[name] for name in ("norm.weight", "norm.bias")]
    regular = [grad for name, grad in named.items() if name not in MATRICES and not name.startswith("norm")]
    norms = {"regular": norm(regular), "muon": norm(muon), "adamw": norm(adamw)}
    bound = sorted(norms.values())[1]
    result = try_clip_optimizer_grad_norm_buckets_(
        setup.optimizer, regular_grads=regular, adamw_grads=adamw, max_norm=bound * 0.99
    )
    assert result is not None
    assert {stats.name: stats.total_norm for stats in result.bucket_stats} == pytest.approx(norms, rel=1e-5)
    assert sum(stats.clipped for stats in result.bucket_stats) == 2
    for grads in (regular, muon, adamw):
        assert norm(grads) <= bound * 0.99 * (1 + 1e-5)
    assert "prepare" in setup.runtime.calls
