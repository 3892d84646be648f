"""How a stored parameter decomposes into the logical matrices that Newton-Schulz works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["MatrixSpec", "stored_matrices"]


def stored_matrices(shape: Sequence[int], spec: MatrixSpec) -> tuple[int, tuple[int, ...]]:
    """How many matrices a parameter stores, and the stored shape of each: several in a stack ``(count, out, in)``.

    Raises:
        ConfigurationError: ``spec`` is folded, and the parameter has not three dimensions.
    """
    if not spec.folded:
        return (shape[0], tuple(shape[1:])) if len(shape) == 3 else (1, tuple(shape))
    if len(shape) != 3:
        raise ConfigurationError(
            f"folded=True is for parameters of three dimensions, of which it makes two, not for {tuple(shape)}"
        )
    return 1, (shape[0], shape[1] * shape[2])


_LATER = ("folded", "sections_transposed")


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """The logical ``(out, in)`` matrices inside one stored 2-D parameter, or inside each member of a stack of them.

    The rows of the stored matrix are ``groups`` equal blocks, and every block consists of ``sections`` in order.
    Logical matrix ``j`` collects section ``j`` of every block and has shape ``(groups * sections[j], in)``. The
    stored layout never changes.

    Examples:
        A plain linear layer is ``MatrixSpec()``. GPT-2's ``Conv1D``, stored ``(in, out)``, is
        ``MatrixSpec(transposed=True)``. Phi-3's ``qkv_proj`` is ``MatrixSpec(sections=(q_rows, k_rows, v_rows))``.
        Qwen3-Next's ``q_proj``, query and gate per head, is ``MatrixSpec(groups=heads, sections=(dim, dim))``.
        XLNet's ``q``, stored ``(in, heads, dim)``, is ``MatrixSpec(folded=True, transposed=True)``. DBRX's ``w2``, the
        experts one below the other and each stored ``(in, out)``, is ``MatrixSpec(sections=(ffn,) * experts,
        sections_transposed=True)``.

    Attributes:
        groups: number of equal row blocks; more than one needs ``sections``.
        sections: rows of each section of one block, or None for one logical matrix, the whole.
        transposed: the parameter is stored as ``(in, out)``; rows are counted in the ``(out, in)`` orientation all
            the same.
        folded: the parameter has three dimensions ``(a, b, c)`` and is not a stack, but the matrix ``(a, b * c)``; all
            else is said of that.
        sections_transposed: what lies in a section is stored ``(in, out)``: logical matrix ``j`` has shape
            ``(in, groups * sections[j])`` instead.
    """

    groups: int = 1
    sections: tuple[int, ...] | None = None
    transposed: bool = False
    folded: bool = False
    sections_transposed: bool = False

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigurationError(f"groups must be at least 1, got {self.groups}")
        if self.sections is None:
            if self.groups != 1:
                raise ConfigurationError(
                    f"groups={self.groups} has no effect without sections: give the rows of each section"
                )
            if self.sections_transposed:
                raise ConfigurationError("sections_transposed has no effect without sections: transposed=True does it")
            return
        object.__setattr__(self, "sections", tuple(int(rows) for rows in self.sections))
        if not self.sections or min(self.sections) < 1:
            raise ConfigurationError(f"sections must be positive row counts, got {self.sections}")

    @property
    def count(self) -> int:
        """Number of logical matrices."""
        return 1 if self.sections is None else len(self.sections)

    @property
    def unfolded(self) -> MatrixSpec:
        """What is said of the matrix that a folded parameter is; the spec itself of any other."""
        return replace(self, folded=False) if self.folded else self

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of a parameter, or of what lies as it, as the matrix or stack that it stores.

        Also of the part of it that a rank holds, cut along the first dimension alone. What is folded is contiguous.
        """
        return tensor.view(len(tensor), tensor.shape[1] * tensor.shape[2]) if self.folded else tensor

    def check_foldable(self, param: torch.Tensor, name: str) -> None:
        """Raise if a parameter that is to be folded has no such view.

        Raises:
            ConfigurationError: it is not contiguous.
        """
        if self.folded and not param.is_contiguous():
            raise ConfigurationError(
                f"{name} is no view of one matrix, as it is not contiguous in memory: make it nn.Parameter(tensor."
                "contiguous())"
            )

    def validate(self, shape: Sequence[int]) -> None:
        """Raise if a stored matrix of this shape cannot hold the matrices that the spec describes.

        Raises:
            ConfigurationError: not a matrix, or rows that do not add up.
            NotImplementedError: more than two dimensions. Of a stack it is the shape of one member that fits.
        """
        if len(shape) > 2:
            raise NotImplementedError(
                f"a parameter of shape {tuple(shape)} is neither a matrix (out, in) nor a stack (count, out, in) of "
                "matrices, which is what Muon takes: leave it out of the predicate, so that AdamW trains it"
            )
        if len(shape) != 2 or 0 in shape:
            raise ConfigurationError(f"a parameter of shape {tuple(shape)} is no matrix: leave it to AdamW")
        rows = shape[1] if self.transposed else shape[0]
        if self.sections is not None and self.groups * sum(self.sections) != rows:
            raise ConfigurationError(
                f"{self.groups} x {self.sections} makes {self.groups * sum(self.sections)} rows, but a parameter of "
                f"shape {tuple(shape)}{' (stored transposed)' if self.transposed else ''} has {rows}"
            )

    def logical_shapes(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """The ``(out, in)`` shape of each logical matrix of a parameter of stored ``shape``."""
        self.validate(shape)
        rows, columns = (shape[1], shape[0]) if self.transposed else (shape[0], shape[1])
        if self.sections is None:
            return [(rows, columns)]
        shapes = [(self.groups * section, columns) for section in self.sections]
        return [(columns, side) for side, _ in shapes] if self.sections_transposed else shapes

    def split(self, stored: torch.Tensor) -> list[torch.Tensor]:
        """The logical matrices of a stored parameter, ``(out, in)`` each: views, or copies where groups interleave.

        Of a stack ``(count, *stored)`` the same of every member, ``(count, out, in)`` each.
        """
        self.validate(stored.shape[-2:])
        matrix = stored.mT if self.transposed else stored
        if self.sections is None:
            return [matrix]
        if self.groups == 1:
            pieces = list(matrix.split(self.sections, dim=-2))
        else:
            blocks = matrix.unflatten(-2, (self.groups, sum(self.sections)))
            pieces = [section.flatten(-3, -2) for section in blocks.split(self.sections, dim=-2)]
        return self._turned(pieces)

    def merge(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The stored parameter, or stack, made of the logical matrices: the inverse of :meth:`split`, a new tensor."""
        self._check_count(matrices)
        pieces = self._turned(matrices)
        rows, columns = sum(piece.shape[-2] for piece in pieces), pieces[0].shape[-1]
        sides = (columns, rows) if self.transposed else (rows, columns)
        stored = matrices[0].new_empty((*matrices[0].shape[:-2], *sides))
        self.write(stored, matrices)
        return stored

    def write(self, stored: torch.Tensor, matrices: Sequence[torch.Tensor]) -> None:
        """Copy the logical matrices into a stored parameter or stack, in place, casting to its dtype."""
        self._check_count(matrices)
        shapes = [tuple(matrix.shape) for matrix in matrices]
        stack = tuple(stored.shape[:-2])
        if shapes != [(*stack, *sides) for sides in self.logical_shapes(stored.shape[-2:])]:
            raise ConfigurationError(f"logical matrices of shapes {shapes} do not fill {tuple(stored.shape)} as {self}")
        target = stored.mT if self.transposed else stored
        if self.sections is None:
            target.copy_(matrices[0])
            return
        blocks = target.unflatten(-2, (self.groups, sum(self.sections)))
        for section, piece in zip(blocks.split(self.sections, dim=-2), self._turned(matrices), strict=True):
            section.copy_(piece.unflatten(-2, (self.groups, -1)))

    def to_json(self) -> dict[str, Any]:
        """JSON form, read back by :meth:`from_json`; without the last two attributes where they are not set."""
        return {key: value for key, value in asdict(self).items() if value or key not in _LATER}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MatrixSpec:
        """Inverse of :meth:`to_json`."""
        sections = data["sections"]
        return cls(
            groups=data["groups"],
            sections=None if sections is None else tuple(sections),
            transposed=data["transposed"],
            folded=data.get("folded", False),
            sections_transposed=data.get("sections_transposed", False),
        )

    def _turned(self, matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Logical matrices as their sections lie, or the other way round."""
        return [matrix.mT for matrix in matrices] if self.sections_transposed else list(matrices)

    def _check_count(self, matrices: Sequence[torch.Tensor]) -> None:
        if len(matrices) != self.count:
            raise ConfigurationError(f"{self} has {self.count} logical matrices, got {len(matrices)}")
