"""Which indices each rank holds: torch's own splitting on an arange is the judge."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dmuon_hf.core.shards.layout import Cut, ShardLayout
from dmuon_hf.core.shards.runs import Runs, chunk, length, placed, strided_chunk, whole

SIZES = [1, 2, 3, 5, 7, 8, 9, 16, 33]


def indices(runs: Runs) -> list[int]:
    return [index for start, stop in runs for index in range(start, stop)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_chunk_is_that_of_shard(size: int, parts: int) -> None:
    pieces, _ = Shard(0)._split_tensor(torch.arange(size), parts, with_padding=False)
    for index, piece in enumerate(pieces):
        assert indices(chunk(whole(size), parts, index)) == piece.tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_strided_chunk_is_that_of_strided_shard(size: int, parts: int, factor: int) -> None:
    pieces, _ = _StridedShard(0, split_factor=factor)._split_tensor(torch.arange(size), parts, with_padding=False)
    for index, piece in enumerate(pieces):
        assert indices(strided_chunk(whole(size), parts, index, factor)) == piece.tolist()


def test_placed_pairs_storage_with_the_whole() -> None:
    assert list(placed(((4, 6), (9, 10)))) == [(slice(0, 2), slice(4, 6)), (slice(2, 3), slice(9, 10))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 2), (2, 4)])
def test_nested_order_is_tensor_parallel_first(size: int, mesh_shape: tuple[int, int]) -> None:
    data, tensor = mesh_shape
    layout = ShardLayout(
        (size, 3), mesh_shape, tuple(range(data * tensor)), (Cut(0, factor=tensor), Cut(0)), order="nested"
    )
    for shard, split in itertools.product(range(data), range(tensor)):
        mine = torch.arange(size).split(-(-size // tensor))
        mine = mine[split] if split < len(mine) else torch.arange(0)
        pieces, _ = Shard(0)._split_tensor(mine, data, with_padding=False)
        assert indices(layout.held((shard, split))[0]) == pieces[shard].tolist()


def test_nested_differs_only_where_sizes_do_not_divide() -> None:
    def layout(size: int) -> ShardLayout:
        return ShardLayout((size, 3), (4, 2), tuple(range(8)), (Cut(0, factor=2), Cut(0)))

    assert layout(16).nested() is None
    nested = layout(9).nested()
    assert nested is not None
    assert sorted(i for at in nested.coordinates() for i in indices(nested.held(at)[0])) == list(range(9))


def test_three_splits_of_one_dimension_nest_by_their_factors() -> None:
    layout = ShardLayout((24, 2), (2, 3, 2), tuple(range(12)), (Cut(0, factor=6), Cut(0, factor=2), Cut(0)))
    assert layout.nested() is None
    assert layout.held((1, 2, 1))[0] == ((22, 24),)


@pytest.mark.parametrize(
    ("cuts", "copies"),
    [((None, Cut(0)), 2), ((Cut(0), None), 3), ((Cut(0), Cut(1)), 1), ((None, None), 6)],
)
def test_copies_hold_everything_once(cuts: tuple[Cut | None, ...], copies: int) -> None:
    layout = ShardLayout((5, 7), (2, 3), tuple(range(6)), cuts)
    assert len(layout.copies()) == copies
    for copy in layout.copies():
        assert sum(length(rows) * length(columns) for _, (rows, columns) in copy) == 35
        assert len(copy) == len(layout.copies()[0])
