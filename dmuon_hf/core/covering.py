"""Which ranks some tensors lie on, from their meshes alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon_hf.core.grid_group import GridGroup

__all__ = ["cover_of", "grid_of", "meshes_of", "ranks_of"]


def ranks_of(tensors: Sequence[Tensor]) -> list[int]:
    """Global ranks of all meshes that ``tensors`` lie on; see :func:`cover_of`."""
    return sorted(cover_of(tensors)[0])


def grid_of(tensors: Sequence[Tensor]) -> GridGroup | None:
    """The ranks of :func:`cover_of` as one group; ``None`` for plain tensors. No communication."""
    ranks, links = cover_of(tensors)
    return GridGroup(links, ranks) if ranks else None


def meshes_of(tensors: Sequence[Tensor]) -> list[DeviceMesh]:
    """The distinct meshes that ``tensors`` lie on."""
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))


def cover_of(tensors: Sequence[Tensor]) -> tuple[list[int], list[ProcessGroup]]:
    """The ranks of all meshes that ``tensors`` lie on, row by row, and the groups of their rows; none for plain ones.

    They are those of one tensor's mesh that contains all others, else of the dimensions of a root mesh along which they
    extend (a stage of a pipeline, and not the others), else the whole world: a rank cannot see meshes that it is not
    part of.
    """
    meshes = meshes_of(tensors)
    if not meshes:
        return [], []
    needed = {member for mesh in meshes for member in _members(mesh)}
    for mesh in meshes:
        if needed <= set(_members(mesh)):
            return _members(mesh), [mesh.get_group(dim) for dim in range(mesh.ndim)]
    for root in dict.fromkeys(mesh._get_root_mesh() for mesh in meshes):
        here = root.get_coordinate()
        if here is not None and needed <= set(_members(root)):
            places = [(root.mesh == member).nonzero()[0].tolist() for member in needed]
            extent = [dim for dim in range(root.ndim) if any(place[dim] != here[dim] for place in places)]
            part = root.mesh[tuple(slice(None) if dim in extent else at for dim, at in enumerate(here))]
            return part.flatten().tolist(), [root.get_group(dim) for dim in extent]
    return list(range(dist.get_world_size())), [dist.distributed_c10d._get_default_group()]


def _members(mesh: DeviceMesh) -> list[int]:
    members: list[int] = mesh.mesh.flatten().tolist()
    return members
