"""Where the parts of a DTensor that this rank holds lie in the whole: for state dicts.

[Note: strided shards in state dicts] torch's checkpoints take the local tensor for one box of the whole, at its first
index, and cut whole tensors left to right. For a ``_StridedShard`` both are wrong where sizes do not divide: FSDP2 over
tensor parallelism really split the tensor in another order ([Note: split order] in ``layout.py``), and indices may have
gaps. Here the local tensor is as many boxes as it has runs, in the order that its shape tells. Where two orders give
this rank equally many, which takes three mesh dimensions on one tensor dimension, it is taken for FSDP2's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.shards.layout import holds_shape, layout_of
from dmuon_hf.core.shards.runs import placed

__all__ = ["Part", "cut_from", "is_strided", "parts_of", "write_parts"]


@dataclass(frozen=True, slots=True)
class Part:
    """One box of a tensor: where it lies in the local tensor and in the whole."""

    inner: tuple[slice, ...]
    outer: tuple[slice, ...]

    @property
    def offsets(self) -> torch.Size:
        return torch.Size(where.start for where in self.outer)

    @property
    def sizes(self) -> torch.Size:
        return torch.Size(where.stop - where.start for where in self.outer)


def is_strided(tensor: object) -> TypeGuard[DTensor]:
    """Whether torch's checkpoints may take ``tensor`` for another part of the whole than it is."""
    return type(tensor) is DTensor and any(isinstance(placement, _StridedShard) for placement in tensor.placements)


def parts_of(tensor: DTensor, name: str = "a tensor") -> Iterator[Part]:
    """The boxes of the whole that this rank holds, none of them empty. No communication.

    Raises:
        ConfigurationError: The local tensor is no part of the whole as its placements say.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return
    listed = layout_of(tensor, name)
    # FSDP2's order first: nobody else makes tensors whose order matters.
    layouts = [layout for layout in (listed.nested(), listed) if layout is not None]
    local = tuple(tensor.to_local().shape)
    layout = next((layout for layout in layouts if holds_shape(layout, coordinate, local)), None)
    if layout is None:
        raise ConfigurationError(
            f"{name} has a local tensor of shape {local}, which is not what placements {tensor.placements} on a mesh "
            f"of {tuple(tensor.device_mesh.shape)} give a tensor of shape {tuple(tensor.shape)}"
        )
    for boxes in product(*(tuple(placed(runs)) for runs in layout.held(coordinate))):
        yield Part(tuple(inner for inner, _ in boxes), tuple(outer for _, outer in boxes))


@torch.no_grad()
def write_parts(target: DTensor, whole: Tensor, name: str = "a tensor") -> None:
    """Write this rank's parts of a tensor that it has in full. No communication."""
    local = target.to_local()
    for part in parts_of(target, name):
        local[part.inner].copy_(whole[part.outer])


def cut_from(whole: Tensor, like: DTensor) -> DTensor:
    """A tensor that lies as ``like``, with the values, dtype and device of ``whole``. No communication."""
    local = torch.empty(like.to_local().shape, dtype=whole.dtype, device=whole.device)
    result = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    write_parts(result, whole.detach())
    return result
