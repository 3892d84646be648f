"""Checksums that compare what different ranks hold of one model.

Replicas of an HSDP grid that start apart stay apart, since only gradients are averaged: matrices with an owner are
compared when they are dedicated (:func:`first_unequal_replica`), what FSDP2 shards in the first step
(:func:`check_equal_start`). Both cost a pass over the local values and one small collective, once. Buffers are not
compared: running statistics differ by nature.

Ranks that drift apart train on without an error and are noticed much later, if at all. With ``DMUON_DEBUG=1`` in the
environment of every rank, ``Muon`` runs :func:`check_replicas` at the end of each step. It gathers every unit, which
costs about as much communication as a forward.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon_hf.core.environment import switch
from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from dmuon_hf.core.runtime.runtime import Runtime, require_runtime

if TYPE_CHECKING:
    from dmuon_hf.core.optim.interfaces import Layout, OptimizerRuntime

__all__ = ["bit_sum", "check_equal_start", "check_replicas", "debug_enabled", "first_unequal_replica", "unequal_start"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def debug_enabled() -> bool:
    """Whether ``DMUON_DEBUG`` asks for the checks."""
    return switch("DMUON_DEBUG")


@torch.no_grad()
def check_replicas(model: nn.Module) -> None:
    """Compare every parameter across the data-parallel ranks, to the bit. Collective; call it between steps.

    A dedicated matrix is compared as each rank gathers it, under tensor parallelism each part with itself, a parameter
    that FSDP2 shards with the same shard of the other replicas, and any other with all ranks. Nothing to compare in
    one process.

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


@torch.no_grad()
def check_equal_start(runtime: OptimizerRuntime, model: nn.Module) -> None:
    """Compare what FSDP2 shards, and what no rank shards, between the replicas of an HSDP grid. Collective.

    Raises:
        LockstepError: A parameter differs; the message names the first. On every rank.
    """
    topology = runtime.topology
    if not topology.compares_replicas:
        return
    sums = {
        name: bit_sum(param.to_local() if isinstance(param, DTensor) else param)
        for name, param in model.named_parameters()
        if not isinstance(param, OwnedTensor)
    }
    values = torch.stack(list(sums.values())).cpu().tolist() if sums else []
    unequal = first_unequal_replica(runtime.exchange, list(sums), values, topology)
    if unequal is not None:
        raise unequal_start(*unequal)


def unequal_start(name: str, rank: int, peer: int) -> LockstepError:
    """The error for what :func:`first_unequal_replica` found."""
    return LockstepError(
        f"{name} differs between data-parallel ranks {peer} and {rank}, which are replicas of each other: they would "
        "never train one model. Initialise every rank from one seed or one checkpoint, new heads as well."
    )


def first_unequal_replica(
    exchange: Callable[[Any], list[Any]], names: Sequence[str], sums: Sequence[int], topology: Layout
) -> tuple[str, int, int] | None:
    """The first of ``names`` whose sum differs between a rank and its peer in replica 0, and the two.

    Args:
        exchange: Gives what each rank of the model passes, by flat rank. Called on all ranks: once, and once more if
            anything differs.
        names: What is compared, the same on every rank.
        sums: :func:`bit_sum` of each.
        topology: Where this rank stands.
    """
    digests = exchange(zlib.crc32(repr((names, sums)).encode()))
    if all(digest == digests[rank % topology.replica_distance] for rank, digest in enumerate(digests)):
        return None
    table: list[dict[str, int]] = exchange(dict(zip(names, sums, strict=True)))
    for rank, row in enumerate(table):
        first = table[rank % topology.replica_distance]
        for name in dict.fromkeys((*first, *row)):
            if first.get(name) != row.get(name):
                return name, rank, rank % topology.replica_distance
    return None


def bit_sum(tensor: Tensor) -> Tensor:
    """The bits of all elements as integers, added up modulo 2**64: one pass over the values and no copy of them."""
    tensor = tensor.detach().contiguous().view(-1)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).view(-1)
    return tensor.view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64)


def _held(model: nn.Module, runtime: Runtime) -> Iterator[tuple[str, Tensor, int]]:
    """Name, values on this rank, and the number of ranks after which the same values are held again."""
    topology = runtime.topology
    assert topology.grid is not None
    for unit in runtime.units:
        unit.weights.gather()
        unit.weights.wait()
        for dedicated, whole in zip(unit.params, unit.weights.unsharded, strict=True):
            if isinstance(whole, DTensor):
                yield dedicated.name, whole._local_tensor, topology.grid.size // topology.size
            else:
                yield dedicated.name, whole, 1
        unit.weights.reshard()
    for name, param in model.named_parameters():
        if isinstance(param, OwnedTensor):
            continue
        if isinstance(param, DTensor) and topology.keeps_whole:
            replicated = all(placement.is_replicate() for placement in param.placements)
            yield name, param.to_local(), 1 if replicated else topology.replica_distance
        elif isinstance(param, DTensor):
            replicated = any(placement.is_replicate() for placement in param.placements)
            yield name, param.to_local(), topology.replica_distance if replicated else topology.grid.size
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
    """The rows of all ranks, by flat rank. Collective."""
    grid = runtime.topology.grid
    assert grid is not None
    table = torch.zeros((grid.size, len(row)), dtype=row.dtype, device=row.device)
    table[grid.rank] = row
    rows: list[list[int]] = runtime.reduce_sum(table).tolist()
    return rows
