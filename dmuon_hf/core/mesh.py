"""Where this rank stands: the data-parallel grid that owners are assigned on, and a tensor-parallel axis beside it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dmuon_hf.core.device import device_of_mesh
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.grid_group import GridGroup
from dmuon_hf.core.process_groups import clone_group

__all__ = ["TensorAxis", "Topology", "check_policy", "local_topology", "topology_from_meshes"]

PROCESS_GROUP_POLICIES = ("isolated", "shared")


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """The mesh dimension beside the data-parallel ones over which parameters are sharded, or replicated, as DTensors.

    Attributes:
        mesh: 1-D, the one that the parameters are on.
        whole: The data-parallel mesh with this dimension as the last one, on which FSDP2 puts such parameters too.
        group: What parts of tensors travel on; ``None`` with one rank.
        ranks: Global ranks, in the order of ``group``.
    """

    mesh: DeviceMesh
    whole: DeviceMesh
    group: ProcessGroup | None
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()


@dataclass(frozen=True, slots=True)
class Topology:
    """A ``replicate x shard`` grid of ranks and this rank's place in it.

    ``mesh`` is what owned tensors live on: the caller's own mesh, which FSDP2's DTensors are on too; 1-D, or
    ``(replicate, shard)`` where a replicate mesh was given. With a ``tensor`` axis there is one such grid for each of
    its ranks. ``data`` is the ranks of this grid as one group, ``grid`` those of all grids. Every group is ``None`` in
    a single process without a process group; ``replicate_group`` is ``None`` with one replica.
    """

    device: torch.device
    shard_size: int
    replicate_size: int
    shard_rank: int
    replicate_rank: int
    mesh: DeviceMesh | None
    shard_group: ProcessGroup | None
    replicate_group: ProcessGroup | None
    grid: GridGroup | None
    data: GridGroup | None
    tensor: TensorAxis | None = None
    owns_groups: bool = False
    """Whether the groups are clones that nobody else communicates on."""
    keeps_whole: bool = False
    """Whether every rank keeps whole weights, so that owners share out nothing but the updates."""

    @classmethod
    def of_ranks(cls, grid: GridGroup, device: torch.device) -> Topology:
        """One of ranks that only agree with each other; nothing is owned on it."""
        return cls(device, grid.size, 1, grid.rank, 0, None, None, None, grid, grid)

    @property
    def size(self) -> int:
        """Data-parallel ranks."""
        return self.shard_size * self.replicate_size

    @property
    def is_distributed(self) -> bool:
        return self.mesh is not None

    @property
    def is_hsdp(self) -> bool:
        return self.replicate_size > 1

    @property
    def compares_replicas(self) -> bool:
        """Whether there are several replicas, and this process can talk to them."""
        return (self.is_hsdp or self.keeps_whole) and self.grid is not None and self.grid.talks

    @property
    def replica_distance(self) -> int:
        """Number of flat ranks after which the same weights are held again."""
        return (1 if self.keeps_whole else self.shard_size) * (1 if self.tensor is None else self.tensor.size)

    @property
    def slot(self) -> tuple[int, int]:
        """This rank's owner slot ``(shard, replicate)``."""
        return (self.shard_rank, self.replicate_rank)

    @property
    def ranks(self) -> list[int] | None:
        """Global ranks of all grids; ``None`` in a single process."""
        return None if self.grid is None else list(self.grid.ranks)

    def flat_rank(self, slot: tuple[int, int]) -> int:
        """Rank, row by row through ``mesh``, of the owner slot ``(shard, replicate)``."""
        shard, replicate = slot
        return replicate * self.shard_size + shard


def local_topology(device: torch.device) -> Topology:
    """The topology of one process without a process group."""
    return Topology(device, 1, 1, 0, 0, None, None, None, None, None)


def check_policy(policy: str) -> None:
    """Refuse a ``process_group_policy`` that there is not; also where there are no groups."""
    if policy not in PROCESS_GROUP_POLICIES:
        raise ConfigurationError(f"process_group_policy must be one of {PROCESS_GROUP_POLICIES}, got {policy!r}")


