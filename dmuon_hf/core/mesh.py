"""Where this rank stands: the data-parallel topology that owners are assigned on."""

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

__all__ = ["Topology", "check_policy", "local_topology", "topology_from_meshes"]

PROCESS_GROUP_POLICIES = ("isolated", "shared")


@dataclass(frozen=True, slots=True)
class Topology:
    """A ``replicate x shard`` grid of ranks and this rank's place in it.

    ``mesh`` is what owned tensors live on: the caller's own mesh, which FSDP2's DTensors are on too; 1-D, or
    ``(replicate, shard)`` where a replicate mesh was given. ``grid`` is all of its ranks as one group. Every group is
    ``None`` in a single process without a process group; ``replicate_group`` is ``None`` with one replica.
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
    keeps_whole: bool = False
    """Whether every rank keeps whole weights, so that owners share out nothing but the updates."""

    @property
    def size(self) -> int:
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
        return 1 if self.keeps_whole else self.shard_size

    @property
    def slot(self) -> tuple[int, int]:
        """This rank's owner slot ``(shard, replicate)``."""
        return (self.shard_rank, self.replicate_rank)

    @property
    def ranks(self) -> list[int] | None:
        """Global ranks of the grid; ``None`` in a single process."""
        return None if self.mesh is None else self.mesh.mesh.flatten().tolist()

    def flat_rank(self, slot: tuple[int, int]) -> int:
        """Rank, row by row through ``mesh``, of the owner slot ``(shard, replicate)``."""
        shard, replicate = slot
        return replicate * self.shard_size + shard


def local_topology(device: torch.device) -> Topology:
    """The topology of one process without a process group."""
    return Topology(device, 1, 1, 0, 0, None, None, None, None)


def check_policy(policy: str) -> None:
    """Refuse a ``process_group_policy`` that there is not; also where there are no groups."""
    if policy not in PROCESS_GROUP_POLICIES:
        raise ConfigurationError(f"process_group_policy must be one of {PROCESS_GROUP_POLICIES}, got {policy!r}")


def topology_from_meshes(mesh: DeviceMesh, replicate_mesh: DeviceMesh | None, *, policy: str) -> Topology:
    """Build the topology of a shard mesh and an optional replicate mesh.

    Collective over all ranks of both meshes where ``policy`` is ``"isolated"``, or with more than one replica.

    Args:
        mesh: 1-D mesh over the shard dimension.
        replicate_mesh: 1-D mesh over the replicate dimension of the same root mesh (HSDP), or ``None``.
        policy: ``"isolated"`` clones every process group, ``"shared"`` uses those of the meshes.

    Raises:
        ConfigurationError: A mesh is not 1-D, the policy is unknown, or the two meshes do not form a grid.
    """
    check_policy(policy)
    for label, candidate in (("mesh", mesh), ("replicate_mesh", replicate_mesh)):
        if candidate is not None and candidate.ndim != 1:
            raise ConfigurationError(
                f"{label} must be 1-D, got {candidate.ndim}-D. For HSDP pass the two dimensions apart: "
                'dedicate_params(model, hsdp["shard"], replicate_mesh=hsdp["replicate"], ...)'
            )
    shard_group = mesh.get_group()
    shard_ranks = dist.get_process_group_ranks(shard_group)
    isolated = policy == "isolated"
    whole_mesh, replicate_group = mesh, None
    grid_ranks, groups = shard_ranks, [shard_group]
    if replicate_mesh is not None:
        whole_mesh = _grid_mesh(mesh, replicate_mesh)
        grid_ranks = whole_mesh.mesh.flatten().tolist()
        if replicate_mesh.size() > 1:
            replicate_group = replicate_mesh.get_group()
            groups.append(replicate_group)
    if isolated:
        shard_group = clone_group(shard_ranks, like=shard_group, purpose="shard", across=groups)
        if replicate_group is not None:
            replicate_ranks = dist.get_process_group_ranks(replicate_group)
            replicate_group = clone_group(replicate_ranks, like=replicate_group, purpose="replicate", across=groups)
    return Topology(
        device=device_of_mesh(mesh),
        shard_size=mesh.size(),
        replicate_size=1 if replicate_mesh is None else replicate_mesh.size(),
        shard_rank=mesh.get_local_rank(),
        replicate_rank=0 if replicate_mesh is None else replicate_mesh.get_local_rank(),
        mesh=whole_mesh,
        shard_group=shard_group,
        replicate_group=replicate_group,
        grid=GridGroup(shard_group, replicate_group, grid_ranks),
    )


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
