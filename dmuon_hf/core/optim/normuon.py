"""NorMuon: the rows of an orthogonalised update brought to one size by their second moments. No communication.

With ``O = NS(direction)`` of one logical matrix ``(m, n)``, rows being output neurons (arXiv 2510.05491)::

    v = beta2 * v + (1 - beta2) * mean_over_columns(O * O)          v of m elements, from zero, without bias correction
    O_hat = O / (sqrt(v) + eps)                                     row by row
    update = O_hat * sqrt(min(m, n)) / norm(O_hat)

So the update has the Frobenius norm of an orthogonal matrix, and every rule of the learning rate means what it means
for Muon: with ``"match_rms_adamw"`` it is the paper's step ``0.2 * lr * sqrt(m * n) / norm(O_hat)``.

What is kept of a parameter is one value for each row of its stored matrices in the ``(out, in)`` orientation, in stored
order: ``(rows,)``, of a stack ``(count, rows)``, whatever the decomposition into logical matrices and whoever computes.
Where sections are transposed it is one for each row of their matrices, one matrix after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from dmuon_hf.core.plan import MatrixSpec, stored_matrices

__all__ = [
    "UPDATE_RULES",
    "UpdateRule",
    "advance_second_moment",
    "merge_rows",
    "normalise_rows",
    "second_moment_shape",
    "split_rows",
    "squared_rows",
]

UpdateRule: TypeAlias = Literal["muon", "normuon"]
UPDATE_RULES: Final[tuple[str, ...]] = ("muon", "normuon")

_EPS: Final = 1e-8


def second_moment_shape(shape: Sequence[int], spec: MatrixSpec) -> tuple[int, ...]:
    """Shape of the second moments of a parameter of stored ``shape``: ``(rows,)``, or ``(count, rows)`` of a stack."""
    _, stored = stored_matrices(shape, spec)
    rows = sum(rows for rows, _ in spec.logical_shapes(stored))
    return (rows,) if spec.folded else (*shape[:-2], rows)


def split_rows(values: Tensor, spec: MatrixSpec) -> list[Tensor]:
    """Values of rows, ``(count, rows)``, by logical matrix: views, or copies where groups interleave."""
    if spec.sections is None:
        return [values]
    if spec.sections_transposed:
        return list(values.chunk(spec.count, dim=-1))
    return [part.squeeze(-1) for part in replace(spec, transposed=False).split(values.unsqueeze(-1))]


def merge_rows(parts: Sequence[Tensor], spec: MatrixSpec) -> Tensor:
    """Inverse of :func:`split_rows`."""
    if spec.sections is None:
        return parts[0]
    if spec.sections_transposed:
        return torch.cat(list(parts), dim=-1)
    return replace(spec, transposed=False).merge([part.unsqueeze(-1) for part in parts]).squeeze(-1)


def normalise_rows(matrices: Tensor, second_moment: Tensor, *, beta2: float, scale: float) -> Tensor:
    """Orthogonalised ``(count, m, n)`` as ``scale`` times the updates of NorMuon, in place; a matrix of zeros stays so.

    It costs a pass over the elements for the sums of squares; the product with the factors takes the place of Muon's
    with ``scale``.

    Args:
        matrices: What Newton-Schulz gave.
        second_moment: ``(count, m)``, moved on by one step in place.
        beta2: Its decay.
        scale: What the rule of the learning rate asks for.
    """
    rows, columns = matrices.shape[-2:]
    squares = squared_rows(matrices, second_moment.dtype)
    factors = advance_second_moment(second_moment, squares, columns=columns, beta2=beta2)
    return matrices.mul_(factors.mul_(scale * math.sqrt(min(rows, columns))).unsqueeze(-1))


def squared_rows(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of squares of the rows of ``(count, m, n)``, ``(count, m)`` in ``dtype``, summed in the wider of the two."""
    wide = torch.promote_types(matrices.dtype, dtype)
    sums: Tensor = torch.linalg.vector_norm(matrices, dim=-1, dtype=wide).square_()
    return sums.to(dtype)


def advance_second_moment(second_moment: Tensor, squares: Tensor, *, columns: int, beta2: float) -> Tensor:
    """Move second moments on in place; the factors by which rows become those of ``O_hat / norm(O_hat)``.

    Args:
        second_moment: ``(count, m)``.
        squares: Sums of squares of whole rows, ``(count, m)``.
        columns: ``n``.
        beta2: Decay.
    """
    second_moment.mul_(beta2).add_(squares, alpha=(1.0 - beta2) / columns)
    factors = second_moment.sqrt().add_(_EPS).reciprocal_()
    norms = (squares * factors.square()).sum(-1, keepdim=True).sqrt_()
    # Of a matrix of zeros nothing is made larger.
    return factors.div_(norms.masked_fill_(norms == 0, math.inf))
