"""``replicate`` and ``replicate_tp``: gradients of what has no owner, averaged at the end of every backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import canonical_name
from dmuon_hf.core.replicated.averaging import GradientAveraging
from dmuon_hf.core.replicated.bucket import GradBucket
from dmuon_hf.core.replicated.build import average_dtype, broadcast_from_first
from dmuon_hf.core.replicated.parts import part_of
from dmuon_hf.core.runtime.runtime import Runtime, attached, require_runtime, runtime_of

__all__ = ["ReplicatedGroup", "get_replicated_group", "replicate", "replicate_tp"]

_ATTRIBUTE: Final = "_dmuon_replicated_group"
_BUCKET_BYTES: Final = 25 * 2**20


class ReplicatedGroup:
    """What :func:`replicate` manages on one model.

    Attributes:
        mesh: The data-parallel ranks.
        buckets: What travels together, in the order in which it leaves.
    """

    def __init__(self, mesh: DeviceMesh, buckets: Sequence[GradBucket]) -> None:
        self.mesh = mesh
        self.buckets = tuple(buckets)

    def __deepcopy__(self, memo: object) -> None:
        """A deep copy of the model is a plain one."""
        return

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters by canonical name."""
        return {name: param for bucket in self.buckets for name, param in bucket.params}


def replicate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Average the gradients of every parameter without an owner over all data-parallel ranks.

    What ``DistributedDataParallel`` does, without a wrapper: hooks note which gradients have arrived, and the end of
    backward sends all of them, in buckets of 25 MiB, in fp32 at least. ``dmuon.no_sync`` accumulates. Parameters start
    as the first rank has them; buffers do, too, and are each rank's own from then on.

    Every rank calls it, after ``dedicate_params_ddp`` (or ``dedicate_params``, where ``fully_shard`` is the usual way),
    whose parameters it leaves alone.

    Args:
        model: The model that was dedicated.
        mesh: 1-D mesh over the same ranks.

    Returns:
        ``model`` itself.

    Raises:
        ConfigurationError: A ``ValueError`` for a mesh that is not 1-D or has other ranks; a ``RuntimeError`` for a
            model without dedicated parameters, with DTensors of FSDP2 or tensor parallelism, inside of
            ``DistributedDataParallel``, or replicated already.
    """
    runtime = _runtime_for(model, mesh, "replicate")
    rest = _without_owner(model, runtime)
    sharded = next((name for name, param in rest.items() if isinstance(param, DTensor)), None)
    if sharded is not None:
        raise ConfigurationError(
            f"{sharded} is a DTensor, and replicate is for models that nobody has sharded: after parallelize_module "
            "call replicate_tp, and neither after fully_shard, which synchronises what it has sharded"
        )
    return _average(model, mesh, runtime, rest)


def replicate_tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """:func:`replicate` after ``dedicate_params_ddp_tp``: parameters may be DTensors on the tensor-parallel axis.

    Each data-parallel rank averages its part of a gradient with those of its replicas; partial sums over the axis, as
    of a norm's weight under sequence parallelism, are added up there first. Parameters that are whole on every rank of
    the axis are averaged too.

    Every rank calls it.

    Args:
        model: The model that was dedicated.
        mesh: The 1-D mesh that it was dedicated over.

    Returns:
        ``model`` itself.

    Raises:
        ConfigurationError: As for :func:`replicate`, or a DTensor lies on another dimension than the tensor-parallel
            one, on a data-parallel dimension above all.
    """
    runtime = _runtime_for(model, mesh, "replicate_tp")
    rest = _without_owner(model, runtime)
    axis = runtime.topology.tensor
    for name, param in rest.items():
        if isinstance(param, DTensor) and (axis is None or param.device_mesh != axis.mesh):
            raise ConfigurationError(
                f"{name} is a DTensor on a mesh of the ranks {param.device_mesh.mesh.flatten().tolist()}, which is not "
                "the tensor-parallel axis of dedicate_params_ddp_tp(): fully_shard synchronises what it has sharded, "
                "and replicate_tp is for models that it was not called on"
            )
    return _average(model, mesh, runtime, rest)


def _without_owner(model: nn.Module, runtime: Runtime) -> dict[str, nn.Parameter]:
    owned = {id(param.param) for param in runtime.dedicated.values()}
    return {canonical_name(name, model): param for name, param in model.named_parameters() if id(param) not in owned}


def _average(model: nn.Module, mesh: DeviceMesh, runtime: Runtime, rest: dict[str, nn.Parameter]) -> nn.Module:
    assert runtime.topology.shard_group is not None
    buckets = [
        GradBucket(
            f"replicated parameters, part {index}",
            members,
            group=runtime.topology.shard_group,
            context=runtime.context,
            dtype=average_dtype(param for _, param in members),
        )
        for index, members in enumerate(_parts(rest))
    ]
    broadcast_from_first([*rest.values(), *model.buffers()], runtime.topology)
    if runtime.averaging is None:
        runtime.averaging = GradientAveraging(model)
    runtime.averaging.add(buckets, late=True)
    model.__dict__[_ATTRIBUTE] = ReplicatedGroup(mesh, buckets)
    return model


def get_replicated_group(model: nn.Module) -> ReplicatedGroup | None:
    """What ``replicate`` manages on a model, also through wrappers; ``None`` where it was not called."""
    return attached(model, _ATTRIBUTE, ReplicatedGroup)


def _runtime_for(model: nn.Module, mesh: DeviceMesh, function: str) -> Runtime:
    """The runtime of a model that ``function`` may be called on."""
    if mesh.ndim != 1:
        raise ConfigurationError(f"{function} takes a 1-D mesh over all data-parallel ranks, got {mesh.ndim}-D")
    runtime = require_runtime(model)
    if get_replicated_group(model) is not None:
        raise ConfigurationError("replicate or replicate_tp was already called on this model: call it once")
    if runtime.averaging is not None and runtime.averaging.wrappers:
        raise ConfigurationError(
            "DistributedDataParallel wraps this model and averages these gradients already: use one of the two"
        )
    ranks = mesh.mesh.flatten().tolist()
    data = runtime.topology.data
    owners = [] if data is None else list(data.ranks)
    if owners != ranks or runtime.topology.is_hsdp:
        raise ConfigurationError(
            f"{function} got a mesh of the ranks {ranks}, but the owners are spread over {owners}: pass the 1-D mesh "
            "of dedicate_params_ddp, or dedicate_params_ddp_tp"
        )
    assert runtime_of(model) is runtime
    return runtime


def _parts(params: dict[str, nn.Parameter]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Parameters of one dtype in buckets, the last ones of the model first: backward comes to them first."""
    by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, param in reversed(params.items()):
        by_dtype.setdefault(param.dtype, []).append((name, param))
    for alike in by_dtype.values():
        part: list[tuple[str, nn.Parameter]] = []
        size = 0
        for name, param in alike:
            nbytes = part_of(param).nbytes
            if part and size + nbytes > _BUCKET_BYTES:
                yield part
                part, size = [], 0
            part.append((name, param))
            size += nbytes
        if part:
            yield part
