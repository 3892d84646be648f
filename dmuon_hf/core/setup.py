"""``dedicate_params``: choose owners, install owned parameters, attach the runtime."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon_hf.core.errors import ConfigurationError, LockstepError
from dmuon_hf.core.hook_boundaries import HookBoundaryResolver, boundary_of
from dmuon_hf.core.mesh import Topology, check_policy, local_topology, topology_from_meshes
from dmuon_hf.core.plan import Candidate, MatrixSpec, Plan, canonical_name, make_plan
from dmuon_hf.core.policy import ParamPolicy, ParamPolicyFn, RouteHintFn, check_forward_unshard, policy_source
from dmuon_hf.core.runtime.build import RuntimeOptions, Target, build_runtime, is_deferred
from dmuon_hf.core.runtime.replica_check import bit_sum, first_unequal_replica, unequal_start
from dmuon_hf.core.runtime.runtime import attach, runtime_of
from dmuon_hf.core.runtime.state_dict_shim import watch_state_dicts
from dmuon_hf.core.runtime.tensor_part import TensorPart
from dmuon_hf.core.tensor_mesh import tensor_mesh_of

__all__ = [
    "MatrixSpecFn",
    "Predicate",
    "compare_plans",
    "dedicate_params",
    "log_plan",
    "policies_text",
    "refuse_unbuilt",
    "select",
    "setting",
    "switch",
    "topology_of",
]

logger = logging.getLogger(__name__)

Predicate = Callable[[str, nn.Parameter], bool]
MatrixSpecFn = Callable[[str, nn.Parameter], "MatrixSpec | None"]
AssignmentGroupKeyFn = Callable[[str, nn.Parameter], Hashable]


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
            but scalars are owned and updated by their owner; ``"sharded_adamw"`` is not built. In one process
            ``route`` and ``optim_dtype`` alone change anything. Parameters of one hook boundary that differ in
            ``param_dtype`` or ``grad_dtype`` travel in collectives of their own.
        param_policy_fn: ``(name, param) -> fields``, in place of ``param_policy``.
        route_hint_fn: ``(name, param) -> route``, in place of either.
        replicate_broadcast_bucket_mb: Under HSDP, publish consecutive hook boundaries together while their weights
            fill no more than this many MiB on any rank: fewer and larger collectives, which start when the last of them
            is updated. 0 publishes each on its own.
        muon_forward_unshard: ``"broadcast"``: owners broadcast the weights of the muon route; ``"all_gather"``: after
            each update they are cut into even shards, from which each forward gathers them (:mod:`.runtime.shards`).
        tp_buffer_reuse:
            Belong to modes that are not built; other values than the defaults raise ``NotImplementedError``.

    Returns:
        Owner of each dedicated parameter (the new objects): its rank in ``mesh``, or ``(shard, replicate)`` under HSDP.

    Raises:
        ConfigurationError: Nothing is selected, a selected parameter is no matrix, is shared by two hook boundaries,
            is already distributed over the data-parallel ranks, has a hook of ``register_hook``, an argument is wrong,
            or ``reduce_dtype``, ``master_dtype`` or ``source_rank`` is given in one process.
        LockstepError: The ranks' plans differ, or under HSDP the values of a selected matrix do between replicas (with
            ``source_rank`` they need not be equal); the message names the first difference.
        NotImplementedError: A mode that is not built was asked for.
    """
    refuse_unbuilt(
        tp_buffer_reuse=(tp_buffer_reuse, False),
    )
    check_forward_unshard(muon_forward_unshard, "dedicate_params")
    told = policy_source(param_policy=param_policy, param_policy_fn=param_policy_fn, route_hint_fn=route_hint_fn)

    def policy_of(name: str, param: nn.Parameter) -> ParamPolicy:
        policy = told(name, param).with_unshard(muon_forward_unshard)
        if isinstance(param, DTensor) and policy.muon_forward_unshard is not None:
            raise NotImplementedError(
                f"{name} is tensor-parallel, and muon_forward_unshard='all_gather' is built for whole matrices: leave "
                "it at 'broadcast' for this one in a param_policy"
            )
        return policy

    strategy = setting(owner_strategy, "DMUON_OWNER_STRATEGY", "lpt")
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        raise ConfigurationError(f"reduce_dtype must be a floating-point dtype, got {reduce_dtype}")
    if not replicate_broadcast_bucket_mb >= 0.0:
        raise ConfigurationError(
            f"replicate_broadcast_bucket_mb must be 0 or more MiB, got {replicate_broadcast_bucket_mb!r}"
        )
    if mesh is None:
        _refuse_without_effect(reduce_dtype=reduce_dtype, master_dtype=master_dtype, source_rank=source_rank)
    if runtime_of(model) is not None:
        raise ConfigurationError(
            "dedicate_params was already called on this model: select everything that is to be owned in one call"
        )

    def is_stack(name: str, param: nn.Parameter) -> bool:
        return param.ndim == 3 and policy_of(name, param).route == "muon"

    stacks = _stacks(model, predicate, is_stack, matrix_spec_fn)
    targets, candidates, frozen = select(
        model,
        lambda name, param: predicate(name, param) and not is_stack(name, param),
        matrix_spec_fn=matrix_spec_fn,
        group_key_fn=assignment_group_key_fn,
        policy_of=policy_of,
        boundary=lambda name, param: boundary_of(
            model,
            name,
            param,
            predicate=hook_boundary_predicate,
            strict=hook_boundary_strict,
            resolver=hook_boundary_resolver,
        ),
    )
    topology = topology_of(model, mesh, replicate_mesh, process_group_policy, targets)
    plan = make_plan(
        candidates,
        units=list(dict.fromkeys(candidate.unit for candidate in candidates)),
        shard_size=topology.shard_size,
        replicate_size=topology.replicate_size,
        owner_strategy=strategy,  # type: ignore[arg-type]
        owner_cost_model=setting(owner_cost_model, "DMUON_OWNER_COST_MODEL", "optimizer"),  # type: ignore[arg-type]
        hsdp_column_balance=switch(hsdp_column_balance, "DMUON_HSDP_COLUMN_BALANCE"),
        pack_small_params=switch(pack_small_params, "DMUON_OWNER_PACK_SMALL_PARAMS"),
        max_owners_per_group=max_owners_per_group,
        settings={
            "compute_dtype": str(compute_dtype),
            "reduce_dtype": str(reduce_dtype),
            "master_dtype": str(master_dtype),
            "reshard_after_forward": reshard_after_forward,
            "replicate_broadcast_bucket_mb": replicate_broadcast_bucket_mb,
            "delay_stage2_to_optimizer": delay_stage2_to_optimizer,
            "on meta": _deferred(targets, topology) if source_rank is None else None,
            "policies": policies_text(targets),
            **_tensor_placements(targets, topology),
        },
    )
    compare_plans(plan, topology)
    if topology.is_hsdp and source_rank is None:
        _compare_values(targets, topology)
    options = RuntimeOptions(
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        master_dtype=master_dtype,
        reshard_after_forward=reshard_after_forward,
        publish_bucket_bytes=replicate_broadcast_bucket_mb * 2**20,
        delay_second_stage=delay_stage2_to_optimizer,
        source_rank=source_rank,
    )
    runtime = build_runtime(model, plan, targets, topology, options)
    runtime.left_frozen = frozen
    runtime.stacks = stacks
    attach(model, runtime)
    watch_state_dicts(model)
    log_plan(plan, topology)
    return {param.param: param.owner_rank for param in runtime.dedicated.values()}