def topology_from_meshes(
    mesh: DeviceMesh, replicate_mesh: DeviceMesh | None, tensor_mesh: DeviceMesh | None = None, *, policy: str
) -> Topology:
    """Build the topology of a shard mesh, an optional replicate mesh and an optional tensor-parallel one.

    Collective over all ranks of the meshes where ``policy`` is ``"isolated"``, or with more than one replica.

    Args:
        mesh: 1-D mesh over the shard dimension.
        replicate_mesh: 1-D mesh over the replicate dimension of the same root mesh (HSDP), or ``None``.
        tensor_mesh: 1-D mesh that parameters are on already, of the same root mesh, or ``None``.
        policy: ``"isolated"`` clones every process group, ``"shared"`` uses those of the meshes.

    Raises:
        ConfigurationError: A mesh is not 1-D, the policy is unknown, or the meshes do not form a grid.
    """
    check_policy(policy)
    for label, candidate in (("mesh", mesh), ("replicate_mesh", replicate_mesh)):
        if candidate is not None and candidate.ndim != 1:
            raise ConfigurationError(
                f"{label} must be 1-D, got {candidate.ndim}-D. For HSDP pass the two dimensions apart: "
                'dedicate_params(model, hsdp["shard"], replicate_mesh=hsdp["replicate"], ...)'
            )
    whole = mesh if replicate_mesh is None else _grid_mesh(mesh, replicate_mesh)
    parts = {"replicate": replicate_mesh, "shard": mesh, "tensor": tensor_mesh}
    groups = {
        purpose: part.get_group()
        for purpose, part in parts.items()
        if part is not None and (part.size() > 1 or purpose == "shard")
    }
    if policy == "isolated":
        across = list(groups.values())
        for purpose in ("shard", "replicate", "tensor"):
            if purpose in groups:
                ranks = dist.get_process_group_ranks(groups[purpose])
                groups[purpose] = clone_group(ranks, like=groups[purpose], purpose=purpose, across=across)
    data = GridGroup([groups[name] for name in ("replicate", "shard") if name in groups], _ranks_of(whole))
    tensor, grid = None, data
    if tensor_mesh is not None:
        beside = _with_tensor_axis(whole, tensor_mesh)
        tensor = TensorAxis(tensor_mesh, beside, groups.get("tensor"), tuple(_ranks_of(tensor_mesh)))
        grid = GridGroup(list(groups.values()), _ranks_of(beside))
    return Topology(
        device=device_of_mesh(mesh),
        shard_size=mesh.size(),
        replicate_size=1 if replicate_mesh is None else replicate_mesh.size(),
        shard_rank=mesh.get_local_rank(),
        replicate_rank=0 if replicate_mesh is None else replicate_mesh.get_local_rank(),
        mesh=whole,
        shard_group=groups["shard"],
        replicate_group=groups.get("replicate"),
        grid=grid,
        data=data,
        tensor=tensor,
        owns_groups=policy == "isolated",
    )


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def _with_tensor_axis(mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> DeviceMesh:
    """The data-parallel mesh and the tensor-parallel dimension as one, as FSDP2 joins them. Makes no communicator."""
    try:
        return DeviceMesh._concatenate([mesh, tensor_mesh])
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            "tensor-parallel parameters lie on a mesh that is no other dimension of the data-parallel one: slice both "
            'out of one named mesh, init_device_mesh(device, (shard, tp), mesh_dim_names=("shard", "tp")), and pass '
            'mesh["tp"] to parallelize_module and mesh["shard"] to dedicate_params'
        ) from error


def _grid_mesh(mesh: DeviceMesh, replicate_mesh: DeviceMesh) -> DeviceMesh:
    """The mesh ``(replicate, shard)``: a part of the common root, or one of their groups. Makes no communicator."""
    names = tuple(name for part in (replicate_mesh, mesh) for name in part.mesh_dim_names or ())
    root = mesh._get_root_mesh()
    if root == replicate_mesh._get_root_mesh() and len(names) == 2:
        # A root that has the dimensions in the other order gives no such part.
        with contextlib.suppress(KeyError):
            part = root[names]
            if part.ndim == 2:
                return part
    rows: list[list[int]] = [[] for _ in range(replicate_mesh.size())]
    dist.all_gather_object(rows, dist.get_process_group_ranks(mesh.get_group()), group=replicate_mesh.get_group())
    ranks = [rank for row in rows for rank in row]
    if len(set(ranks)) != len(ranks):
        raise ConfigurationError(f"mesh and replicate_mesh overlap instead of forming a grid: {rows}")
    return DeviceMesh.from_group(
        [replicate_mesh.get_group(), mesh.get_group()],
        mesh.device_type,
        mesh=rows,
        mesh_dim_names=names if len(names) == 2 else None,
    )
