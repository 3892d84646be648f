"""A debug mode: after every step, compare a checksum of every parameter across ranks.

Ranks that drift apart train on without an error and are noticed much later, if at all. With ``DMUON_DEBUG=1`` in the
environment of every rank, ``Muon`` runs :func:`check_replicas` at the end of each step. It gathers every unit, which
costs about as much communication as a forward.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon_hf.core.errors import ConfigurationError, LockstepError
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from dmuon_hf.core.runtime.runtime import Runtime, require_runtime

__all__ = ["check_replicas", "debug_enabled"]

_VARIABLE = "DMUON_DEBUG"
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def debug_enabled() -> bool:
    """Whether ``DMUON_DEBUG`` asks for the checks.

    Raises:
        ConfigurationError: It is neither ``0`` nor ``1``.
    """
    value = os.environ.get(_VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{_VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


@torch.no_grad()
def check_replicas(model: nn.Module) -> None:
    """Compare every parameter across the data-parallel ranks, to the bit. Collective; call it between steps.

    A dedicated matrix is compared as each rank gathers it, a parameter that FSDP2 shards with the same shard of the
    other replicas, and any other with all ranks. Nothing to compare in one process.

    Raises:
        LockstepError: A parameter differs between two ranks; the message names them. On every rank.
    """
    runtime = require_runtime(model)
    topology = runtime.topology
    if topology.grid is None or not topology.grid.talks:
        return
    names: list[str] = []
    peers: list[int] = []
    sums: list[Tensor] = []
    for name, tensor, peer_distance in _held(model, runtime):
        names.append(name)
        peers.append(peer_distance)
        sums.append(_checksum(tensor).to(topology.device))
    table = _gather_rows(runtime, torch.stack(sums))
    for column, (name, distance) in enumerate(zip(names, peers, strict=True)):
        for rank, row in enumerate(table):
            peer = rank % distance
            if row[column] != table[peer][column]:
                raise LockstepError(
                    f"{name} differs between data-parallel ranks {peer} and {rank}: they no longer train one model. "
                    "Parameters must change through the optimizer or through loading, on every rank alike."
                )


def _held(model: nn.Module, runtime: Runtime) -> Iterator[tuple[str, Tensor, int]]:
    """Name, values on this rank, and the number of ranks after which the same values are held again."""
    for unit in runtime.units:
        unit.weights.gather()
        unit.weights.wait()
        yield from ((param.name, whole, 1) for param, whole in zip(unit.params, unit.weights.unsharded, strict=True))
        unit.weights.reshard()
    for name, param in model.named_parameters():
        if isinstance(param, OwnedTensor):
            continue
        if isinstance(param, DTensor):
            replicated = any(placement.is_replicate() for placement in param.placements)
            yield name, param.to_local(), runtime.topology.shard_size if replicated else runtime.topology.size
        else:
            yield name, param, 1


def _checksum(tensor: Tensor) -> Tensor:
    """Sum of the bits of every element times an odd number of its own, modulo 2**64: depends on value and place."""
    tensor = tensor.detach().contiguous().view(-1)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).view(-1)
    words = tensor.view(_WORDS[tensor.element_size()]).to(torch.int64)
    return (words * (2 * torch.arange(len(words), device=words.device) + 1)).sum()


def _gather_rows(runtime: Runtime, row: Tensor) -> list[list[int]]:
    """The rows of all data-parallel ranks, by flat rank. Collective."""
    topology = runtime.topology
    table = torch.zeros((topology.size, len(row)), dtype=row.dtype, device=row.device)
    table[topology.flat_rank(topology.slot)] = row
    rows: list[list[int]] = runtime.reduce_sum(table).tolist()
    return rows
