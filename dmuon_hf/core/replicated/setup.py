"""``dedicate_params_ddp``: owners for matrices that every rank keeps whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.hook_boundaries import BoundaryRule, HookBoundaryResolver
from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.plan import Plan
from dmuon_hf.core.planning import OwnerChoice, agreed_plan, log_plan, topology_of
from dmuon_hf.core.policy import ParamPolicyFn, policy_source
from dmuon_hf.core.replicated.averaging import GradientAveraging
from dmuon_hf.core.replicated.bucket import GradBucket
from dmuon_hf.core.replicated.params import ReplicatedParam
from dmuon_hf.core.replicated.publish import UnitPublish
from dmuon_hf.core.replicated.runtime import ReplicatedRuntime
from dmuon_hf.core.runtime.build import Target
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.dedicated import without_values
from dmuon_hf.core.runtime.runtime import attach, runtime_of
from dmuon_hf.core.runtime.state_dict_shim import watch_state_dicts
from dmuon_hf.core.selection import (
    AssignmentGroupKeyFn,
    MatrixSpecFn,
    Predicate,
    select,
)

__all__ = ["average_dtype", "broadcast_from_first", "dedicate_params_ddp"]


def dedicate_params_ddp(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate,
    compute_dtype: torch.dtype | None = None,
    hook_boundary_predicate: Callable[[nn.Module], bool] | None = None,
    hook_boundary_strict: bool = True,
    hook_boundary_resolver: HookBoundaryResolver | None = None,
    assignment_group_key_fn: AssignmentGroupKeyFn | None = None,
    max_owners_per_group: int | None = None,
    owner_strategy: str | None = None,
    owner_cost_model: str | None = None,
    pack_small_params: bool | None = None,
    param_policy: Mapping[str, Any] | None = None,
    param_policy_fn: ParamPolicyFn | None = None,
    process_group_policy: str | None = None,
    *,
    matrix_spec_fn: MatrixSpecFn | None = None,
) -> dict[nn.Parameter, int]:
    """Give each selected matrix an owner that computes its update; every rank keeps the whole parameter.

    For models that are replicated instead of sharded. Parameters stay the plain ones that they are. Backward leaves on
    every rank the mean gradient over all ranks, so that clipping, loss scaling and logging work as under
    ``DistributedDataParallel``; the owner alone keeps momentum and runs Newton-Schulz, and after the step sends the
    matrix to the others while they go on. Each module waits for its own matrices before its forward, and whoever reads
    one earlier waits there; code that reads memory behind torch's back, such as kernels that were given an address,
    calls :func:`wait_all_post_step_broadcasts` first.

    A collective: every rank calls it, before ``DistributedDataParallel`` or :func:`replicate`, which synchronise
    everything else. All ranks start from the selected matrices of the first one.

    Args:
        model: The model, on any device; not wrapped.
        mesh: 1-D mesh over all data-parallel ranks.
        predicate: ``(name, param) -> bool``, with canonical names; true for matrices that Muon is to update.
        compute_dtype: Dtype in which gradients travel; fp32 by default, the parameter's own if that is wider. Updated
            matrices travel in their own.
        hook_boundary_predicate, hook_boundary_strict, hook_boundary_resolver, assignment_group_key_fn,
        max_owners_per_group, owner_strategy, owner_cost_model, pack_small_params, process_group_policy, matrix_spec_fn:
            As in :func:`dmuon_hf.core.dedicate_params`. Gradients travel, and updates arrive, by hook boundary.
        param_policy, param_policy_fn: As in :func:`dmuon_hf.core.dedicate_params`. ``route``, ``grad_dtype`` and
            ``optim_dtype`` act; weights are the model's own here, so that the other fields change nothing.

    Returns:
        Rank in ``mesh`` of the owner of each selected parameter.

    Raises:
        ConfigurationError: Nothing is selected, a selected parameter is no matrix, a DTensor or on the meta device, is
            shared by two hook boundaries, the mesh is not 1-D, or the model is wrapped or dedicated already.
        LockstepError: The ranks' plans differ; the message names the first difference.
        NotImplementedError: A mode that is not built was asked for.
    """
    policy_of = policy_source(param_policy=param_policy, param_policy_fn=param_policy_fn, route_hint_fn=None)
    _check_model(model, mesh)
    choice = OwnerChoice.of_arguments(
        owner_strategy, owner_cost_model, pack_small_params, max_owners_per_group, hsdp_column_balance=True
    )
    selection = select(
        model,
        predicate,
        matrix_spec_fn=matrix_spec_fn,
        group_key_fn=assignment_group_key_fn,
        policy_of=policy_of,
        boundaries=BoundaryRule(hook_boundary_predicate, hook_boundary_strict, hook_boundary_resolver),
    )
    targets = selection.targets
    _check_plain(targets)
    topology = dataclasses.replace(topology_of(model, mesh, None, process_group_policy), keeps_whole=True)
    plan = agreed_plan(selection, topology, choice, {"compute_dtype": str(compute_dtype), "replicated": True})
    runtime = _build(model, plan, targets, topology, compute_dtype)
    runtime.left_frozen = selection.frozen
    attach(model, runtime)
    watch_state_dicts(model)
    log_plan(plan, topology)
    return {param.param: param.owner_shard for param in runtime.dedicated.values()}


def _check_model(model: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            "call dedicate_params_ddp on the model before DistributedDataParallel wraps it, which then leaves the "
            "selected matrices alone"
        )
    if runtime_of(model) is not None:
        raise ConfigurationError(
            "the model has dedicated parameters already: select everything that is to be owned in one call"
        )
    if mesh.ndim != 1:
        raise ConfigurationError(
            f"dedicate_params_ddp takes a 1-D mesh over all data-parallel ranks, got {mesh.ndim}-D: use "
            "dedicate_params() with fully_shard() for HSDP"
        )


def _check_plain(targets: Mapping[str, Target]) -> None:
    for name, target in targets.items():
        if isinstance(target.param, DTensor):
            raise ConfigurationError(
                f"{name} is already a DTensor, and dedicate_params_ddp takes models of which every rank has the whole: "
                "for tensor parallelism use dedicate_params() with the data-parallel dimension of the mesh, and "
                "fully_shard()"
            )


def _build(
    model: nn.Module, plan: Plan, targets: Mapping[str, Target], topology: Topology, dtype: torch.dtype | None
) -> ReplicatedRuntime:
    context = DedicatedCommContext(topology.device)
    context.monitor.start(topology)
    assert topology.mesh is not None and topology.shard_group is not None
    params: dict[str, ReplicatedParam] = {}
    for entry in plan.entries:
        target = targets[entry.name]
        if target.param.is_meta and topology.device.type != "meta":
            raise without_values(entry.name, topology.device)
        params[entry.name] = ReplicatedParam(
            mesh=topology.mesh,
            is_owner=topology.slot == entry.owner,
            name=entry.name,
            aliases=entry.aliases,
            param=target.param,
            places=target.places,
            spec=entry.spec,
            owner=entry.owner,
            unit=entry.unit,
            boundary=target.boundary,
            route=entry.route,
            optim_dtype=target.policy.optim_dtype,
        )
    broadcast_from_first([param.param for param in params.values()], topology)
    averaging = GradientAveraging(model)
    publishes = []
    for name in reversed(plan.units):
        members = [params[entry.name] for entry in plan.unit_entries(name)]
        bucket = GradBucket(
            f"unit {name}",
            [(param.name, param.param) for param in members],
            group=topology.shard_group,
            context=context,
            dtype=targets[members[0].name].policy.grad_dtype
            or dtype
            or average_dtype([param.param for param in members]),
        )
        averaging.add([bucket], late=False)
        publish = UnitPublish(name, members, group=topology.shard_group, context=context)
        publish.attach(model, members[0].boundary)
        publishes.append(publish)
    return ReplicatedRuntime(
        topology=topology,
        plan=plan,
        params=list(params.values()),
        publishes=publishes[::-1],
        averaging=averaging,
        context=context,
    )


def average_dtype(params: Iterable[Tensor]) -> torch.dtype:
    """Dtype in which the gradients of some parameters are added up: fp32, or that of the widest."""
    dtype = torch.float32
    for param in params:
        dtype = torch.promote_types(dtype, param.dtype)
    return dtype


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], topology: Topology) -> None:
    """Give every rank the values of the first one, in place, as ``DistributedDataParallel`` does. Collective."""
    if topology.grid is None or not topology.grid.talks:
        return
    for tensor in tensors:
        value = tensor.detach().to(topology.device, copy=True).contiguous().view(-1)
        # Bytes: not every backend knows every dtype.
        topology.grid.broadcast(value.view(torch.uint8), 0)
        tensor.copy_(value.view(tensor.shape))
