"""Newton-Schulz of a matrix whose columns several ranks hold equals that of the whole matrix."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dmuon_hf.core as dmuon
from tests.harness import run_ranks
from tests.harness.comm import CollectiveCounter

SHAPES = [(8, 32), (32, 8), (16, 16), (7, 33), (33, 7), (3, 2), (2, 3)]


def whole_batch(shape: tuple[int, int], count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn((count, *shape), generator=generator, dtype=torch.float64)


def part_of(whole: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    """As ``Shard`` cuts: later ranks have fewer, or none."""
    size = whole.shape[dim]
    step = -(-size // world)
    return whole.narrow(dim, min(rank * step, size), max(0, min(step, size - rank * step)))


def orthogonalize(rank: int, world: int, dtype: torch.dtype) -> float:
    worst = 0.0
    for shape in SHAPES:
        # Cut on the long side and on the short one: that is right too, only more is sent.
        for transposed in (False, True):
            whole = whole_batch(shape).to(dtype)
            expected = dmuon.gram_newton_schulz(whole.double())
            local = part_of(whole, -2 if transposed else -1, rank, world)
            part = part_of(expected, -2 if transposed else -1, rank, world)
            batched = dmuon.gram_newton_schulz_distributed_local_batched(local, dist.group.WORLD, transposed=transposed)
            single = dmuon.gram_newton_schulz_distributed_local(local[0], dist.group.WORLD, transposed=transposed)
            assert batched.shape == local.shape and batched.dtype == dtype and batched.is_contiguous()
            for got, want in ((batched, part), (single, part[0])):
                if want.numel():
                    worst = max(worst, float((got.double() - want).norm() / expected.norm()))
    return worst


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 1.8e-1)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_columns_of_several_ranks_equal_the_whole(world: int, dtype: torch.dtype, bound: float) -> None:
    assert max(run_ranks(orthogonalize, world, dtype)) < bound


def scales(rank: int, world: int) -> None:
    whole = whole_batch((6, 20), 1)[0]
    whole[:, :10] *= 1e-3
    expected = part_of(dmuon.gram_newton_schulz(whole), 1, rank, world)
    for scale in (1e-200, 1.0, 1e200):
        local = part_of(whole * scale, 1, rank, world)
        got = dmuon.gram_newton_schulz_distributed_local(local, dist.group.WORLD, transposed=False)
        torch.testing.assert_close(got, expected)
    zero = dmuon.gram_newton_schulz_distributed_local(torch.zeros(4, 3), dist.group.WORLD, transposed=False)
    assert torch.count_nonzero(zero) == 0
    half = torch.zeros(4, 3) if rank else torch.eye(4, 3)
    got = dmuon.gram_newton_schulz_distributed_local(half, dist.group.WORLD, transposed=False)
    assert got.isfinite().all() and (got.count_nonzero() == 0) == bool(rank)
    bad = torch.ones(4, 3)
    bad[0, 0] = float("nan") if rank == 0 else 1.0
    got = dmuon.gram_newton_schulz_distributed_local(bad, dist.group.WORLD, transposed=False)
    assert not got.isfinite().any()


def test_scale_zeros_and_nan_are_those_of_the_whole() -> None:
    run_ranks(scales, 2)


def exchanged(rank: int, world: int) -> dict[str, list[int]]:
    sent: dict[str, list[int]] = {}
    local = part_of(whole_batch((8, 32), 5).float(), -1, rank, world)
    for name, options in {"restart": {}, "none": {"restart_iterations": []}, "one": {"steps": 1}}.items():
        with CollectiveCounter() as counter:
            dmuon.gram_newton_schulz_distributed_local_batched(local, dist.group.WORLD, transposed=False, **options)
        sent[name] = [record.payload for record in counter.records if record.kind == "all_reduce"]
    return sent


def test_one_gram_matrix_per_segment_is_reduced_for_the_whole_batch() -> None:
    gram = 5 * 8 * 8 * 4
    for sent in run_ranks(exchanged, 2):
        assert sent == {"restart": [gram, gram], "none": [gram], "one": [gram]}


def test_coefficients_and_steps_are_those_given() -> None:
    matrix = whole_batch((5, 9))[0]
    for options in ({"steps": 3}, {"coefficients": dmuon.YOU_COEFFICIENTS}, {"restart_iterations": [1, 3]}):
        got = dmuon.gram_newton_schulz_distributed_local(matrix, None, transposed=False, **options)
        torch.testing.assert_close(got, dmuon.gram_newton_schulz(matrix, **options))
    assert not torch.allclose(
        dmuon.gram_newton_schulz_distributed_local(matrix, None, transposed=False, steps=3),
        dmuon.gram_newton_schulz_distributed_local(matrix, None, transposed=False),
    )


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4)])
def test_other_than_one_part_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(dmuon.ConfigurationError, match="takes one part"):
        dmuon.gram_newton_schulz_distributed_local(torch.ones(shape), None, transposed=False)
    with pytest.raises(dmuon.ConfigurationError, match="takes parts"):
        dmuon.gram_newton_schulz_distributed_local_batched(torch.ones(4, 4), None, transposed=False)
