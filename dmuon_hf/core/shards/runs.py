"""Index sets as runs, half-open ranges in order of storage, and torch's rules for splitting them over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

__all__ = ["Runs", "chunk", "length", "placed", "strided_chunk", "whole"]

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Indices of one tensor dimension that a rank holds, in the order in which it stores them; no run is empty."""


def whole(size: int) -> Runs:
    """All indices of a dimension."""
    return ((0, size),) if size else ()


def length(runs: Runs) -> int:
    """How many indices."""
    return sum(stop - start for start, stop in runs)


def chunk(runs: Runs, parts: int, index: int) -> Runs:
    """The part that ``torch.chunk`` and ``Shard`` give to ``index`` of ``parts``: later ones smaller, or empty."""
    size = length(runs)
    step = -(-size // parts)
    return _take(runs, min(index * step, size), min((index + 1) * step, size))


def strided_chunk(runs: Runs, parts: int, index: int, factor: int) -> Runs:
    """The part that ``_StridedShard`` with this split factor gives to ``index``: one of each of ``factor`` chunks."""
    return _joined(run for piece in range(factor) for run in chunk(chunk(runs, factor, piece), parts, index))


def placed(runs: Runs) -> Iterator[tuple[slice, slice]]:
    """Per run its place in the storage of whoever holds the runs, and its place in the whole dimension."""
    at = 0
    for start, stop in runs:
        yield slice(at, at + stop - start), slice(start, stop)
        at += stop - start


def _take(runs: Runs, first: int, last: int) -> Runs:
    """Elements ``first`` to ``last`` of the runs, counted through."""
    taken: list[tuple[int, int]] = []
    at = 0
    for start, stop in runs:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            taken.append((start + low, start + high))
        at += stop - start
    return tuple(taken)


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same indices with neighbouring runs made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
