"""From a plan to replicated matrices: their averaging, their publish, and where their values come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.plan import ParamEntry, Plan
from dmuon_hf.core.replicated.averaging import GradientAveraging
from dmuon_hf.core.replicated.bucket import GradBucket, bucket_name
from dmuon_hf.core.replicated.params import ReplicatedParam
from dmuon_hf.core.replicated.parts import part_of
from dmuon_hf.core.replicated.publish import UnitPublish
from dmuon_hf.core.replicated.runtime import ReplicatedRuntime
from dmuon_hf.core.runtime.build import Target
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.dedicated import without_values
from dmuon_hf.core.runtime.tensor_part import TensorPart

__all__ = ["average_dtype", "broadcast_from_first", "build_replicated"]


def build_replicated(
    model: nn.Module,
    plan: Plan,
    targets: Mapping[str, Target],
    topology: Topology,
    context: DedicatedCommContext,
    dtype: torch.dtype | None,
) -> ReplicatedRuntime:
    """Give every rank the values of the first one, and register what averages and publishes. Collective.

    Args:
        model: The model.
        plan: Entries in model order.
        targets: By entry name.
        topology: Where this rank stands.
        context: Streams of the model's runtime.
        dtype: Dtype in which gradients travel; ``None``: fp32 at least.
    """
    context.monitor.start(topology)
    assert topology.shard_group is not None
    params = {entry.name: _replicated(entry, targets[entry.name], topology) for entry in plan.entries}
    broadcast_from_first([param.param for param in params.values()], topology)
    averaging = GradientAveraging(model)
    publishes = []
    for name in reversed(plan.units):
        members = [params[entry.name] for entry in plan.unit_entries(name)]
        bucket = GradBucket(
            bucket_name(name),
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


def _replicated(entry: ParamEntry, target: Target, topology: Topology) -> ReplicatedParam:
    if target.param.is_meta and topology.device.type != "meta":
        raise without_values(entry.name, topology.device)
    part = TensorPart.of(target.param)
    mesh = topology.mesh
    if part is not None:
        assert topology.tensor is not None
        mesh = topology.tensor.whole
    assert mesh is not None
    return ReplicatedParam(
        mesh=mesh,
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
        part=part,
    )


def average_dtype(params: Iterable[Tensor]) -> torch.dtype:
    """Dtype in which the gradients of some parameters are added up: fp32, or that of the widest."""
    dtype = torch.float32
    for param in params:
        dtype = torch.promote_types(dtype, param.dtype)
    return dtype


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], topology: Topology) -> None:
    """Give every rank the values of the first one, in place, as ``DistributedDataParallel`` does. Collective.

    Each part of a DTensor comes from the first data-parallel rank that has it, what is whole from the first of all.
    """
    if topology.grid is None or not topology.grid.talks:
        return
    assert topology.data is not None
    for tensor in tensors:
        part = part_of(tensor)
        value = part.to(topology.device, copy=True).contiguous().view(-1)
        group = topology.data if isinstance(tensor, DTensor) else topology.grid
        if group.talks and value.numel():
            # Bytes: not every backend knows every dtype.
            group.broadcast(value.view(torch.uint8), 0)
            part.copy_(value.view(part.shape))
