"""From a plan to a running model: owned parameters into the modules, units onto their boundaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.plan import SHARDED, ParamEntry, Plan
from dmuon_hf.core.policy import ParamPolicy
from dmuon_hf.core.runtime.casting import register_casts
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.dedicated import DedicatedParam
from dmuon_hf.core.runtime.gradients import UnitGrads
from dmuon_hf.core.runtime.layout import PackedLayout
from dmuon_hf.core.runtime.owned_tensor import Origin, OwnedTensor
from dmuon_hf.core.runtime.placement import OwnerBroadcast, WeightPlacement
from dmuon_hf.core.runtime.publish import ColumnCopy, UnitContent, column_copies
from dmuon_hf.core.runtime.reduction import OwnerReduction, Reduction
from dmuon_hf.core.runtime.row_shards import RowGather, RowReduction
from dmuon_hf.core.runtime.runtime import Runtime
from dmuon_hf.core.runtime.shards import ShardGather
from dmuon_hf.core.runtime.tensor_part import TensorPart
from dmuon_hf.core.runtime.unit import Unit
from dmuon_hf.core.runtime.weights import UnitWeights

__all__ = ["RuntimeOptions", "Target", "build_runtime", "is_deferred"]


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter to be dedicated: the object, every ``(module, attribute)`` that holds it, boundary and policy."""

    param: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]
    boundary: nn.Module
    policy: ParamPolicy


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """How units move weights and gradients.

    Attributes:
        compute_dtype: Dtype of whole weights and of their wire; ``None`` is the parameter's own.
        reduce_dtype: Dtype in which gradients are accumulated and travel; ``None`` is fp32 at least.
        master_dtype: Dtype of what the owner keeps and updates; ``None`` is the parameter's own.
        reshard_after_forward: Free whole weights between forward and backward (Z3) or keep them (Z2).
        delay_second_stage: Let the replicate stage of the HSDP reduction run on until the end of the pass.
        source_rank: Data-parallel rank whose values count where the others hold none yet; ``None``: the owner's.
    """

    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    delay_second_stage: bool = True
    source_rank: int | None = None


def build_runtime(
    root: nn.Module,
    plan: Plan,
    targets: Mapping[str, Target],
    topology: Topology,
    context: DedicatedCommContext,
    options: RuntimeOptions,
) -> Runtime:
    """Install owned parameters, build the units and register their hooks. Every rank calls it with the same plan.

    Args:
        root: The model.
        plan: Entries in model order.
        targets: By entry name.
        topology: Where this rank stands.
        context: Of the model, not started.
        options: See :class:`RuntimeOptions`.
    """
    context.monitor.start(topology)
    if topology.is_distributed:
        _check_dtypes(plan, targets, options)
    if options.source_rank is not None and topology.size > 1:
        _check_source(options.source_rank, targets, topology)
    params = {entry.name: _dedicate(entry, targets[entry.name], topology, options) for entry in plan.entries}
    contents = _contents(plan, params, targets, topology, options) if topology.is_distributed else []
    published = [content for content in contents if not _has_no_copy(content, targets)]
    columns = column_copies(published, topology, context) if topology.is_hsdp else {}
    units = [
        _build_unit(content, index, targets, topology, context, columns.get(content.name), options)
        for index, content in enumerate(contents)
    ]
    runtime = Runtime(
        topology=topology,
        plan=plan,
        params=list(params.values()),
        units=units,
        context=context,
        delay_second_stage=options.delay_second_stage,
    )
    runtime.register_hooks(root)
    if topology.is_distributed:
        register_casts(
            {name: (target.policy, [module for module, _ in target.places]) for name, target in targets.items()}
        )
    return runtime


def _check_dtypes(plan: Plan, targets: Mapping[str, Target], options: RuntimeOptions) -> None:
    if options.compute_dtype is not None:
        return
    for unit in plan.units:
        entries = plan.unit_entries(unit)
        dtypes = {entry.dtype for entry in entries if targets[entry.name].policy.param_dtype is None}
        if len(dtypes) > 1:
            raise ConfigurationError(
                f"the parameters of unit {unit!r} have several dtypes {sorted(map(str, dtypes))} and travel in one "
                "buffer: pass compute_dtype to dedicate_params"
            )