def policies_text(targets: Mapping[str, Target]) -> str:
    """What the policies say about each parameter, for a plan, which the ranks compare."""
    return json.dumps({name: told for name, target in targets.items() if (told := target.policy.described())})


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


def refuse_unbuilt(**arguments: tuple[object, object]) -> None:
    """Refuse arguments, each with its default, of modes that are not built."""
    for name, (value, default) in arguments.items():
        if value != default:
            raise NotImplementedError(
                f"dedicate_params({name}=...) belongs to a mode that is not built: leave it at {default!r}"
            )


def _refuse_without_effect(**given: object) -> None:
    """Refuse arguments of ours about several ranks in one process; those of the reference are taken on every mesh."""
    for name, value in given.items():
        if value is not None:
            raise ConfigurationError(
                f"dedicate_params({name}={value!r}) has no effect in one process without a mesh: leave it out"
            )


def _stacks(
    model: nn.Module, predicate: Predicate, is_stack: Predicate, matrix_spec_fn: MatrixSpecFn | None
) -> dict[str, MatrixSpec]:
    """Stacks of matrices among what is selected, by name, and what each of their members decomposes into."""
    stacks: dict[str, MatrixSpec] = {}
    others = False
    for raw, param in model.named_parameters():
        name = canonical_name(raw, model)
        if not param.requires_grad or not predicate(name, param):
            continue
        if not is_stack(name, param):
            others = True
            continue
        spec = (matrix_spec_fn(name, param) if matrix_spec_fn is not None else None) or MatrixSpec()
        try:
            spec.validate(param.shape[1:])
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}, a stack of {param.shape[0]} matrices: {error}") from error
        stacks[name] = spec
    if stacks and not others:
        raise ConfigurationError(
            f"dedicate_params selected nothing but stacks of matrices, such as {next(iter(stacks))}, which get no "
            "owner and stay where fully_shard puts them: leave dedicate_params out, and select them in "
            "Muon(predicate=...)"
        )
    return stacks


