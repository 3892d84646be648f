"""``replicate``: the gradients of what has no owner, averaged at the end of every backward pass."""

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
from dmuon_hf.core.replicated.setup import average_dtype, broadcast_from_first
from dmuon_hf.core.runtime.runtime import Runtime, attached, require_runtime, runtime_of

__all__ = ["ReplicatedGroup", "get_replicated_group", "replicate"]

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
    if mesh.ndim != 1:
        raise ConfigurationError(f"replicate takes a 1-D mesh over all data-parallel ranks, got {mesh.ndim}-D")
    runtime = require_runtime(model)
    _check(model, mesh, runtime)
    owned = {id(param.param) for param in runtime.dedicated.values()}
    rest = {canonical_name(name, model): param for name, param in model.named_parameters() if id(param) not in owned}
    sharded = next((name for name, param in rest.items() if isinstance(param, DTensor)), None)
    if sharded is not None:
        raise ConfigurationError(
            f"{sharded} is a DTensor, which fully_shard or tensor parallelism synchronises already: replicate is for "
            "models that nobody has sharded"
        )
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


def _check(model: nn.Module, mesh: DeviceMesh, runtime: Runtime) -> None:
    if get_replicated_group(model) is not None:
        raise ConfigurationError("replicate was already called on this model: call it once")
    if runtime.averaging is not None and runtime.averaging.wrappers:
        raise ConfigurationError(
            "DistributedDataParallel wraps this model and averages these gradients already: use one of the two"
        )
    ranks = mesh.mesh.flatten().tolist()
    if runtime.topology.ranks != ranks or runtime.topology.is_hsdp:
        raise ConfigurationError(
            f"replicate got a mesh of the ranks {ranks}, but the owners are spread over {runtime.topology.ranks}: pass "
            "the 1-D mesh of dedicate_params_ddp"
        )
    assert runtime_of(model) is runtime


def _parts(params: dict[str, nn.Parameter]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Parameters of one dtype in buckets, the last ones of the model first: backward comes to them first."""
    by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, param in reversed(params.items()):
        by_dtype.setdefault(param.dtype, []).append((name, param))
    for alike in by_dtype.values():
        part: list[tuple[str, nn.Parameter]] = []
        size = 0
        for name, param in alike:
            if part and size + param.nbytes > _BUCKET_BYTES:
                yield part
                part, size = [], 0
            part.append((name, param))
            size += param.nbytes
        if part:
            yield part
