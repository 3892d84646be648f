"""Where on a mesh the values of an owned tensor lie, and how they get from there to the other ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["Ownership", "broadcast_from_owner", "reduce_to_owner"]


class Ownership(NamedTuple):
    """The coordinate on the axes that a tensor is owned over, and ordinary placements on the others.

    Attributes:
        owner: Rank of the owner, counted row by row through ``axes``; -1 where nobody owns the tensor.
        axes: Mesh axes that the tensor is owned over, ascending.
        coordinate: The owner's, one for each of ``axes``.
        is_owner: Whether this rank stands there. Exactly one rank does where all axes are owned over.
        placements: One for each axis of the mesh; ``Shard(0)`` on those that are owned over.
    """

    owner: int
    axes: tuple[int, ...]
    coordinate: tuple[int, ...]
    is_owner: bool
    placements: tuple[Placement, ...]

    @classmethod
    def on(cls, mesh: DeviceMesh, owner: int, unowned: Mapping[int, Placement]) -> Ownership:
        """The place of rank ``owner`` of the axes of ``mesh`` that are not in ``unowned``.

        Raises:
            ConfigurationError: ``owner`` is outside of the mesh, or ``unowned`` names an axis that it has not.
        """
        axes = tuple(axis for axis in range(mesh.ndim) if axis not in unowned)
        if not axes or not set(unowned) <= set(range(mesh.ndim)):
            raise ConfigurationError(
                f"unowned axes {sorted(unowned)} leave nothing of a {mesh.ndim}-D mesh to own over"
            )
        sizes = [mesh.size(axis) for axis in axes]
        if not 0 <= owner < math.prod(sizes):
            raise ConfigurationError(f"owner {owner} is not a rank of a mesh of {math.prod(sizes)} ranks")
        coordinate = []
        rest = owner
        for size in reversed(sizes):
            rest, position = divmod(rest, size)
            coordinate.append(position)
        coordinate.reverse()
        is_owner = all(mesh.get_local_rank(axis) == place for axis, place in zip(axes, coordinate, strict=True))
        placements = tuple(unowned.get(axis, Shard(0)) for axis in range(mesh.ndim))
        return cls(owner, axes, tuple(coordinate), is_owner, placements)

    @classmethod
    def everywhere(cls, placements: Sequence[Placement]) -> Ownership:
        """No axis is owned over: every rank has the part that ``placements``, one for each axis, give it."""
        return cls(-1, (), (), True, tuple(placements))

    def is_whole(self, spec: DTensorSpec) -> bool:
        """Whether the owner's local tensor is the whole, and not a part of what further axes share out."""
        return len(self.axes) == spec.mesh.ndim or all(
            placement.is_replicate() for axis, placement in enumerate(self.placements) if axis not in self.axes
        )

    def part(self, spec: DTensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and offset of what a rank at this one's place on the further axes holds if it is the owner."""
        assert spec.tensor_meta is not None
        shape = spec.tensor_meta.shape
        if len(self.axes) == spec.mesh.ndim:
            return tuple(shape), (0,) * len(shape)
        beside = [Replicate() if axis in self.axes else place for axis, place in enumerate(self.placements)]
        sizes, offsets = compute_local_shape_and_global_offset(shape, spec.mesh, beside)
        return tuple(sizes), tuple(offsets)

    def cut(self, whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
        """A view of what this rank holds of a whole tensor: its part where the owner is, no rows elsewhere."""
        part = whole
        for dim, (size, offset) in enumerate(zip(*self.part(spec), strict=True)):
            if size != whole.shape[dim]:
                part = part.narrow(dim, offset, size)
        return part if self.is_owner else part[:0]


def broadcast_from_owner(value: torch.Tensor, mesh: DeviceMesh, ownership: Ownership) -> None:
    """Give the owner's values to every rank, in place, one axis after the other. Collective over the owned axes.

    Along an axis go those ranks that have the owner's coordinate on all later ones; so each sends what it has got.
    """
    # A byte view: one-byte types such as float8 are not known to every backend.
    wire = value.view(torch.uint8) if value.element_size() == 1 else value
    for axis, place, takes_part in _steps(mesh, ownership):
        if takes_part:
            dist.broadcast(wire, group=mesh.get_group(axis), group_src=place)


def reduce_to_owner(value: torch.Tensor, mesh: DeviceMesh, ownership: Ownership, axes: Mapping[int, float]) -> None:
    """Sum over ``axes``, with a factor each, what the ranks have; in place, right on the owner. Collective over them.

    Backwards through the broadcast: along the last axis go all ranks, then those that have the sums.
    """
    for axis, place, takes_part in reversed(_steps(mesh, ownership)):
        if axis in axes and takes_part:
            dist.reduce(value, group=mesh.get_group(axis), group_dst=place)
            if axes[axis] != 1.0:
                value.mul_(axes[axis])


def _steps(mesh: DeviceMesh, ownership: Ownership) -> list[tuple[int, int, bool]]:
    """Axis, the owner's place on it, and whether this rank has the owner's coordinate on all later axes."""
    steps: list[tuple[int, int, bool]] = []
    takes_part = True
    for axis, place in zip(reversed(ownership.axes), reversed(ownership.coordinate), strict=True):
        steps.append((axis, place, takes_part))
        takes_part = takes_part and mesh.get_local_rank(axis) == place
    return steps[::-1]