def select(
    model: nn.Module,
    predicate: Predicate,
    *,
    matrix_spec_fn: MatrixSpecFn | None,
    group_key_fn: AssignmentGroupKeyFn | None,
    policy_of: Callable[[str, nn.Parameter], ParamPolicy],
    boundary: Callable[[str, nn.Parameter], nn.Module],
) -> tuple[dict[str, Target], list[Candidate], frozenset[str]]:
    """What the predicate selects, in model order, and the names of what is frozen; units are named by their module."""
    places: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{attribute}" if path else attribute
            places.setdefault(param, []).append((name, module, attribute))
    paths = {module: path for path, module in model.named_modules()}

    targets: dict[str, Target] = {}
    candidates: list[Candidate] = []
    kinds: dict[str, list[tuple[str, ...]]] = {}
    frozen: set[str] = set()
    for param, holders in places.items():
        raw = [name for name, _, _ in holders]
        names = [canonical_name(name, model) for name in raw]
        if not any(predicate(name, param) for name in names):
            continue
        if not param.requires_grad:
            frozen.update(names)
            continue
        _check_param(names[0], param)
        boundaries = {boundary(name, param) for name in raw}
        if len(boundaries) > 1:
            raise ConfigurationError(
                f"{names[0]} is shared by the hook boundaries {sorted(paths[b] for b in boundaries)}: exclude it in "
                "the predicate, or pass a hook_boundary_resolver that gives one module containing every use"
            )
        module = boundaries.pop()
        policy = policy_of(names[0], param)
        held = tuple((owner, attribute) for _, owner, attribute in holders)
        targets[names[0]] = Target(param, held, module, policy)
        path = canonical_name(paths[module], model) or "(root)"
        spec = matrix_spec_fn(names[0], param) if matrix_spec_fn is not None and param.ndim > 1 else None
        candidates.append(
            Candidate(
                name=names[0],
                aliases=tuple(names[1:]),
                shape=tuple(param.shape),
                dtype=param.dtype,
                spec=spec or MatrixSpec(),
                unit=_unit_name(path, policy, kinds.setdefault(path, [])),
                group=None if group_key_fn is None else repr(group_key_fn(names[0], param)),
                route=policy.route,
            )
        )
    if not candidates:
        raise ConfigurationError(
            "dedicate_params selected no parameter that requires a gradient"
            + (f" ({len(frozen)} selected ones are frozen)" if frozen else "")
            + ": without a single Muon matrix this would train with AdamW alone. Widen the predicate; names look like "
            + ", ".join(names for names in list(dict.fromkeys(n for h in places.values() for n, _, _ in h))[:3])
        )
    if frozen:
        logger.info("dedicate_params: %d selected parameters are frozen and stay with FSDP2", len(frozen))
    return targets, candidates, frozenset(frozen)


def _unit_name(path: str, policy: ParamPolicy, kinds: list[tuple[str, ...]]) -> str:
    """Name of the unit of a parameter: its boundary, and for each further kind of travel there what that is."""
    key = policy.unit_key
    if key not in kinds:
        kinds.append(key)
    return path if key == kinds[0] else f"{path} ({', '.join(key) or 'as the others'})"


def _check_param(name: str, param: nn.Parameter) -> None:
    if param.ndim == 0:
        raise ConfigurationError(f"{name} is a scalar, which has no owner: leave it out of the predicate")
    if not param.is_floating_point():
        raise ConfigurationError(f"{name} has dtype {param.dtype}: only floating-point matrices can be dedicated")


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
            f"{dist.get_world_size()} ranks: pass init_device_mesh(device, (world_size,))"
        )
    check_policy(policy)
    return local_topology(next(model.parameters()).device)


def _tensor_placements(targets: Mapping[str, Target], topology: Topology) -> dict[str, str]:
    """How each parameter lies on the tensor-parallel axis, for the plan; nothing without one."""
    if topology.tensor is None:
        return {}
    parts = {name: TensorPart.of(target.param) for name, target in targets.items()}
    listed = ", ".join(f"{name}: {part.placement}" for name, part in parts.items() if part is not None)
    return {"tensor-parallel": f"{topology.tensor.size} ranks, {listed}"}


def _deferred(targets: Mapping[str, Target], topology: Topology) -> str:
    """The parameters that have no values yet: the same ones on every rank, which a plan compares."""
    return ", ".join(name for name, target in targets.items() if is_deferred(target.param, topology))


@torch.no_grad()
def _compare_values(targets: Mapping[str, Target], topology: Topology) -> None:
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


def compare_plans(plan: Plan, topology: Topology) -> None:
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


def setting(value: str | None, variable: str, default: str) -> str:
    """An argument, or the environment's value where it was left out, or the default."""
    return value if value is not None else os.environ.get(variable, default)


def switch(value: bool | None, variable: str) -> bool:
    """As :func:`setting`, of two values; true by default."""
    if value is not None:
        return value
    text = os.environ.get(variable, "1").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ConfigurationError(f"{variable} must be 0 or 1, got {text!r}")
