"""In which dtype directions and updates travel: the one that Newton-Schulz computes in.

[Note: half precision on the wire] Newton-Schulz normalises each matrix in fp32 before it rounds to 16 bits, so its
argument may have any magnitude. On the wire bfloat16 has the range for that. float16 has not: there every part is
divided by a power of two near its largest element, whose exponent travels in front of it, and the worker brings the
parts of a matrix to the largest exponent among them. That is exact but for what float16 rounds. Updates have elements
around one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dmuon_hf.core.device import host_to_device
from dmuon_hf.core.optim.update import Orthogonalize

__all__ = ["HEADER", "copy_pairs", "header_numel", "read_parts", "wire_dtype", "write_parts"]

HEADER = 8
"""Elements in front of a scaled part; one holds the exponent, the others keep the part aligned."""

# Powers of two below this one have no float32 reciprocal.
_SMALLEST = -126
# Below every exponent, and a whole number that float16 holds exactly.
_OF_ZERO = -1024


@runtime_checkable
class ComputesIn(Protocol):
    """A Newton-Schulz that says what it computes in."""

    def computes_in(self, dtype: torch.dtype, device: torch.device) -> torch.dtype: ...


def wire_dtype(orthogonalize: Orthogonalize, momentum: torch.dtype, device: torch.device) -> torch.dtype:
    """What directions and updates travel in; the momentum's own where it is not known what is computed in."""
    if not isinstance(orthogonalize, ComputesIn):
        return momentum
    compute = orthogonalize.computes_in(momentum, device)
    return compute if compute.itemsize < momentum.itemsize else momentum


def header_numel(dtype: torch.dtype) -> int:
    """Elements in front of a direction that travels in ``dtype``."""
    return HEADER if dtype == torch.float16 else 0


def write_parts(segments: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Write parts of directions into the flat segments of a buffer, which have room for their headers."""
    if not segments:
        return
    if header_numel(segments[0].dtype) == 0:
        torch._foreach_copy_(
            [segment.view(part.shape) for segment, part in zip(segments, parts, strict=True)], list(parts)
        )
        return
    exponents = _exponents(parts)
    scales = torch.ldexp(torch.ones_like(exponents), -exponents.clamp_min(_SMALLEST).int())
    torch._foreach_copy_([segment[:1] for segment in segments], list(exponents.split(1)))
    for segment, part, scale in zip(segments, parts, scales.unbind(), strict=True):
        segment[HEADER:].view(part.shape).copy_(part * scale)


def read_parts(segments: Sequence[Tensor], matrices: Sequence[int]) -> list[Tensor]:
    """The flat parts in segments that :func:`write_parts` filled, those of one matrix to one scale.

    Args:
        segments: Flat, with their headers.
        matrices: A number for each segment, equal for parts of one matrix.
    """
    if not segments or header_numel(segments[0].dtype) == 0:
        return list(segments)
    exponents = torch.cat([segment[:1] for segment in segments]).float()
    index = host_to_device(torch.tensor(matrices), exponents.device)
    largest = exponents.new_full((1 + max(matrices),), _OF_ZERO).scatter_reduce_(0, index, exponents, "amax")
    scales = torch.ldexp(torch.ones_like(exponents), (exponents - largest[index]).int())
    return [segment[HEADER:] * scale for segment, scale in zip(segments, scales.half().unbind(), strict=True)]


def _exponents(parts: Sequence[Tensor]) -> Tensor:
    """Per part the exponent of the power of two above its largest magnitude, float32 ``(parts,)``."""
    peaks = torch.stack(torch._foreach_norm(list(parts), float("inf"))).float()
    exponents = torch.frexp(peaks).exponent.float().clamp_min(_SMALLEST)
    return torch.where(peaks == 0, torch.full_like(exponents, _OF_ZERO), exponents)


def copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(sources))