def _check_source(source: int, targets: Mapping[str, Target], topology: Topology) -> None:
    """Refuse on every rank a source that has no values either. A collective."""
    if not 0 <= source < topology.size:
        raise ConfigurationError(f"source_rank={source} is not one of the {topology.size} data-parallel ranks")
    assert topology.data is not None
    mine = next((name for name, target in targets.items() if is_deferred(target.param, topology)), None)
    found = topology.data.broadcast_object(mine, source) if topology.data.talks else None
    if found is not None:
        raise ConfigurationError(
            f"{found} is on the meta device on rank {source} too, whose values source_rank asks for: load the model "
            "there, or leave source_rank out, and materialise the model after fully_shard"
        )


def _dedicate(entry: ParamEntry, target: Target, topology: Topology, options: RuntimeOptions) -> DedicatedParam:
    param = target.param
    part = TensorPart.of(param)
    if topology.mesh is not None and entry.route == SHARDED:
        dtype = target.policy.master_dtype or options.master_dtype or entry.dtype
        rows = _in_rows(entry, param, topology, options.source_rank, dtype)
        param = nn.Parameter(rows, requires_grad=target.param.requires_grad)
    elif topology.mesh is not None:
        owner = topology.flat_rank(entry.owner)
        dtype = target.policy.master_dtype or options.master_dtype or entry.dtype
        local = _initial_local(entry, param, owner, topology, options.source_rank, dtype)
        mesh, unowned = topology.mesh, None
        if part is not None:
            assert topology.tensor is not None
            mesh, unowned = topology.tensor.whole, {topology.mesh.ndim: part.placement}
        owned = OwnedTensor.from_local(
            local, mesh, owner=owner, shape=entry.shape, unowned=unowned, origin=Origin(entry.name, entry.unit)
        )
        param = nn.Parameter(owned, requires_grad=target.param.requires_grad)
    dedicated = DedicatedParam(
        name=entry.name,
        aliases=entry.aliases,
        param=param,
        places=target.places,
        spec=entry.spec,
        owner=entry.owner,
        unit=entry.unit,
        boundary=target.boundary,
        hsdp=topology.is_hsdp,
        route=entry.route,
        optim_dtype=target.policy.optim_dtype,
        part=part,
    )
    if param is not target.param:
        _carry_hooks(target.param, dedicated)
    dedicated.install(param)
    return dedicated


def _carry_hooks(original: nn.Parameter, dedicated: DedicatedParam) -> None:
    """Hooks of the original parameter run for the owned one; the handles that removed them there still do."""
    dedicated.refuse_tensor_hooks(original)
    if original._post_accumulate_grad_hooks:
        dedicated.param._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks


@torch.no_grad()
def _initial_local(
    entry: ParamEntry, param: nn.Parameter, owner: int, topology: Topology, source: int | None, dtype: torch.dtype
) -> Tensor:
    """What this rank keeps of a parameter: its part on the owner, no rows elsewhere; on meta if the model is."""
    is_owner = topology.slot == entry.owner
    here: Tensor = param._local_tensor if isinstance(param, DTensor) else param.detach()
    value: Tensor | None = here
    if source is not None and topology.size > 1:
        value = _moved_to_owner(here, entry.dtype, owner, topology, source)
    elif is_deferred(param, topology):
        rows = here.shape[0] if is_owner else 0
        return torch.empty((rows, *here.shape[1:]), dtype=dtype, device="meta")
    if not is_owner or value is None:
        return torch.empty((0, *here.shape[1:]), dtype=dtype, device=topology.device)
    value = value.to(device=topology.device, dtype=dtype).contiguous()
    shares_more = value.untyped_storage().nbytes() != value.numel() * value.element_size()
    return value.clone() if shares_more else value


@torch.no_grad()
def _in_rows(
    entry: ParamEntry, param: nn.Parameter, topology: Topology, source: int | None, dtype: torch.dtype
) -> OwnedTensor:
    """A parameter without an owner, of which this rank keeps some rows."""
    assert topology.mesh is not None
    placements: list[Placement] = [*[Replicate()] * (topology.mesh.ndim - 1), Shard(0)]
    shape, offset = compute_local_shape_and_global_offset(entry.shape, topology.mesh, placements)
    if source is None and is_deferred(param, topology):
        rows = torch.empty(shape, dtype=dtype, device="meta")
    else:
        value = param.detach() if source is None else _value_of_source(entry, param, topology, source)
        rows = value.narrow(0, offset[0], shape[0]).to(device=topology.device, dtype=dtype, copy=True).contiguous()
    origin = Origin(entry.name, entry.unit)
    return OwnedTensor.from_parts(rows, topology.mesh, placements, shape=entry.shape, origin=origin)


