"""Which mesh dimension is the tensor-parallel one: that on which parameters are DTensors before they are dedicated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["tensor_mesh_of"]


def tensor_mesh_of(
    selected: Mapping[str, Tensor], others: Iterable[Tensor], data: tuple[DeviceMesh | None, DeviceMesh | None]
) -> DeviceMesh | None:
    """The 1-D mesh of the parameters that are DTensors, beside the data-parallel ones; ``None`` if all are plain.

    Args:
        selected: What is to be dedicated, by name.
        others: The other parameters of the model. Ranks that share parts of those step together too.
        data: Shard mesh and replicate mesh.

    Raises:
        ConfigurationError: A selected parameter is distributed over a data-parallel dimension, or holds partial sums.
        NotImplementedError: One lies on a mesh of several dimensions, or two on different meshes.
    """
    found: dict[DeviceMesh, str] = {}
    for name, param in selected.items():
        if isinstance(param, DTensor):
            _check(name, param, data)
            found.setdefault(param.device_mesh, name)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise NotImplementedError(
            f"{first} and {second} are DTensors on different meshes: only one dimension beside the data-parallel ones "
            "is built, so parallelize all modules on one mesh, or leave some out of the predicate"
        )
    beside = (param.device_mesh for param in others if isinstance(param, DTensor) and _is_beside(param, data))
    return next(iter(found), None) or next(beside, None)


def _check(name: str, param: DTensor, data: tuple[DeviceMesh | None, DeviceMesh | None]) -> None:
    if data[0] is None:
        raise ConfigurationError(
            f"{name} is already a DTensor, and mesh=None is for plain parameters in one process: pass the "
            'data-parallel dimension, mesh["shard"], which may have one rank'
        )
    if _shared(param.device_mesh, data):
        raise ConfigurationError(
            f"{name} is already a DTensor over the data-parallel ranks: call dedicate_params before fully_shard. Only "
            "a dimension beside mesh and replicate_mesh, of the same named mesh, is tensor parallelism"
        )
    if param.device_mesh.ndim != 1:
        raise NotImplementedError(
            f"{name} is a DTensor on a mesh of {param.device_mesh.ndim} dimensions: only one dimension beside the "
            "data-parallel ones is built"
        )
    placement = param.placements[0]
    if type(placement) not in (Shard, Replicate):
        raise ConfigurationError(f"{name} is a DTensor of {placement}: a weight is Shard(dim) or Replicate()")


def _is_beside(param: DTensor, data: tuple[DeviceMesh | None, DeviceMesh | None]) -> bool:
    mesh = param.device_mesh
    return data[0] is not None and mesh.ndim == 1 and not _shared(mesh, data) and _one_root(mesh, data[0])


def _one_root(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    return bool(mesh._get_root_mesh() == other._get_root_mesh())


def _shared(mesh: DeviceMesh, data: tuple[DeviceMesh | None, DeviceMesh | None]) -> bool:
    """Whether ``mesh`` has a dimension of a data-parallel mesh: its name, or more ranks than this one."""
    ranks, names = set(mesh.mesh.flatten().tolist()), set(mesh.mesh_dim_names or ())
    return any(
        part == mesh
        or bool(names.intersection(part.mesh_dim_names or ()))
        or len(ranks.intersection(part.mesh.flatten().tolist())) > 1
        for part in data
        if part is not None
    )
