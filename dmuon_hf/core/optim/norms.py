"""Norms and scaling of lists of local tensors: with the kernels of ``clip_kernels`` where they run, else torch's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import compress
from operator import not_

import torch
from torch import Tensor

from dmuon_hf.core.optim.clip_kernels import is_taken, runs_on, scale_in_place_, sum_of_squares

__all__ = ["clip_coefficient", "norm_power", "root_of_power", "scale_", "takes_kernels", "weighted_norm_power"]


def norm_power(
    tensors: Sequence[Tensor],
    norm_type: float,
    *,
    device: torch.device,
    foreach: bool | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """``sum |x|^p`` over all elements, or ``max |x|`` for ``p = inf``: fp64 scalar on ``device``. Does not synchronise.

    Each tensor's norm is taken in fp32 (fp64 for fp64), so half precision does not overflow; they add up in fp64.
    2-norms on an NVIDIA GPU take one launch for all tensors of a dtype, in whose runs squares add up in fp32.

    Args:
        tensors: Local tensors of any device and dtype; empty ones count as zero.
        norm_type: ``p``.
        device: Where the result goes.
        foreach: ``False`` takes one tensor at a time, ``True`` torch's multi-tensor kernels.
        chunk_size: Most tensors in one multi-tensor call; ``None`` for all.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for alike in _chunks([tensor for tensor in tensors if tensor.numel() > 0], chunk_size):
        taken, chunk = _by_kernels(alike, foreach if norm_type == 2.0 else True)
        if taken:
            total = total + sum_of_squares(taken).to(device)
        if not chunk:
            continue
        accumulate = torch.promote_types(chunk[0].dtype, torch.float32)
        if foreach is False:
            norms = [torch.linalg.vector_norm(tensor, norm_type, dtype=accumulate) for tensor in chunk]
        else:
            norms = list(torch._foreach_norm(chunk, norm_type, dtype=accumulate))
        stacked = torch.stack(norms).to(device=device, dtype=torch.float64)
        if math.isinf(norm_type):
            total = torch.maximum(total, stacked.max())
        else:
            total = total + stacked.pow(norm_type).sum()
    return total


def weighted_norm_power(
    parts: Sequence[tuple[Tensor, float]],
    norm_type: float,
    *,
    device: torch.device,
    foreach: bool | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """:func:`norm_power` of tensors whose elements count by a weight in the sum; a maximum has no use for it."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for weight in dict.fromkeys(weight for _, weight in parts):
        alike = [tensor for tensor, other in parts if other == weight]
        power = norm_power(alike, norm_type, device=device, foreach=foreach, chunk_size=chunk_size)
        total = torch.maximum(total, power) if math.isinf(norm_type) else total + weight * power
    return total


def root_of_power(power: float, norm_type: float) -> float:
    """The norm whose :func:`norm_power` is ``power``."""
    return power if math.isinf(norm_type) else power ** (1.0 / norm_type)


def clip_coefficient(total_norm: float, max_norm: float | None) -> float:
    """Factor that brings ``total_norm`` down to ``max_norm``; 1 where nothing is clipped.

    A norm that is not finite gives 1: scaling by 0 or NaN would hide from the step which gradients it must refuse.
    """
    if max_norm is None or not math.isfinite(total_norm):
        return 1.0
    return min(1.0, max_norm / (total_norm + 1e-6))


def scale_(
    tensors: Sequence[Tensor], factor: float, *, foreach: bool | None = None, chunk_size: int | None = None
) -> None:
    """Multiply every tensor by ``factor`` in place; nothing is touched for 1."""
    if factor == 1.0:
        return
    for alike in _chunks(tensors, chunk_size):
        taken, chunk = _by_kernels(alike, foreach)
        if taken:
            scale_in_place_(taken, factor)
        if not chunk:
            continue
        if foreach is False:
            for tensor in chunk:
                tensor.mul_(factor)
        else:
            torch._foreach_mul_(chunk, factor)


def takes_kernels(tensors: Sequence[Tensor]) -> bool:
    """Whether all of these are for the kernels of ``clip_kernels``, none of them torch's."""
    return all(runs_on(tensor.device) and is_taken(tensor) for tensor in tensors)


def _by_kernels(alike: list[Tensor], foreach: bool | None) -> tuple[list[Tensor], list[Tensor]]:
    """Which of some tensors of one device and dtype are for the kernels of ``clip_kernels``, and which for torch's."""
    if foreach is not None or not runs_on(alike[0].device):
        return [], alike
    taken = [is_taken(tensor) for tensor in alike]
    return list(compress(alike, taken)), list(compress(alike, map(not_, taken)))


def _chunks(tensors: Sequence[Tensor], size: int | None) -> Iterator[list[Tensor]]:
    """Lists of one device and dtype, at most ``size`` long."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for group in alike.values():
        step = len(group) if size is None else size
        for start in range(0, len(group), step):
            yield group[start : start + step]
