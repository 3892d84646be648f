"""Whether the parts of a tensor in a file make up the tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["cover"]

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def cover(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether each index of a tensor of ``shape`` is in exactly one of the boxes."""
    filled = [box for box in boxes if math.prod(box[1])]
    inside = all(
        start >= 0 and start + size <= whole
        for offsets, sizes in filled
        for start, size, whole in zip(offsets, sizes, shape, strict=True)
    )
    return inside and sum(math.prod(sizes) for _, sizes in filled) == math.prod(shape) and not _overlapping(filled)


def _overlapping(boxes: Sequence[Box]) -> bool:
    """Whether two boxes share an index: a sweep along the dimension that most of them are cut on."""
    if len(boxes) < 2 or not boxes[0][0]:
        return len(boxes) > 1
    dims = range(len(boxes[0][0]))
    along = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][along]):
        active = [other for other in active if other[0][along] + other[1][along] > box[0][along]]
        if any(_meet(box, other) for other in active):
            return True
        active.append(box)
    return False


def _meet(left: Box, right: Box) -> bool:
    return all(
        a < b + size_b and b < a + size_a
        for a, size_a, b, size_b in zip(left[0], left[1], right[0], right[1], strict=True)
    )
