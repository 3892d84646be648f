"""``dedicate_params_ddp`` and ``dedicate_params_ddp_tp``: owners for matrices that every rank keeps whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.hook_boundaries import BoundaryRule, HookBoundaryResolver
from dmuon_hf.core.plan import SHARDED
from dmuon_hf.core.plan.plan import Setting
from dmuon_hf.core.planning import OwnerChoice, agreed_plan, log_plan, tensor_placements, topology_of
from dmuon_hf.core.policy import ParamPolicyFn, policy_source
from dmuon_hf.core.replicated.build import build_replicated
from dmuon_hf.core.runtime.build import Target
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.runtime import attach, runtime_of
from dmuon_hf.core.runtime.state_dict_shim import watch_state_dicts
from dmuon_hf.core.selection import AssignmentGroupKeyFn, MatrixSpecFn, Predicate, Selected, select

__all__ = ["dedicate_params_ddp", "dedicate_params_ddp_tp"]


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
    selected = partial(
        select,
        model,
        predicate,
        matrix_spec_fn=matrix_spec_fn,
        group_key_fn=assignment_group_key_fn,
        policy_of=policy_source(param_policy=param_policy, param_policy_fn=param_policy_fn, route_hint_fn=None),
        boundaries=BoundaryRule(hook_boundary_predicate, hook_boundary_strict, hook_boundary_resolver),
    )
    choice = OwnerChoice.of_arguments(
        owner_strategy, owner_cost_model, pack_small_params, max_owners_per_group, hsdp_column_balance=True
    )
    return _dedicate(model, mesh, selected, choice, compute_dtype, process_group_policy, tensor_parallel=False)


def dedicate_params_ddp_tp(
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
    tp_buffer_reuse: bool | str = False,
    param_policy: Mapping[str, Any] | None = None,
    param_policy_fn: ParamPolicyFn | None = None,
    process_group_policy: str | None = None,
    *,
    matrix_spec_fn: MatrixSpecFn | None = None,
) -> dict[nn.Parameter, int]:
    """:func:`dedicate_params_ddp` for models that tensor parallelism has cut, and that nobody shards further.

    The order is ``parallelize_module`` on one dimension of a named mesh, this with another, then :func:`replicate_tp`
    for everything without an owner. A matrix has its owner at one data-parallel place, where the ranks of the
    tensor-parallel axis keep the momentum of their parts and bring the matrix together, one of them for each. Then each
    sends its part to its replicas, which wait for it inside of ``step()``: nothing would see who reads a DTensor.

    A collective over all ranks of both dimensions, which compares their plans. Parts start as the first data-parallel
    rank has them, matrices that tensor parallelism left whole as the first rank of all.

    Args:
        model: The model, on any device, after ``parallelize_module``; not wrapped.
        mesh: 1-D mesh over the data-parallel ranks of this tensor-parallel place, such as ``mesh["dp"]``.
        predicate: ``(name, param) -> bool``, with canonical names; true for matrices that Muon is to update.
        tp_buffer_reuse: As in :func:`dmuon_hf.core.dedicate_params`.
        compute_dtype, hook_boundary_predicate, hook_boundary_strict, hook_boundary_resolver, assignment_group_key_fn,
        max_owners_per_group, owner_strategy, owner_cost_model, pack_small_params, param_policy, param_policy_fn,
        process_group_policy, matrix_spec_fn: As in :func:`dedicate_params_ddp`.

    Returns:
        Rank in ``mesh`` of the owner of each selected parameter.

    Raises:
        ConfigurationError: As for :func:`dedicate_params_ddp`, but for DTensors on a dimension beside ``mesh``.
        LockstepError: The ranks' plans differ; the message names the first difference.
        NotImplementedError: A selected parameter lies on a mesh of several dimensions, or two on different ones.
    """
    selected = partial(
        select,
        model,
        predicate,
        matrix_spec_fn=matrix_spec_fn,
        group_key_fn=assignment_group_key_fn,
        policy_of=policy_source(param_policy=param_policy, param_policy_fn=param_policy_fn, route_hint_fn=None),
        boundaries=BoundaryRule(hook_boundary_predicate, hook_boundary_strict, hook_boundary_resolver),
    )
    choice = OwnerChoice.of_arguments(
        owner_strategy, owner_cost_model, pack_small_params, max_owners_per_group, hsdp_column_balance=True
    )
    return _dedicate(
        model,
        mesh,
        selected,
        choice,
        compute_dtype,
        process_group_policy,
        tensor_parallel=True,
        tp_buffer_reuse=tp_buffer_reuse,
    )


def _dedicate(
    model: nn.Module,
    mesh: DeviceMesh,
    selected: Callable[[], Selected],
    choice: OwnerChoice,
    compute_dtype: torch.dtype | None,
    process_group_policy: str | None,
    *,
    tensor_parallel: bool,
    tp_buffer_reuse: bool | str = False,
) -> dict[nn.Parameter, int]:
    """What both functions do, once their arguments are in order."""
    _check_model(model, mesh)
    selection = selected()
    targets = selection.targets
    _check_routes(targets)
    if not tensor_parallel:
        _check_plain(targets)
    found = topology_of(model, mesh, None, process_group_policy, targets if tensor_parallel else None)
    topology = dataclasses.replace(found, keeps_whole=True)
    settings: dict[str, Setting] = {"compute_dtype": str(compute_dtype), "replicated": True}
    settings |= tensor_placements(targets, topology)
    plan = agreed_plan(selection, topology, choice, settings)
    context = DedicatedCommContext(topology.device, tp_buffer_reuse=tp_buffer_reuse)
    runtime = build_replicated(model, plan, targets, topology, context, compute_dtype)
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


def _check_routes(targets: Mapping[str, Target]) -> None:
    for name, target in targets.items():
        if target.policy.route == SHARDED:
            raise ConfigurationError(
                f"{name} is on the route 'sharded_adamw', which cuts weights into rows, and here every rank keeps them "
                "whole: give it 'adamw', or use dedicate_params()"
            )


def _check_plain(targets: Mapping[str, Target]) -> None:
    for name, target in targets.items():
        if isinstance(target.param, DTensor):
            raise ConfigurationError(
                f"{name} is already a DTensor, and dedicate_params_ddp takes models of which every rank has the whole: "
                "under tensor parallelism call dedicate_params_ddp_tp() with the data-parallel dimension of the mesh, "
                "or dedicate_params() and fully_shard()"
            )
