"""From a selection and the meshes to a plan that all ranks share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon_hf.core.environment import setting, switch
from dmuon_hf.core.errors import ConfigurationError, LockstepError
from dmuon_hf.core.mesh import Topology, check_policy, local_topology, topology_from_meshes
from dmuon_hf.core.plan import Plan, make_plan
from dmuon_hf.core.plan.plan import Setting
from dmuon_hf.core.runtime.build import Target, is_deferred
from dmuon_hf.core.runtime.replica_check import bit_sum, first_unequal_replica, unequal_start
from dmuon_hf.core.runtime.tensor_part import TensorPart
from dmuon_hf.core.selection import Selected
from dmuon_hf.core.tensor_mesh import tensor_mesh_of

__all__ = [
    "OwnerChoice",
    "agreed_plan",
    "compare_values",
    "deferred_names",
    "log_plan",
    "tensor_placements",
    "topology_of",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnerChoice:
    """How owners are chosen; see :func:`~dmuon_hf.core.plan.assign_owners`."""

    strategy: str
    cost_model: str
    column_balance: bool
    pack_small_params: bool
    max_per_group: int | None

    @classmethod
    def of_arguments(
        cls,
        owner_strategy: str | None,
        owner_cost_model: str | None,
        pack_small_params: bool | None,
        max_owners_per_group: int | None,
        *,
        hsdp_column_balance: bool | None,
    ) -> OwnerChoice:
        """Arguments of ``dedicate_params``; the environment says what was left out."""
        return cls(
            setting(owner_strategy, "DMUON_OWNER_STRATEGY", "lpt"),
            setting(owner_cost_model, "DMUON_OWNER_COST_MODEL", "optimizer"),
            switch("DMUON_HSDP_COLUMN_BALANCE", given=hsdp_column_balance, default=True),
            switch("DMUON_OWNER_PACK_SMALL_PARAMS", given=pack_small_params, default=True),
            max_owners_per_group,
        )


def agreed_plan(selection: Selected, topology: Topology, choice: OwnerChoice, settings: Mapping[str, Setting]) -> Plan:
    """The plan for what was selected, compared across the ranks. Collective.

    Args:
        selection: What gets owners.
        topology: Where the ranks stand.
        choice: How owners are chosen.
        settings: Further options on which the ranks must agree.

    Raises:
        ConfigurationError: A candidate is no matrix, or an option is wrong.
        LockstepError: The ranks would communicate differently; the message names the first difference.
    """
    plan = make_plan(
        selection.candidates,
        units=selection.units,
        shard_size=topology.shard_size,
        replicate_size=topology.replicate_size,
        owner_strategy=choice.strategy,  # type: ignore[arg-type]
        owner_cost_model=choice.cost_model,  # type: ignore[arg-type]
        hsdp_column_balance=choice.column_balance,
        pack_small_params=choice.pack_small_params,
        max_owners_per_group=choice.max_per_group,
        settings={**settings, "policies": selection.policies},
    )
    _compare_plans(plan, topology)
    return plan


def _compare_plans(plan: Plan, topology: Topology) -> None:
    """Refuse to start when the ranks would communicate differently."""
    if topology.grid is None or not topology.grid.talks:
        return
    digests = topology.grid.all_gather_object(plan.digest())
    if len(set(digests)) == 1:
        return
    plans = topology.grid.all_gather_object(plan.to_json())
    mine = topology.grid.rank
    for rank, other in enumerate(plans):
        if digests[rank] != digests[mine]:
            difference = plan.difference(Plan.from_json(other))
            raise LockstepError(
                f"data-parallel ranks {mine} and {rank} made different plans; first difference (here / there): "
                f"{difference}. Every rank must build the same model and pass the same arguments."
            )


def log_plan(plan: Plan, topology: Topology) -> None:
    """On the first rank alone."""
    if topology.grid is None or topology.grid.rank == 0:
        logger.info(
            "dedicate_params: %d params assigned to %d ranks, imbalance=%.1f%%, loads=%s",
            len(plan.entries),
            topology.size,
            100 * plan.imbalance(),
            plan.loads(),
        )


def topology_of(
    model: nn.Module,
    mesh: DeviceMesh | None,
    replicate_mesh: DeviceMesh | None,
    policy: str | None,
    targets: Mapping[str, Target] | None = None,
) -> Topology:
    """Where this rank stands in the meshes that ``dedicate_params`` was given. Collective over them.

    With a tensor-parallel axis if ``targets`` are given and lie on one, or other parameters of the model do.
    """
    policy = setting(policy, "DMUON_PROCESS_GROUP_POLICY", "isolated")
    tensor_mesh = None
    if targets is not None:
        selected: Mapping[str, torch.Tensor] = {name: target.param for name, target in targets.items()}
        tensor_mesh = tensor_mesh_of(selected, model.parameters(), (mesh, replicate_mesh))
    if mesh is not None:
        return topology_from_meshes(mesh, replicate_mesh, tensor_mesh, policy=policy)
    if replicate_mesh is not None:
        raise ConfigurationError("replicate_mesh needs a mesh over the shard dimension beside it")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigurationError(
            "mesh=None is for one process, but the process group has "
            f"{dist.get_world_size()} ranks: pass init_device_mesh(device, (world_size,)), or in a pipeline the "
            "data-parallel dimension of its mesh, even if it has one rank"
        )
    check_policy(policy)
    return local_topology(next(model.parameters()).device)


def tensor_placements(targets: Mapping[str, Target], topology: Topology) -> dict[str, str]:
    """How each parameter lies on the tensor-parallel axis, for the plan; nothing without one."""
    if topology.tensor is None:
        return {}
    parts = {name: TensorPart.of(target.param) for name, target in targets.items()}
    listed = ", ".join(f"{name}: {part.placement}" for name, part in parts.items() if part is not None)
    return {"tensor-parallel": f"{topology.tensor.size} ranks, {listed}"}


def deferred_names(targets: Mapping[str, Target], topology: Topology) -> str:
    """The parameters that have no values yet: the same ones on every rank, which a plan compares."""
    return ", ".join(name for name, target in targets.items() if is_deferred(target.param, topology))


@torch.no_grad()
def compare_values(targets: Mapping[str, Target], topology: Topology) -> None:
    """Refuse replicas that start with different matrices: the owner's would silently become everybody's.

    Values on the meta device are not compared; a later error names them.
    """
    if topology.grid is None or not topology.grid.talks:
        return
    real = {name: target.param for name, target in targets.items() if not target.param.is_meta}
    sums = [int(bit_sum(param._local_tensor if isinstance(param, DTensor) else param).cpu()) for param in real.values()]

    unequal = first_unequal_replica(topology.grid.all_gather_object, list(real), sums, topology)
    if unequal is not None:
        raise unequal_start(*unequal)
