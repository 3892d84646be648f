"""Clipping of independent gradient segments, each with its own norm and coefficient, in torch's multi-tensor kernels.

There is no compiled extension: ``torch._foreach_norm`` and ``torch._foreach_mul_`` are native multi-tensor kernels on
CUDA, and their semantics are the same on every device. The results say so in ``fastpath`` and ``fallback_reason``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim.clip_global import muon_optimizer
from dmuon_hf.core.optim.gradients import local_tensor
from dmuon_hf.core.optim.norms import clip_coefficient, norm_power, root_of_power, scale_
from dmuon_hf.core.runtime.collectives import uses_nccl

__all__ = [
    "GradClipBucket",
    "GradClipBucketStats",
    "SegmentedGradClipResult",
    "clip_grad_norm_buckets_",
    "try_clip_optimizer_grad_norm_buckets_",
]

_NO_EXTENSION: Final = "there is no compiled extension: torch's multi-tensor kernels were used"


@dataclass(frozen=True, slots=True)
class GradClipBucket:
    """One independently clipped segment: its name and live gradients, scaled in place."""

    name: str
    grads: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class GradClipBucketStats:
    """Norm before clipping and coefficient of one segment; ``param_count`` counts this rank's gradients.

    With ``found_inf`` the norm is infinite or NaN and the segment was left as it is.
    """

    name: str
    total_norm: float
    max_norm: float | None
    clip_coef: float
    clipped: bool
    param_count: int
    found_inf: bool
    fastpath: bool


@dataclass(frozen=True, slots=True)
class SegmentedGradClipResult:
    """What a clip found and did in each segment.

    Attributes:
        total_norm: 2-norm over all segments before clipping, fp32 scalar.
        bucket_stats: Per segment, in the order given.
        fastpath: Whether a compiled extension was used.
        fallback_reason: Why not.
    """

    total_norm: Tensor
    bucket_stats: tuple[GradClipBucketStats, ...]
    fastpath: bool
    fallback_reason: str | None = None


@torch.no_grad()
def clip_grad_norm_buckets_(
    buckets: Sequence[GradClipBucket],
    max_norm: float | None,
    *,
    process_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> SegmentedGradClipResult:
    """Clip each bucket to 2-norm ``max_norm`` by itself.

    With a ``process_group`` this is one collective over it, whatever a rank holds: all its ranks pass the same
    buckets in the same order, each with its part of the gradients.

    Args:
        buckets: Segments; DTensors count with their local part.
        max_norm: Bound of every segment; ``None`` only takes the norms.
        process_group: Ranks over which the gradients are divided; ``None`` where each rank holds them whole.
        chunk_size: Most tensors in one multi-tensor call; ``None`` for all.

    Raises:
        ConfigurationError: An argument is out of range, or a gradient is sharded and no ``process_group`` is given.
    """
    _check(buckets, max_norm, chunk_size)
    locals_ = [_local_grads(bucket, process_group) for bucket in buckets]
    device = _device(locals_, process_group)
    powers = _powers(locals_, device, chunk_size)
    if process_group is not None:
        dist.all_reduce(powers, group=process_group)
    return _clip(buckets, locals_, powers, max_norm, chunk_size)


@torch.no_grad()
def try_clip_optimizer_grad_norm_buckets_(
    optimizer: Any,
    *,
    regular_grads: Sequence[Tensor],
    adamw_grads: Sequence[Tensor],
    max_norm: float,
    process_group: ProcessGroup | None = None,
) -> SegmentedGradClipResult | None:
    """Clip the segments ``regular``, ``muon`` and ``adamw``, each by its own norm. Collective over all ranks.

    The muon segment is what ``optimizer`` owns, its norm always taken over all data-parallel ranks; ``process_group``
    is that of the other two, as in :func:`clip_grad_norm_buckets_`. The documented ``None``, for an install that
    cannot clip this way, is never returned: torch's multi-tensor kernels are always there.
    """
    muon = muon_optimizer(optimizer)
    muon.runtime.prepare_grads()
    device = muon.runtime.topology.device
    buckets = [
        GradClipBucket("regular", regular_grads),
        GradClipBucket("muon", list(muon.owned_gradients().values())),
        GradClipBucket("adamw", adamw_grads),
    ]
    _check(buckets, max_norm, None)
    locals_ = [_local_grads(bucket, process_group) for bucket in buckets]
    powers = _powers(locals_, device, None)
    muon_power = muon.runtime.reduce_sum(powers[1:2].clone())
    if process_group is not None:
        dist.all_reduce(powers, group=process_group)
    powers[1:2] = muon_power
    return _clip(buckets, locals_, powers, max_norm, None)


def _check(buckets: Sequence[GradClipBucket], max_norm: float | None, chunk_size: int | None) -> None:
    if max_norm is not None and not max_norm >= 0.0:
        raise ConfigurationError(f"max_norm must be at least 0 or None, got {max_norm!r}")
    if chunk_size is not None and chunk_size < 1:
        raise ConfigurationError(f"chunk_size must be at least 1 or None, got {chunk_size!r}")
    names = [bucket.name for bucket in buckets]
    if len(set(names)) != len(names):
        raise ConfigurationError(f"bucket names must be distinct, got {names}")


def _local_grads(bucket: GradClipBucket, process_group: ProcessGroup | None) -> list[Tensor]:
    for grad in bucket.grads:
        if process_group is None and isinstance(grad, DTensor) and any(isinstance(p, Shard) for p in grad.placements):
            raise ConfigurationError(
                f"bucket {bucket.name!r} holds sharded gradients: pass the process_group they are sharded over"
            )
    return [local_tensor(grad, f"a gradient of bucket {bucket.name!r}") for grad in bucket.grads]


def _device(locals_: Sequence[Sequence[Tensor]], process_group: ProcessGroup | None) -> torch.device:
    """Where the norms are combined: with the gradients; on a rank without any, where its group communicates."""
    for grads in locals_:
        for grad in grads:
            return grad.device
    cuda = torch.device("cuda")
    if process_group is not None and cuda in process_group._device_types and uses_nccl(process_group, cuda):
        return cuda
    return torch.device("cpu")


def _powers(locals_: Sequence[Sequence[Tensor]], device: torch.device, chunk_size: int | None) -> Tensor:
    """``sum x^2`` of each bucket's local part, fp64 ``(buckets,)``."""
    powers = [norm_power(grads, 2.0, device=device, chunk_size=chunk_size) for grads in locals_]
    return torch.stack(powers) if powers else torch.zeros(0, dtype=torch.float64, device=device)


def _clip(
    buckets: Sequence[GradClipBucket],
    locals_: Sequence[Sequence[Tensor]],
    powers: Tensor,
    max_norm: float | None,
    chunk_size: int | None,
) -> SegmentedGradClipResult:
    """Scale each bucket by what its reduced power asks for; one device synchronisation."""
    stats = []
    for bucket, grads, power in zip(buckets, locals_, powers.tolist(), strict=True):
        total_norm = root_of_power(power, 2.0)
        coefficient = clip_coefficient(total_norm, max_norm)
        scale_(grads, coefficient, chunk_size=chunk_size)
        stats.append(
            GradClipBucketStats(
                name=bucket.name,
                total_norm=total_norm,
                max_norm=max_norm,
                clip_coef=coefficient,
                clipped=coefficient < 1.0,
                param_count=len(grads),
                found_inf=not math.isfinite(total_norm),
                fastpath=False,
            )
        )
    return SegmentedGradClipResult(
        total_norm=powers.sum().sqrt().float(),
        bucket_stats=tuple(stats),
        fastpath=False,
        fallback_reason=_NO_EXTENSION,
    )
