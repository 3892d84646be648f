"""Where this rank stands: the data-parallel topology that owners are assigned on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dmuon_hf.core.device import device_of_mesh
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.process_groups import clone_group

__all__ = ["Topology", "check_policy", "local_topology", "topology_from_meshes"]

PROCESS_GROUP_POLICIES = ("isolated", "shared")


@dataclass(frozen=True, slots=True)
class Topology:
    """A ``replicate x shard`` grid of ranks and this rank's place in it.

    ``mesh`` is the flattened grid that owned tensors live on, ordered ``replicate * shard_size + shard``; it is the
    caller's own mesh where there is one replica, so that owned and FSDP2-sharded tensors share it. Every group is
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
    flat_group: ProcessGroup | None

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
    def slot(self) -> tuple[int, int]:
        """This rank's owner slot ``(shard, replicate)``."""
        return (self.shard_rank, self.replicate_rank)

    @property
    def ranks(self) -> list[int] | None:
        """Global ranks of the grid; ``None`` in a single process."""
        return None if self.mesh is None else self.mesh.mesh.flatten().tolist()

    def flat_rank(self, slot: tuple[int, int]) -> int:
        """Rank within ``mesh`` of the owner slot ``(shard, replicate)``."""
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
    replicate_group = None if replicate_mesh is None else replicate_mesh.get_group()
    replicate_size = 1 if replicate_mesh is None else replicate_mesh.size()
    isolated = policy == "isolated"

    if replicate_size == 1:
        if isolated:
            shard_group = clone_group(shard_ranks, like=shard_group, purpose="shard")
        control = clone_group(shard_ranks, like=shard_group, purpose="control") if isolated else shard_group
        return Topology(
            device=device_of_mesh(mesh),
            shard_size=mesh.size(),
            replicate_size=1,
            shard_rank=mesh.get_local_rank(),
            replicate_rank=0,
            mesh=mesh,
            shard_group=shard_group,
            replicate_group=None,
            flat_group=control,
        )

    assert replicate_mesh is not None and replicate_group is not None
    grid = _grid_ranks(mesh, replicate_mesh)
    flat_ranks = [rank for row in grid for rank in row]
    if len(set(flat_ranks)) != len(flat_ranks):
        raise ConfigurationError(f"mesh and replicate_mesh overlap instead of forming a grid: {grid}")
    both = (shard_group, replicate_group)
    flat_group = clone_group(flat_ranks, like=shard_group, purpose="control", across=both)
    flat_mesh_group = clone_group(flat_ranks, like=shard_group, purpose="mesh", across=both)
    if isolated:
        shard_group = clone_group(shard_ranks, like=shard_group, purpose="shard")
        replicate_ranks = dist.get_process_group_ranks(replicate_group)
        replicate_group = clone_group(replicate_ranks, like=replicate_group, purpose="replicate")
    return Topology(
        device=device_of_mesh(mesh),
        shard_size=mesh.size(),
        replicate_size=replicate_size,
        shard_rank=mesh.get_local_rank(),
        replicate_rank=replicate_mesh.get_local_rank(),
        mesh=DeviceMesh.from_group(flat_mesh_group, mesh.device_type, mesh_dim_names=("dmuon_dp",)),
        shard_group=shard_group,
        replicate_group=replicate_group,
        flat_group=flat_group,
    )


def _grid_ranks(mesh: DeviceMesh, replicate_mesh: DeviceMesh) -> list[list[int]]:
    """Global ranks as ``[replicate][shard]``: from the common root mesh, or asked of the other replicas."""
    shard_name = (mesh.mesh_dim_names or ("",))[0]
    replicate_name = (replicate_mesh.mesh_dim_names or ("",))[0]
    root = mesh._get_root_mesh()
    names = root.mesh_dim_names or ()
    if root == replicate_mesh._get_root_mesh() and shard_name in names and replicate_name in names:
        plane = root[replicate_name, shard_name] if root.ndim > 2 else root
        rows: list[list[int]] = plane.mesh.tolist()
        if plane.mesh_dim_names == (replicate_name, shard_name):
            return rows
        return [list(column) for column in zip(*rows, strict=True)]
    gathered: list[list[int]] = [[] for _ in range(replicate_mesh.size())]
    mine = dist.get_process_group_ranks(mesh.get_group())
    dist.all_gather_object(gathered, mine, group=replicate_mesh.get_group())
    return gathered
