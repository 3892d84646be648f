"""How the matrices of a unit lie in its packed buffer: one contiguous bucket per owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PackedLayout", "Segment"]

# Elements. Keeps every matrix 16-byte aligned in any floating-point type of two bytes or more.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of elements of the packed buffer."""

    start: int
    numel: int

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.numel]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Offsets of a unit's matrices, ordered by owner slot.

    ``order[i]`` is the position in the plan of the i-th matrix of the buffer. ``shard_segments[s]`` is the bucket of
    shard coordinate ``s``; inside it ``slot_segments[(s, r)]`` belongs to replica ``r``. Both may be empty.
    """

    order: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    segments: tuple[Segment, ...]
    owners: tuple[tuple[int, int], ...]
    shard_segments: tuple[Segment, ...]
    slot_segments: dict[tuple[int, int], Segment]

    @property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.shard_segments)

    @staticmethod
    def build(
        shapes: Sequence[torch.Size], owners: Sequence[tuple[int, int]], *, shard_size: int, replicate_size: int
    ) -> PackedLayout:
        """Lay out matrices of the given shapes (plan order) and owner slots ``(shard, replicate)``."""
        order = sorted(range(len(shapes)), key=lambda i: (owners[i], i))
        segments: list[Segment] = []
        slot_segments: dict[tuple[int, int], Segment] = {}
        offset = 0
        position = 0
        for shard in range(shard_size):
            for replicate in range(replicate_size):
                start = offset
                while position < len(order) and owners[order[position]] == (shard, replicate):
                    numel = shapes[order[position]].numel()
                    segments.append(Segment(offset, numel))
                    offset += -(-numel // _ALIGNMENT) * _ALIGNMENT
                    position += 1
                slot_segments[(shard, replicate)] = Segment(start, offset - start)
        shard_segments = tuple(
            Segment(
                slot_segments[(shard, 0)].start,
                sum(slot_segments[(shard, replicate)].numel for replicate in range(replicate_size)),
            )
            for shard in range(shard_size)
        )
        return PackedLayout(
            order=tuple(order),
            shapes=tuple(shapes[i] for i in order),
            segments=tuple(segments),
            owners=tuple(owners[i] for i in order),
            shard_segments=shard_segments,
            slot_segments=slot_segments,
        )

    def gaps(self, buffer: Tensor, positions: Sequence[int]) -> list[Tensor]:
        """What lies between the given matrices for alignment. It travels with them, so it must not stay uninitialised.

        Nobody reads it, but a communicator that looks for NaN does.
        """
        gaps = []
        for i in positions:
            segment = self.segments[i]
            end = segment.start + segment.numel
            if end % _ALIGNMENT:
                gaps.append(buffer[end : -(-end // _ALIGNMENT) * _ALIGNMENT])
        return gaps

    def owned_by(self, slot: tuple[int, int]) -> list[int]:
        """Buffer positions of the matrices that ``slot`` owns."""
        return [i for i, owner in enumerate(self.owners) if owner == slot]

    def views(self, buffer: Tensor, positions: Sequence[int], *, origin: int = 0) -> list[Tensor]:
        """Matrix-shaped views at the given positions of a buffer whose first element is element ``origin``."""
        return [
            buffer[self.segments[i].start - origin : self.segments[i].start - origin + self.segments[i].numel].view(
                self.shapes[i]
            )
            for i in positions
        ]