def _value_of_source(entry: ParamEntry, param: nn.Parameter, topology: Topology, source: int) -> Tensor:
    """The whole parameter of data-parallel rank ``source``, on every rank for a moment. Collective."""
    assert topology.data is not None
    if topology.flat_rank(topology.slot) == source:
        value = param.detach().to(topology.device).contiguous()
    else:
        value = torch.empty(entry.shape, dtype=entry.dtype, device=topology.device)
    if topology.data.talks:
        topology.data.broadcast(value.view(-1).view(torch.uint8), source)
    return value


def is_deferred(param: Tensor, topology: Topology) -> bool:
    """Whether a parameter has no values yet, on a mesh that computes: one of meta devices never has any."""
    return param.is_meta and topology.device.type != "meta"


def _moved_to_owner(value: Tensor, dtype: torch.dtype, owner: int, topology: Topology, source: int) -> Tensor | None:
    """The matrix of data-parallel rank ``source`` on its owner, ``None`` elsewhere. Collective."""
    assert topology.data is not None
    if topology.flat_rank(topology.slot) == source:
        outgoing = value.to(topology.device).contiguous().view(-1)
    else:
        outgoing = torch.empty(0, dtype=dtype, device=topology.device)
    moved = topology.data.move(outgoing, value.numel(), source, owner)
    return None if moved is None else moved.view(value.shape)


def _contents(
    plan: Plan,
    params: Mapping[str, DedicatedParam],
    targets: Mapping[str, Target],
    topology: Topology,
    options: RuntimeOptions,
) -> list[UnitContent]:
    """Layout, parameters and dtype of every unit, in plan order."""
    contents = []
    for name in plan.units:
        entries: Sequence[ParamEntry] = plan.unit_entries(name)
        layout = PackedLayout.build(
            [params[entry.name].gathered_shape for entry in entries],
            [entry.owner for entry in entries],
            shard_size=topology.shard_size,
            replicate_size=topology.replicate_size,
        )
        dtype = targets[entries[0].name].policy.param_dtype or options.compute_dtype or entries[0].dtype
        columns = Counter[int]()
        for entry in entries:
            columns[entry.owner[0]] += entry.numel * dtype.itemsize
        ordered = [params[entries[i].name] for i in layout.order]
        contents.append(UnitContent(name, layout, ordered, dtype, largest_column=max(columns.values())))
    return contents


def _has_no_copy(content: UnitContent, targets: Mapping[str, Target]) -> bool:
    """Whether the weights of a unit become whole otherwise than from the columns' copies under HSDP."""
    return content.params[0].is_sharded or _gathers_shards(content, targets)


def _gathers_shards(content: UnitContent, targets: Mapping[str, Target]) -> bool:
    return targets[content.params[0].name].policy.muon_forward_unshard == "all_gather"


def _build_unit(
    content: UnitContent,
    index: int,
    targets: Mapping[str, Target],
    topology: Topology,
    context: DedicatedCommContext,
    column: ColumnCopy | None,
    options: RuntimeOptions,
) -> Unit:
    name, layout, ordered, compute_dtype = content.name, content.layout, content.params, content.dtype
    target = targets[ordered[0].name]
    reduce_dtype = target.policy.grad_dtype or options.reduce_dtype or torch.promote_types(compute_dtype, torch.float32)
    placement, reduction = _strategies(content, targets, topology, context, column, reduce_dtype)
    weights = UnitWeights(
        name=name,
        params=ordered,
        layout=layout,
        topology=topology,
        context=context,
        placement=placement,
        compute_dtype=compute_dtype,
    )
    grads = UnitGrads(
        name=name,
        params=ordered,
        unsharded=weights.unsharded,
        context=context,
        reduction=reduction,
        reduce_dtype=reduce_dtype,
    )
    return Unit(
        name=name,
        index=index,
        module=target.boundary,
        params=ordered,
        layout=layout,
        weights=weights,
        grads=grads,
        reshard_after_forward=options.reshard_after_forward,
    )


def _strategies(
    content: UnitContent,
    targets: Mapping[str, Target],
    topology: Topology,
    context: DedicatedCommContext,
    column: ColumnCopy | None,
    reduce_dtype: torch.dtype,
) -> tuple[WeightPlacement, Reduction]:
    """How the weights of a unit become whole, and how its gradients get home."""
    layout, params = content.layout, content.params
    if params[0].is_sharded:
        return RowGather(params[0], topology, context), RowReduction(params[0], topology, context, reduce_dtype)
    reduction = OwnerReduction(layout=layout, topology=topology, context=context, dtype=reduce_dtype)
    if _gathers_shards(content, targets):
        return ShardGather(content, topology, context), reduction
    return OwnerBroadcast(layout=layout, params=params, topology=topology, context=context, column=column), reduction
