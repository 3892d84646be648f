"""The Muon update: momentum, Newton-Schulz, decoupled decay. No communication.

``buf = mu * buf + g``; the direction is ``g + mu * buf`` with Nesterov momentum, else ``buf``; then
``w *= 1 - lr * wd`` and ``w -= lr * scale(out, in) * NS(direction)`` (https://kellerjordan.github.io/posts/muon). With
the update rule ``"normuon"`` rows are normalised in between (:mod:`.normuon`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from dmuon_hf.core.optim.normuon import merge_rows, normalise_rows, second_moment_shape, split_rows
from dmuon_hf.core.optim.scaling import lr_scale_factor
from dmuon_hf.core.plan import MatrixSpec

__all__ = [
    "MAX_BATCH_NUMEL",
    "MuonRule",
    "Orthogonalize",
    "OwnedMatrix",
    "Stack",
    "advance_momentum",
    "apply_muon",
    "apply_updates",
    "empty_second_moment",
    "momentum_dtype",
    "orthogonal_updates",
    "second_moments",
]

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
    update_rule: str = "muon"
    normuon_beta2: float = 0.95

    @property
    def normalises_rows(self) -> bool:
        """Whether rows have second moments."""
        return self.update_rule == "normuon"


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A stored matrix with its gradient and momentum, all of one shape, whole on this rank or the same part of it.

    Of a stack ``(count, out, in)`` those of its ``members`` are updated, all of them where it is ``None``. The
    ``second_moment`` is that of all rows, also where the rest is a part of the matrix; ``None`` with Muon's own rule.
    """

    name: str
    weight: Tensor
    grad: Tensor
    momentum: Tensor
    spec: MatrixSpec
    members: tuple[int, ...] | None = None
    second_moment: Tensor | None = None

    def apart(self) -> Iterator[OwnedMatrix]:
        """The matrices of a stack, each by itself, as views; a matrix is its own."""
        if self.weight.ndim == 2:
            yield self
            return
        for index in range(len(self.weight)) if self.members is None else self.members:
            yield self.member(index)

    def member(self, index: int) -> OwnedMatrix:
        """One matrix of a stack, as views."""
        return OwnedMatrix(
            name=f"{self.name}[{index}]",
            weight=self.weight[index],
            grad=self.grad[index],
            momentum=self.momentum[index],
            spec=self.spec,
            second_moment=None if self.second_moment is None else self.second_moment[index],
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """Directions of stored matrices of one shape, ``(count, *stored)``, and how they become updates.

    Where the rule normalises rows there is a second moment for each of the matrices, which moves on in place.
    """

    directions: Tensor
    spec: MatrixSpec
    rule: MuonRule
    second_moments: Sequence[Tensor] = ()


def momentum_dtype(param: Tensor) -> torch.dtype:
    """Momentum and update are computed in fp32, in fp64 for fp64 parameters."""
    return torch.promote_types(param.dtype, torch.float32)


def empty_second_moment(param: Tensor, spec: MatrixSpec) -> Tensor:
    """Second moments of a plain parameter, in fp32 or fp64 as its momentum, without values."""
    return torch.empty(second_moment_shape(param.shape, spec), dtype=momentum_dtype(param), device=param.device)


def _computed_in(matrix: OwnedMatrix) -> torch.dtype:
    """The dtype of the arithmetic of an update, where weight or momentum may be kept in less."""
    return torch.promote_types(momentum_dtype(matrix.weight), matrix.momentum.dtype)


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
        matrices: Parameters that this rank owns and that take part in this step, matrices and stacks.
        rule: Hyperparameters of their group.
        orthogonalize: Newton-Schulz.
        max_batch_numel: Most elements in one batch; a larger matrix is a batch of its own.
        on_batch: Called before each batch with its matrices.
    """
    count = 0
    for batch in _batches([each for matrix in matrices for each in matrix.apart()], max_batch_numel):
        if on_batch is not None:
            on_batch(batch)
        directions = advance_momentum(batch, rule)
        stacked = directions[0].unsqueeze(0) if len(batch) == 1 else torch.stack(list(directions))
        stack = Stack(stacked, batch[0].spec, rule, second_moments(batch))
        (updates,), logical = orthogonal_updates([stack], orthogonalize)
        apply_updates(batch, updates.unbind(0), rule)
        count += logical
    return count


def _batches(matrices: Sequence[OwnedMatrix], max_numel: int) -> Iterator[list[OwnedMatrix]]:
    """Matrices of one stored shape and decomposition, in order of first appearance, cut to the memory bound."""
    alike: dict[Any, list[OwnedMatrix]] = {}
    for matrix in matrices:
        weight = matrix.weight
        kind = (weight.shape, matrix.spec, weight.dtype, matrix.momentum.dtype, weight.device)
        alike.setdefault(kind, []).append(matrix)
    for group in alike.values():
        size = max(1, max_numel // max(1, group[0].weight.numel()))
        for start in range(0, len(group), size):
            yield group[start : start + size]


def advance_momentum(batch: Sequence[OwnedMatrix], rule: MuonRule) -> Sequence[Tensor]:
    """Move the momentum buffers on by one gradient and return what Newton-Schulz sees. Elementwise."""
    kept = [matrix.momentum for matrix in batch]
    wide = _computed_in(batch[0])
    momenta = kept if kept[0].dtype is wide else [momentum.to(wide) for momentum in kept]
    grads = [matrix.grad.to(wide) for matrix in batch]
    torch._foreach_mul_(momenta, rule.momentum)
    torch._foreach_add_(momenta, grads)
    if momenta is not kept:
        torch._foreach_copy_(kept, momenta)
    if rule.nesterov:
        return torch._foreach_add(grads, momenta, alpha=rule.momentum)
    return momenta


def second_moments(batch: Sequence[OwnedMatrix]) -> list[Tensor]:
    """Those of all matrices, or none: one rule holds for a batch."""
    return [matrix.second_moment for matrix in batch if matrix.second_moment is not None]


def orthogonal_updates(stacks: Sequence[Stack], orthogonalize: Orthogonalize) -> tuple[list[Tensor], int]:
    """``scale * NS`` of every direction in its stored layout, and the number of logical matrices.

    Logical matrices of one shape are one call of ``orthogonalize``, whichever stacks and sections they come from. Rows
    are normalised as the rule of a stack says, and its second moments move on.
    """
    pieces = [stack.spec.split(stack.directions) for stack in stacks]
    moments = [_by_logical_matrix(stack) for stack in stacks]
    alike: dict[tuple[torch.Size, int], list[tuple[int, int]]] = {}
    for row, (stack, logical) in enumerate(zip(stacks, pieces, strict=True)):
        for column, piece in enumerate(logical):
            alike.setdefault((piece.shape[-2:], stack.rule.ns_steps), []).append((row, column))
    for (shape, steps), places in alike.items():
        members = [pieces[row][column] for row, column in places]
        result = orthogonalize(members[0] if len(members) == 1 else torch.cat(members), steps=steps)
        for (row, column), piece in zip(places, result.split([len(member) for member in members]), strict=True):
            rule = stacks[row].rule
            scale = lr_scale_factor((shape[0], shape[1]), rule.lr_scale)
            pieces[row][column] = (
                normalise_rows(piece, moments[row][column], beta2=rule.normuon_beta2, scale=scale)
                if rule.normalises_rows
                else piece.mul_(scale)
            )
    for stack, parts in zip(stacks, moments, strict=True):
        if parts:
            torch._foreach_copy_(list(stack.second_moments), list(merge_rows(parts, stack.spec).unbind()))
    merged = [
        logical[0] if stack.spec == _WHOLE else stack.spec.merge(logical)
        for stack, logical in zip(stacks, pieces, strict=True)
    ]
    return merged, sum(len(piece) for logical in pieces for piece in logical)


def _by_logical_matrix(stack: Stack) -> list[Tensor]:
    """Copies of the second moments of a stack, ``(count, rows)`` of each logical matrix; none with Muon's own rule."""
    return split_rows(torch.stack(list(stack.second_moments)), stack.spec) if stack.rule.normalises_rows else []


def apply_updates(batch: Sequence[OwnedMatrix], updates: Sequence[Tensor], rule: MuonRule) -> None:
    """Decay the weights and subtract ``lr`` times the updates, in fp32 at least. Elementwise."""
    weights = [matrix.weight for matrix in batch]
    wide = _computed_in(batch[0])
    rounded = weights[0].dtype != wide
    masters = [weight.to(wide) for weight in weights] if rounded else weights
    if rule.weight_decay != 0.0:
        torch._foreach_mul_(masters, 1.0 - rule.lr * rule.weight_decay)
    torch._foreach_add_(masters, [update.to(wide) for update in updates], alpha=-rule.lr)
    if rounded:
        torch._foreach_copy_(weights, masters)
