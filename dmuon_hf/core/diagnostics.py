"""Rank-local, JSON-friendly summaries of routing and communication. Nothing here communicates."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from dmuon_hf.core.plan import canonical_name
from dmuon_hf.core.runtime import require_runtime, runtime_of
from dmuon_hf.core.runtime.comm_groups import CommGroup
from dmuon_hf.core.runtime.forward_profile import empty_profile

__all__ = ["collect_forward_unshard_profile", "summarize_comm_plan", "summarize_param_groups"]


def summarize_param_groups(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """How :class:`Muon` routed the trainable parameters over its groups.

    Counts are global unless the key says ``local``. Any rank may call it. Matrices that stay where they are count as
    ``sharded``; on them the model needs no dedicated parameters.

    Raises:
        ConfigurationError: The model has no dedicated parameters, and the optimizer no matrices of its own.
    """
    sharded = {
        id(param)
        for source in getattr(optimizer, "sources", ())
        if source.route == "sharded_muon"
        for param in source.params.values()
    }
    runtime = runtime_of(model) if sharded else require_runtime(model)
    dedicated = () if runtime is None else tuple(runtime.dedicated.values())
    names = {id(param): canonical_name(name, model) for name, param in model.named_parameters()}
    owned = {id(param.param) for param in dedicated if param.is_owner and not param.is_sharded}
    groups = []
    for group in optimizer.param_groups:
        params = group["params"]
        groups.append(
            {
                "group_name": group.get("group_name"),
                "route": group.get("route"),
                "lr": float(group["lr"]),
                "weight_decay": float(group.get("weight_decay", 0.0)),
                "params": len(params),
                "numel": sum(param.numel() for param in params),
                "local_owned_params": sum(id(param) in owned for param in params),
                "sharded_params": sum(id(param) in sharded for param in params),
                "dtypes": sorted({str(param.dtype) for param in params}),
                "names": [names.get(id(param), "(not in the model)") for param in params],
            }
        )
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    return {
        "dedicated_params": len(dedicated),
        "dedicated_numel": sum(param.numel for param in dedicated),
        "logical_matrices": 0 if runtime is None else sum(len(entry.logical_shapes) for entry in runtime.plan.entries),
        "local_owned_params": len(owned),
        "sharded_params": len(sharded),
        "frozen_params": len(frozen),
        "groups": groups,
    }


def collect_forward_unshard_profile(
    model: nn.Module, *, clear: bool = True, synchronize: bool = False
) -> dict[str, object]:
    """What the gathers of forward have cost this rank since the last collection. Any rank may call it.

    Recorded where ``DMUON_RECORD_FORWARD_PROFILE=1`` was set when ``dedicate_params`` was called.

    Args:
        model: A model that ``dedicate_params`` was called on.
        clear: Begin anew afterwards.
        synchronize: Wait for the device first, so that every timing is complete; timings that are not are left for the
            next collection.

    Returns:
        ``enabled``, totals ``gathers``, ``bytes``, ``waits``, ``gather_ms`` (from issue to end) and ``wait_ms`` (what
        forward stood still for), and the same by hook boundary in ``groups``.

    Raises:
        ConfigurationError: The model has no dedicated parameters.
    """
    profile = require_runtime(model).context.forward_profile
    return empty_profile() if profile is None else profile.collect(clear=clear, synchronize=synchronize)


def summarize_comm_plan(model: nn.Module, *, max_groups: int = 64, max_params_per_group: int = 128) -> dict[str, Any]:
    """The planned collectives: groups in order, the bucket of every owner, payloads in bytes. Any rank may call it.

    Under replication nothing is gathered: ``reduce_bytes`` are those of the averages of gradients, which ``replicate``
    has for parameters without an owner too, and ``publish_bytes`` those of updated matrices. What
    ``DistributedDataParallel`` and ``fully_shard`` send is not in it, nor what a tensor-parallel axis exchanges.

    Args:
        model: A model that ``dedicate_params`` was called on.
        max_groups: Groups listed at most; totals count all.
        max_params_per_group: Parameters listed per group at most.

    Raises:
        ConfigurationError: The model has no dedicated parameters.
    """
    runtime = require_runtime(model)
    topology, plan, groups = runtime.topology, runtime.plan, runtime.comm_groups
    return {
        "shard_size": topology.shard_size,
        "replicate_size": topology.replicate_size,
        "plan_digest": plan.digest(),
        "loads": plan.loads(),
        "imbalance": plan.imbalance(),
        "num_groups": len(groups) or len(plan.units),
        "gather_bytes": sum(group.gather_bytes for group in groups),
        "reduce_bytes": sum(group.reduce_bytes for group in groups),
        "publish_bytes": sum(group.publish_bytes for group in groups),
        "groups": [_summarized(group, max_params_per_group) for group in groups[:max_groups]],
        "groups_left_out": max(0, len(groups) - max_groups),
    }


def _summarized(group: CommGroup, max_params: int) -> dict[str, Any]:
    return {
        "name": group.name,
        "route": "+".join(sorted({param.route for param in group.params})),
        "reshard_after_forward": group.reshard_after_forward,
        "gather_bytes": group.gather_bytes,
        "reduce_bytes": group.reduce_bytes,
        "publish_bytes": group.publish_bytes,
        "buckets": [
            {"shard": shard, "replicate": replicate, "bytes": nbytes}
            for (shard, replicate), nbytes in group.buckets.items()
        ],
        "params": [
            {"name": param.name, "shape": list(param.shape), "owner": param.owner, "route": param.route}
            for param in group.params[:max_params]
        ],
        "params_left_out": max(0, len(group.params) - max_params),
    }
