"""Clipping of independent gradient segments, each with its own norm and coefficient.

The fast path is the pair of Triton kernels in ``clip_kernels``, for NVIDIA GPUs; elsewhere ``torch._foreach_norm`` and
``torch._foreach_mul_`` do the same. Which it is, is decided tensor by tensor on each rank, and changes no collective;
the results say it in ``fastpath`` and ``fallback_reason``. There is no compiled extension.
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

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim.clip_global import MuonGradClipStats, muon_optimizer
from dmuon_hf.core.optim.gradients import copies_of, local_tensor, share_of
from dmuon_hf.core.optim.norms import clip_coefficient, root_of_power, scale_, takes_kernels, weighted_norm_power
from dmuon_hf.core.optim.stages import AgreementGroup, sum_over_stages
from dmuon_hf.core.runtime.collectives import device_of_group

__all__ = [
    "GradClipBucket",
    "GradClipBucketStats",
    "SegmentedGradClipResult",
    "clip_grad_norm_buckets_",
    "try_clip_optimizer_grad_norm_buckets_",
]

_MUON: Final = 1
_NO_KERNELS: Final = (
    "torch's multi-tensor kernels were used: those of this package take contiguous gradients of 16 or 32 bits on "
    "NVIDIA GPUs from SM80 on, where Triton is installed"
)


@dataclass(frozen=True, slots=True)
class GradClipBucket:
    """One independently clipped segment: its name and live gradients, scaled in place."""

    name: str
    grads: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class _Part:
    """What this rank holds of a gradient, and the weight of its elements in a sum over ranks."""

    local: Tensor
    weight: float


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
        fastpath: Whether the kernels of this package took every gradient on this rank.
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
    agreement_group: AgreementGroup | None = None,
) -> SegmentedGradClipResult:
    """Clip each bucket to 2-norm ``max_norm`` by itself: one norm and one coefficient on all ranks.

    One collective over ``process_group``, whatever a rank holds: all its ranks call it with the same buckets in the
    same order, each with its part of the gradients. The parts may differ in number, and be none. An infinite or NaN
    gradient on one rank leaves the bucket as it is on all.

    What counts, each element once:

    - A DTensor, owned tensors included: its local part. Copies count as one, along the dimensions of its mesh that it
      is replicated over, and where its mesh covers only a part of the group (a norm's weight under tensor parallelism).
    - A plain tensor: as this rank's own part, different from those of the other ranks. Nothing tells plain gradients
      that every rank holds alike (DDP) from parts: clip those with ``torch.nn.utils.clip_grad_norm_``.

    Args:
        buckets: Segments.
        max_norm: Bound of every segment; ``None`` only takes the norms.
        process_group: Ranks over which the gradients are divided. By default all ranks of the process group, which is
            the data-parallel group where there is no other parallelism; under pipeline parallelism pass the group of
            the stage. Without a process group this process holds everything.
        chunk_size: Most tensors in one multi-tensor call; ``None`` for all.
        agreement_group: Joins the stages of a pipeline, as for ``Muon``: each norm is then that over all stages, which
            have buckets of the same names.

    Raises:
        ConfigurationError: An argument is out of range.
    """
    _check(buckets, max_norm, chunk_size)
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
    parts = [_parts(bucket, ranks) for bucket in buckets]
    powers = _powers(parts, _device(parts, process_group), chunk_size)
    if process_group is not None:
        dist.all_reduce(powers, group=process_group)
        powers = sum_over_stages(powers, agreement_group, ranks or ())
    return _clip(buckets, parts, powers, max_norm, chunk_size)


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

    The muon segment is the matrices of ``optimizer``, its norm always taken over all data-parallel ranks, and its
    statistics become ``optimizer.last_muon_grad_clip_stats``. ``process_group`` is that of the other two, by default
    the data-parallel ranks of the model; with ``Muon(agreement_group=...)`` all norms are those over all stages. What
    counts is as in :func:`clip_grad_norm_buckets_`. The documented ``None``,
    for an install that cannot clip this way, is never returned: torch's multi-tensor kernels are always there.
    """
    muon = muon_optimizer(optimizer)
    runtime = muon.runtime
    runtime.prepare_grads()
    buckets = [
        GradClipBucket("regular", regular_grads),
        GradClipBucket("muon", list(muon.matrix_gradients().values())),
        GradClipBucket("adamw", adamw_grads),
    ]
    _check(buckets, max_norm, None)
    ranks = runtime.topology.ranks if process_group is None else dist.get_process_group_ranks(process_group)
    parts = [_parts(bucket, ranks) for bucket in buckets]
    powers = _powers(parts, runtime.topology.device, None)
    count = powers.new_full((1,), sum(share_of(grad, runtime.topology.ranks) for grad in buckets[_MUON].grads))
    reduced = runtime.reduce_sum(torch.cat([powers, count]))
    if process_group is not None:
        dist.all_reduce(powers, group=process_group)
        reduced = torch.stack([powers[0], reduced[_MUON], powers[2], reduced[-1]])
    *reduced_powers, matrices = muon.stages.add_up(reduced).unbind()
    result = _clip(buckets, parts, torch.stack(reduced_powers), max_norm, None)
    segment = result.bucket_stats[_MUON]
    muon.last_muon_grad_clip_stats = MuonGradClipStats(
        total_norm=segment.total_norm,
        max_norm=max_norm,
        norm_type=2.0,
        clip_coef=segment.clip_coef,
        clipped=segment.clipped,
        param_count=round(float(matrices)),
        found_inf=segment.found_inf,
    )
    return result


def _check(buckets: Sequence[GradClipBucket], max_norm: float | None, chunk_size: int | None) -> None:
    if max_norm is not None and not max_norm >= 0.0:
        raise ConfigurationError(f"max_norm must be at least 0 or None, got {max_norm!r}")
    if chunk_size is not None and chunk_size < 1:
        raise ConfigurationError(f"chunk_size must be at least 1 or None, got {chunk_size!r}")
    names = [bucket.name for bucket in buckets]
    if len(set(names)) != len(names):
        raise ConfigurationError(f"bucket names must be distinct, got {names}")


def _parts(bucket: GradClipBucket, ranks: Sequence[int] | None) -> list[_Part]:
    return [
        _Part(local_tensor(grad, f"a gradient of bucket {bucket.name!r}"), 1.0 / copies_of(grad, ranks))
        for grad in bucket.grads
    ]


def _device(parts: Sequence[Sequence[_Part]], process_group: ProcessGroup | None) -> torch.device:
    """Where norms are combined: where the group communicates, the same on all its ranks, else with the gradients."""
    if process_group is None:
        return next((part.local.device for each in parts for part in each), torch.device("cpu"))
    return device_of_group(process_group)


def _powers(parts: Sequence[Sequence[_Part]], device: torch.device, chunk_size: int | None) -> Tensor:
    """This rank's contribution to ``sum x^2`` of each bucket, fp64 ``(buckets,)``."""
    powers = torch.zeros(len(parts), dtype=torch.float64, device=device)
    for index, each in enumerate(parts):
        weighted = [(part.local, part.weight) for part in each]
        powers[index] = weighted_norm_power(weighted, 2.0, device=device, chunk_size=chunk_size)
    return powers


def _clip(
    buckets: Sequence[GradClipBucket],
    parts: Sequence[Sequence[_Part]],
    powers: Tensor,
    max_norm: float | None,
    chunk_size: int | None,
) -> SegmentedGradClipResult:
    """Scale each bucket by what its reduced power asks for; one device synchronisation."""
    stats = []
    for bucket, each, power in zip(buckets, parts, powers.tolist(), strict=True):
        total_norm = root_of_power(power, 2.0)
        coefficient = clip_coefficient(total_norm, max_norm)
        scale_([part.local for part in each], coefficient, chunk_size=chunk_size)
        stats.append(
            GradClipBucketStats(
                name=bucket.name,
                total_norm=total_norm,
                max_norm=max_norm,
                clip_coef=coefficient,
                clipped=coefficient < 1.0,
                param_count=len(each),
                found_inf=not math.isfinite(total_norm),
                fastpath=takes_kernels([part.local for part in each]) if each else False,
            )
        )
    fastpath = any(parts) and all(found.fastpath for found, each in zip(stats, parts, strict=True) if each)
    return SegmentedGradClipResult(
        total_norm=powers.sum().sqrt().float(),
        bucket_stats=tuple(stats),
        fastpath=fastpath,
        fallback_reason=None if fastpath else _NO_KERNELS,
    )
