"""``dedicate_params``: its arguments, and the way from them to a running model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.hook_boundaries import BoundaryRule, HookBoundaryResolver
from dmuon_hf.core.plan import SHARDED
from dmuon_hf.core.planning import (
    OwnerChoice,
    agreed_plan,
    compare_values,
    deferred_names,
    log_plan,
    tensor_placements,
    topology_of,
)
from dmuon_hf.core.policy import ParamPolicy, ParamPolicyFn, RouteHintFn, check_forward_unshard, policy_source
from dmuon_hf.core.runtime.build import RuntimeOptions, build_runtime
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.runtime import attach, runtime_of
from dmuon_hf.core.runtime.state_dict_shim import watch_state_dicts
from dmuon_hf.core.selection import (
    AssignmentGroupKeyFn,
    MatrixSpecFn,
    Predicate,
    select,
    stacks_of,
)

__all__ = ["dedicate_params"]


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh | None,
    predicate: Predicate,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    replicate_mesh: DeviceMesh | None = None,
    hook_boundary_predicate: Callable[[nn.Module], bool] | None = None,
    hook_boundary_strict: bool = True,
    hook_boundary_resolver: HookBoundaryResolver | None = None,
    assignment_group_key_fn: AssignmentGroupKeyFn | None = None,
    route_hint_fn: RouteHintFn | None = None,
    max_owners_per_group: int | None = None,
    owner_strategy: str | None = None,
    owner_cost_model: str | None = None,
    hsdp_column_balance: bool | None = None,
    pack_small_params: bool | None = None,
    tp_buffer_reuse: bool | str = False,
    replicate_broadcast_bucket_mb: float = 0.0,
    muon_forward_unshard: str = "broadcast",
    delay_stage2_to_optimizer: bool = True,
    param_policy: Mapping[str, Any] | None = None,
    param_policy_fn: ParamPolicyFn | None = None,
    process_group_policy: str | None = None,
    *,
    matrix_spec_fn: MatrixSpecFn | None = None,
    reduce_dtype: torch.dtype | None = None,
    master_dtype: torch.dtype | None = None,
    source_rank: int | None = None,
) -> dict[nn.Parameter, int | tuple[int, int]]:
    """Give each selected matrix one owner rank, and register the hooks that bring it to the others.

    Call it once, before ``fully_shard``, on every rank of the meshes, in the same order: it is a collective that
    compares the ranks' plans. With ``mesh=None`` (one process without a process group) the parameters stay plain and
    every call of this package works the same. An argument that the chosen mode does not need changes nothing there, so
    that one script runs on every mesh: what is about several ranks in one process, about replicas on a 1-D mesh, about
    the choice of owners under a strategy that does not choose.

    A model on the meta device stays there, and no rank ever holds more than its part of it: after ``fully_shard`` call
    ``model.to_empty(device=...)``, then initialise it (:mod:`.runtime.owned_dispatch` has what random numbers are) or
    load a checkpoint, then build the optimizer.

    Parameters that are DTensors already on another dimension of the same named mesh (``parallelize_module`` first, then
    this, then ``fully_shard``) are owned part by part, each over its own data-parallel ranks. In the forward the module
    holds a DTensor on that dimension again; the optimizer brings each matrix together there. Tensor parallelism alone
    has a data-parallel dimension of one rank.

    Args:
        model: The model; a selected parameter is replaced in its modules by an ``nn.Parameter`` of the same global
            shape whose values lie on its owner.
        mesh: 1-D mesh over the shard dimension, or ``None``.
        predicate: ``(name, param) -> bool``, with canonical names; true for matrices that Muon is to update, and for
            what else a policy gives a route.
            Parameters that do not require a gradient are left to FSDP2 even if it is true, and can then not be
            unfrozen later, since they would train with AdamW; freeze such a matrix after this call instead. Stacks of
            matrices ``(count, out, in)`` on the muon route, experts above all, get no owner: ``Muon`` updates them
            where they lie.
        compute_dtype: Dtype that weights are gathered and used in.
        reshard_after_forward: ``True`` frees whole weights after forward and gathers them again for backward (Z3);
            ``False`` keeps them until the end of backward (Z2).
        replicate_mesh: 1-D mesh over the replicate dimension of the same grid (HSDP). Owners are then chosen among all
            slots.
        hook_boundary_predicate: ``module -> bool``; hooks go on the lowest ancestor for which it is true.
        hook_boundary_strict: Whether a parameter without such an ancestor is an error, or its own module is hooked.
        hook_boundary_resolver: ``(name, param) -> module``; takes precedence.
        assignment_group_key_fn: ``(name, param) -> key``: parameters with equal keys are packed together when they are
            small and share the cap of ``max_owners_per_group``. The unit by default.
        max_owners_per_group: Most distinct owners of one group.
        owner_strategy: ``"lpt"``, ``"round_robin"`` or ``"rank0"``; ``DMUON_OWNER_STRATEGY`` when left out, else
            ``"lpt"``.
        owner_cost_model: ``"optimizer"`` or ``"numel"``; ``DMUON_OWNER_COST_MODEL`` when left out, else
            ``"optimizer"``.
        hsdp_column_balance: Balance shard columns before owners; ``DMUON_HSDP_COLUMN_BALANCE`` when left out, else
            true.
        pack_small_params: Give small parameters of a group one owner; ``DMUON_OWNER_PACK_SMALL_PARAMS`` when left out,
            else true.
        delay_stage2_to_optimizer: Under HSDP, wait for the replicate stage of all reductions at the end of backward
            (true), or for each one as soon as its shard stage is done (false).
        process_group_policy: ``"isolated"`` communicates on clones of the meshes' groups, ``"shared"`` on the groups
            themselves; ``DMUON_PROCESS_GROUP_POLICY`` when left out, else ``"isolated"``.
        matrix_spec_fn: ``(name, param) -> MatrixSpec | None``: how a stored tensor decomposes into logical matrices;
            ``None`` is one whole matrix.
        reduce_dtype: Dtype in which gradients travel to the owners and are accumulated under ``no_sync``, as in FSDP2's
            policy; fp32 by default. On gloo the owner adds them up in fp32 at least, NCCL adds in this dtype; the
            gradient that the optimizer reads has the dtype of the master.
        master_dtype: Dtype of what owners keep and update; the parameter's own by default.
        source_rank: Data-parallel rank whose values count, for models that only one rank has loaded; it sends each
            matrix to its owner, and the others may have theirs on meta. The owner's by default.
        param_policy: What is special about single parameters: ``{"defaults": {...}, "overrides": [{"name": tokens,
            "set": {...}}, ...]}`` with the fields of :class:`~dmuon_hf.core.policy.ParamPolicy`; an override holds for
            names that contain one of its tokens, and later ones win. With the route ``"adamw"`` parameters of any shape
            but scalars are owned and updated by their owner; with ``"sharded_adamw"`` they have no owner, and each rank
            keeps and updates a run of their rows, as under FSDP2 (:mod:`.runtime.row_shards`). In one process ``route``
            and ``optim_dtype`` alone change anything. Parameters of one hook boundary that differ in ``param_dtype`` or
            ``grad_dtype`` travel in collectives of their own.
        param_policy_fn: ``(name, param) -> fields``, in place of ``param_policy``.
        route_hint_fn: ``(name, param) -> route``, in place of either.
        replicate_broadcast_bucket_mb: Under HSDP, publish consecutive hook boundaries together while their weights
            fill no more than this many MiB on any rank: fewer and larger collectives, which start when the last of them
            is updated. 0 publishes each on its own.
        muon_forward_unshard: ``"broadcast"``: owners broadcast the weights of the muon route; ``"all_gather"``: after
            each update they are cut into even shards, from which each forward gathers them (:mod:`.runtime.shards`).
        tp_buffer_reuse: Which buffers of the exchange between tensor-parallel ranks ``step()`` keeps between batches
            and steps, in place of fresh ones: ``"gather"`` those of directions on the way to their workers,
            ``"scatter"`` those of updates on the way home, ``True`` or ``"all"`` both. Nothing is allocated for them
            after the first step; the largest of each, two of directions and one of updates, stay. Results are the same.

    Returns:
        Owner of each dedicated parameter that has one (the new objects): its rank in ``mesh``, or under HSDP
        ``(shard, replicate)``.

    Raises:
        ConfigurationError: Nothing is selected, a selected parameter is no matrix, is shared by two hook boundaries,
            is already distributed over the data-parallel ranks, has a hook of ``register_hook``, an argument is wrong,
            or ``reduce_dtype``, ``master_dtype`` or ``source_rank`` is given in one process.
        LockstepError: The ranks' plans differ, or under HSDP the values of a selected matrix do between replicas (with
            ``source_rank`` they need not be equal); the message names the first difference.
        NotImplementedError: A mode that is not built was asked for.
    """
    check_forward_unshard(muon_forward_unshard, "dedicate_params")
    told = policy_source(param_policy=param_policy, param_policy_fn=param_policy_fn, route_hint_fn=route_hint_fn)

    def policy_of(name: str, param: nn.Parameter) -> ParamPolicy:
        policy = told(name, param).with_unshard(muon_forward_unshard)
        if isinstance(param, DTensor) and policy.muon_forward_unshard is not None:
            raise NotImplementedError(
                f"{name} is tensor-parallel, and muon_forward_unshard='all_gather' is built for whole matrices: leave "
                "it at 'broadcast' for this one in a param_policy"
            )
        if isinstance(param, DTensor) and policy.route == SHARDED:
            raise NotImplementedError(
                f"{name} is tensor-parallel, and the route 'sharded_adamw' is built for whole parameters: give it "
                "'adamw', or leave it out of the predicate, so that fully_shard shards it"
            )
        return policy

    choice = OwnerChoice.of_arguments(
        owner_strategy,
        owner_cost_model,
        pack_small_params,
        max_owners_per_group,
        hsdp_column_balance=hsdp_column_balance,
    )
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        raise ConfigurationError(f"reduce_dtype must be a floating-point dtype, got {reduce_dtype}")
    if mesh is None:
        _refuse_without_effect(reduce_dtype=reduce_dtype, master_dtype=master_dtype, source_rank=source_rank)
    if runtime_of(model) is not None:
        raise ConfigurationError(
            "dedicate_params was already called on this model: select everything that is to be owned in one call"
        )

    def is_stack(name: str, param: nn.Parameter) -> bool:
        if param.ndim != 3 or policy_of(name, param).route != "muon":
            return False
        spec = None if matrix_spec_fn is None else matrix_spec_fn(name, param)
        return spec is None or not spec.folded

    stacks = stacks_of(model, predicate, is_stack, matrix_spec_fn)
    selection = select(
        model,
        lambda name, param: predicate(name, param) and not is_stack(name, param),
        matrix_spec_fn=matrix_spec_fn,
        group_key_fn=assignment_group_key_fn,
        policy_of=policy_of,
        boundaries=BoundaryRule(hook_boundary_predicate, hook_boundary_strict, hook_boundary_resolver),
        may_be_empty=bool(stacks),
    )
    targets = selection.targets
    topology = topology_of(model, mesh, replicate_mesh, process_group_policy, targets)
    context = DedicatedCommContext(
        topology.device,
        topology.replicate_group,
        tp_buffer_reuse=tp_buffer_reuse,
        replicate_broadcast_bucket_mb=replicate_broadcast_bucket_mb,
    )
    settings = {
        "compute_dtype": str(compute_dtype),
        "reduce_dtype": str(reduce_dtype),
        "master_dtype": str(master_dtype),
        "reshard_after_forward": reshard_after_forward,
        "replicate_broadcast_bucket_mb": replicate_broadcast_bucket_mb,
        "delay_stage2_to_optimizer": delay_stage2_to_optimizer,
        "on meta": deferred_names(targets, topology) if source_rank is None else None,
        **tensor_placements(targets, topology),
    }
    plan = agreed_plan(selection, topology, choice, settings)
    if topology.is_hsdp and source_rank is None:
        compare_values(targets, topology)
    options = RuntimeOptions(
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        master_dtype=master_dtype,
        reshard_after_forward=reshard_after_forward,
        delay_second_stage=delay_stage2_to_optimizer,
        source_rank=source_rank,
    )
    runtime = build_runtime(model, plan, targets, topology, context, options)
    runtime.left_frozen = selection.frozen
    runtime.stacks = stacks
    attach(model, runtime)
    watch_state_dicts(model)
    log_plan(plan, topology)
    return {param.param: param.owner_rank for param in runtime.dedicated.values() if not param.is_sharded}


def _refuse_without_effect(**given: object) -> None:
    """Refuse arguments of ours about several ranks in one process; those of the reference are taken on every mesh."""
    for name, value in given.items():
        if value is not None:
            raise ConfigurationError(
                f"dedicate_params({name}={value!r}) has no effect in one process without a mesh: leave it out"
            )
