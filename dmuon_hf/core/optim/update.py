"""The Muon update of whole matrices on their owner: momentum, Newton-Schulz, decoupled decay. No communication.

``buf = mu * buf + g``; the direction is ``g + mu * buf`` with Nesterov momentum, else ``buf``; then
``w *= 1 - lr * wd`` and ``w -= lr * scale(out, in) * NS(direction)`` (https://kellerjordan.github.io/posts/muon).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from dmuon_hf.core.optim.scaling import lr_scale_factor
from dmuon_hf.core.plan import MatrixSpec

__all__ = ["MAX_BATCH_NUMEL", "MuonRule", "OwnedMatrix", "apply_muon", "momentum_dtype"]

# Bounds the temporaries of one batch: a few times this many fp32 elements (256 MiB each).
MAX_BATCH_NUMEL: Final = 1 << 26

_WHOLE: Final = MatrixSpec()


class Orthogonalize(Protocol):
    """Newton-Schulz on ``(batch, m, n)``: a new tensor, its argument as it was."""

    def __call__(self, matrices: Tensor, /, *, steps: int | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class MuonRule:
    """Hyperparameters of one muon group, as plain numbers."""

    lr: float
    momentum: float
    nesterov: bool
    ns_steps: int
    weight_decay: float
    lr_scale: str


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A stored parameter with its gradient and momentum, all of the same shape and whole on this rank."""

    name: str
    weight: Tensor
    grad: Tensor
    momentum: Tensor
    spec: MatrixSpec


def momentum_dtype(param: Tensor) -> torch.dtype:
    """Momentum and update are computed in fp32, in fp64 for fp64 parameters."""
    return torch.promote_types(param.dtype, torch.float32)


@torch.no_grad()
def apply_muon(
    matrices: Sequence[OwnedMatrix],
    rule: MuonRule,
    orthogonalize: Orthogonalize,
    *,
    max_batch_numel: int = MAX_BATCH_NUMEL,
    on_batch: Callable[[Sequence[OwnedMatrix]], None] | None = None,
) -> int:
    """Update ``weight`` and ``momentum`` of every matrix in place and return the number of logical matrices.

    A weight in a lower precision than its momentum is updated in the precision of the momentum and rounded once.

    Args:
        matrices: Parameters that this rank owns and that take part in this step.
        rule: Hyperparameters of their group.
        orthogonalize: Newton-Schulz.
        max_batch_numel: Most elements in one batch; a larger matrix is a batch of its own.
        on_batch: Called before each batch with its matrices.
    """
    count = 0
    for batch in _batches(matrices, max_batch_numel):
        if on_batch is not None:
            on_batch(batch)
        directions = _advance_momentum(batch, rule)
        updates, logical = _orthogonal_updates(batch, directions, rule, orthogonalize)
        _apply(batch, updates, rule)
        count += logical
    return count


def _batches(matrices: Sequence[OwnedMatrix], max_numel: int) -> Iterator[list[OwnedMatrix]]:
    """Matrices of one stored shape and decomposition, in order of first appearance, cut to the memory bound."""
    alike: dict[Any, list[OwnedMatrix]] = {}
    for matrix in matrices:
        weight = matrix.weight
        alike.setdefault((weight.shape, matrix.spec, weight.dtype, weight.device), []).append(matrix)
    for group in alike.values():
        size = max(1, max_numel // max(1, group[0].weight.numel()))
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _advance_momentum(batch: Sequence[OwnedMatrix], rule: MuonRule) -> Sequence[Tensor]:
    """Move the momentum buffers on by one gradient and return what Newton-Schulz sees."""
    momenta = [matrix.momentum for matrix in batch]
    grads = [matrix.grad.to(matrix.momentum.dtype) for matrix in batch]
    torch._foreach_mul_(momenta, rule.momentum)
    torch._foreach_add_(momenta, grads)
    if rule.nesterov:
        return torch._foreach_add(grads, momenta, alpha=rule.momentum)
    return momenta


def _orthogonal_updates(
    batch: Sequence[OwnedMatrix], directions: Sequence[Tensor], rule: MuonRule, orthogonalize: Orthogonalize
) -> tuple[list[Tensor], int]:
    """``scale * NS`` of every direction in its stored layout, and the number of logical matrices."""
    pieces = [matrix.spec.split(direction) for matrix, direction in zip(batch, directions, strict=True)]
    by_shape: dict[torch.Size, list[tuple[int, int]]] = {}
    for row, logical in enumerate(pieces):
        for column, piece in enumerate(logical):
            by_shape.setdefault(piece.shape, []).append((row, column))
    for shape, places in by_shape.items():
        members = [pieces[row][column] for row, column in places]
        stacked = members[0].unsqueeze(0) if len(members) == 1 else torch.stack(members)
        scaled = orthogonalize(stacked, steps=rule.ns_steps)
        scaled = scaled.mul_(lr_scale_factor((shape[0], shape[1]), rule.lr_scale))
        for (row, column), piece in zip(places, scaled.unbind(0), strict=True):
            pieces[row][column] = piece
    merged = [
        logical[0] if matrix.spec == _WHOLE else matrix.spec.merge(logical)
        for matrix, logical in zip(batch, pieces, strict=True)
    ]
    return merged, sum(len(logical) for logical in pieces)


def _apply(batch: Sequence[OwnedMatrix], updates: Sequence[Tensor], rule: MuonRule) -> None:
    weights = [matrix.weight for matrix in batch]
    rounded = weights[0].dtype != updates[0].dtype
    masters = [weight.to(updates[0].dtype) for weight in weights] if rounded else weights
    if rule.weight_decay != 0.0:
        torch._foreach_mul_(masters, 1.0 - rule.lr * rule.weight_decay)
    torch._foreach_add_(masters, list(updates), alpha=-rule.lr)
    if rounded:
        torch._foreach_copy_(weights, masters)
