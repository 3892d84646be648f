"""Strided shards in the files of ``torch.distributed.checkpoint``: what of DTensor's protocol for them is right.

See [Note: strided shards in state dicts] in ``parts.py``. The files stay DCP's: only where a box lies changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.shards.parts import Part, is_strided, parts_of

__all__ = ["PROTOCOL"]


def _write_items(tensor: DTensor, fqn: str, _: Any) -> list[WriteItem]:
    """One item for each box that this rank holds."""
    properties = TensorProperties.create_from_tensor(tensor.to_local())
    return [
        WriteItem(
            index=MetadataIndex(fqn, part.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(part), properties=properties, size=tensor.size()),
        )
        for part in parts_of(tensor, fqn)
    ]


def _chunk_list(tensor: DTensor) -> list[ChunkStorageMetadata]:
    return [_chunk(part) for part in parts_of(tensor)]


def _tensor_shard(tensor: DTensor, index: MetadataIndex) -> Tensor:
    local = tensor.to_local()
    for part in parts_of(tensor, index.fqn):
        if part.offsets == index.offset:
            return local[part.inner]
    raise ConfigurationError(f"{index.fqn} has no part at {index.offset} on this rank")


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=part.offsets, sizes=part.sizes)


def _for_strided(ours: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method of DTensor that does as ``ours`` for strided shards, and as torch for all else."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(tensor: DTensor, *args: Any) -> Any:
            return ours(tensor, *args) if is_strided(tensor) else original(tensor, *args)

        return method

    return around


PROTOCOL: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "__create_write_items__": _for_strided(_write_items),
    "__create_chunk_list__": _for_strided(_chunk_list),
    "__get_tensor_shard__": _for_strided(_tensor_shard),
}
"""By name of DTensor's method, what to make of torch's own."""
