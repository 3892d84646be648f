"""Which part of a tensor each rank of a mesh holds: integers alone, equal on every rank.

[Note: split order] Placements say how a tensor is split, but for a ``_StridedShard`` they leave open in which order.
DTensor applies them left to right. FSDP2 over tensor parallelism really splits right to left, tensor-parallel ranks
first. Where sizes divide, both give the same parts; where they do not, a row may lie on another rank. So a layout knows
its order, and whoever builds one confirms it by the sizes of the local tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal, TypeAlias

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.shards.runs import Runs, chunk, length, strided_chunk, whole

__all__ = ["Copy", "Cut", "ShardLayout", "SplitOrder", "holds_shape", "layout_of"]

Copy: TypeAlias = tuple[tuple[int, tuple[Runs, ...]], ...]
"""One copy of a tensor: the ranks that hold some of it, with the indices that each holds per tensor dimension."""

SplitOrder: TypeAlias = Literal["listed", "nested"]
"""Order in which the placements of one tensor dimension apply: as DTensor lists them, or as FSDP2 nests them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor dimension split over a mesh dimension; ``factor`` is the one of ``_StridedShard``, else 1."""

    dim: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How one tensor lies on the ranks of one mesh.

    Attributes:
        shape: Global shape.
        mesh_shape: Sizes of the mesh dimensions.
        ranks: Global ranks of the mesh, row by row.
        cuts: Per mesh dimension what it splits; ``None`` where it replicates.
        order: See [Note: split order].
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] = (1,)
    ranks: tuple[int, ...] = (0,)
    cuts: tuple[Cut | None, ...] = (None,)
    order: SplitOrder = "listed"

    def coordinates(self) -> list[tuple[int, ...]]:
        """Mesh coordinate of each of ``ranks``."""
        return list(product(*(range(size) for size in self.mesh_shape)))

    def held(self, coordinate: Sequence[int]) -> tuple[Runs, ...]:
        """Per tensor dimension the indices that the rank at ``coordinate`` holds; its part is their outer product."""
        held: list[Runs] = []
        for dim, size in enumerate(self.shape):
            runs = whole(size)
            for index, factor in _splits(self, dim):
                parts, at = self.mesh_shape[index], coordinate[index]
                runs = chunk(runs, parts, at) if factor == 1 else strided_chunk(runs, parts, at, factor)
            held.append(runs)
        return tuple(held)

    def local_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Shape of the local tensor at ``coordinate``."""
        return tuple(length(runs) for runs in self.held(coordinate))

    def copies(self) -> tuple[Copy, ...]:
        """The copies of the tensor, one without ``Replicate``; their ranks come in the same order in every copy."""
        return _copies(self)

    def nested(self) -> ShardLayout | None:
        """The layout in FSDP2's order where that is another one, else ``None``."""
        if not any(cut is not None and cut.factor > 1 for cut in self.cuts):
            return None
        other = ShardLayout(self.shape, self.mesh_shape, self.ranks, self.cuts, "nested")
        if any(_nesting(other, dim) is None for dim in range(len(self.shape))):
            return None
        return other if any(other.held(at) != self.held(at) for at in self.coordinates()) else None

    def folded(self, name: str) -> ShardLayout:
        """The layout of a tensor of three dimensions as the matrix ``(a, b * c)``.

        Raises:
            NotImplementedError: it is cut along another dimension than the first.
        """
        if any(cut is not None and cut.dim > 0 for cut in self.cuts):
            raise NotImplementedError(
                f"{name} is a matrix in three dimensions, cut along the second or third, which is not built: shard its "
                "first dimension, or leave it out of the predicate, so that AdamW trains it"
            )
        first, second, third = self.shape
        return replace(self, shape=(first, second * third))

    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


def layout_of(tensor: Tensor, name: str, *, rank: int = 0) -> ShardLayout:
    """The layout of a DTensor in DTensor's order; of a plain tensor, which is whole on this rank.

    Raises:
        ConfigurationError: A placement is neither ``Shard``, ``_StridedShard`` nor ``Replicate``.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return ShardLayout(shape, ranks=(rank,))
    mesh = tensor.device_mesh
    return ShardLayout(
        shape,
        mesh_shape=tuple(mesh.shape),
        ranks=tuple(mesh.mesh.flatten().tolist()),
        cuts=tuple(_cut(placement, len(shape), name) for placement in tensor.placements),
    )


def holds_shape(layout: ShardLayout, coordinate: Sequence[int], local: tuple[int, ...]) -> bool:
    """Whether a local tensor of shape ``local`` can be what the rank at ``coordinate`` holds."""
    expected = layout.local_shape(coordinate)
    return expected == local or (0 in expected and 0 in local)


def _cut(placement: Placement, ndim: int, name: str) -> Cut | None:
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, _StridedShard):
        return Cut(placement.dim % ndim, int(placement.split_factor))
    if isinstance(placement, Shard) and type(placement) is Shard:
        return Cut(placement.dim % ndim)
    what = "partial sums" if isinstance(placement, Partial) else f"placement {placement}"
    raise ConfigurationError(f"{name} is a DTensor of {what}: Muon takes Shard, _StridedShard and Replicate")


# Most parameters of a model have the layout of another one, and a mesh can have a thousand ranks.
@lru_cache(maxsize=1024)
def _copies(layout: ShardLayout) -> tuple[Copy, ...]:
    split = [index for index, cut in enumerate(layout.cuts) if cut is not None]
    copies: dict[tuple[int, ...], list[tuple[int, tuple[Runs, ...]]]] = {}
    for rank, coordinate in zip(layout.ranks, layout.coordinates(), strict=True):
        copy = copies.setdefault(tuple(at for i, at in enumerate(coordinate) if i not in split), [])
        held = layout.held(coordinate)
        if all(held):
            copy.append((rank, held))
    return tuple(tuple(copy) for copy in copies.values())


def _splits(layout: ShardLayout, dim: int) -> list[tuple[int, int]]:
    """Mesh dimensions that split a tensor dimension with the split factor of each, in the order in which they apply."""
    if layout.order == "nested":
        return [(index, 1) for index in _nesting(layout, dim) or []]
    return [(index, cut.factor) for index, cut in enumerate(layout.cuts) if cut is not None and cut.dim == dim]


def _nesting(layout: ShardLayout, dim: int) -> list[int] | None:
    """The order from the outermost split to the innermost that the split factors tell, ``None`` if they tell none.

    From right to left, each mesh dimension goes inside those to its right whose sizes multiply to its split factor.
    """
    order: list[int] = []
    for index in reversed(range(len(layout.cuts))):
        cut = layout.cuts[index]
        if cut is None or cut.dim != dim:
            continue
        outside, pieces = 0, 1
        while pieces < cut.factor and outside < len(order):
            pieces *= layout.mesh_shape[order[outside]]
            outside += 1
        if pieces != cut.factor:
            return None
        order.insert(outside, index)
    return order
