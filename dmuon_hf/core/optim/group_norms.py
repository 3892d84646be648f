"""Norms of the gradients of each parameter group, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon_hf.core.optim.gradients import copies_of, local_tensor
from dmuon_hf.core.optim.interfaces import OptimizerRuntime
from dmuon_hf.core.optim.norms import weighted_norm_power

__all__ = ["group_norms", "local_group_powers"]


@torch.no_grad()
def local_group_powers(groups: Sequence[Mapping[str, Any]], runtime: OptimizerRuntime) -> Tensor:
    """This rank's part of the squared gradient norm of every group: fp64, one per group.

    A plain gradient counts as a copy that every rank has. No communication and no synchronisation.
    """
    ranks, device = runtime.topology.ranks, runtime.topology.device
    powers = []
    for group in groups:
        grads = [param.grad for param in group["params"] if param.grad is not None]
        parts = [(local_tensor(grad, "a gradient"), _weight(grad, ranks)) for grad in grads]
        powers.append(weighted_norm_power(parts, 2.0, device=device))
    return torch.stack(powers)


def _weight(grad: Tensor, ranks: Sequence[int] | None) -> float:
    if ranks is None or isinstance(grad, DTensor):
        return 1.0 / copies_of(grad, ranks)
    return 1.0 / len(ranks)


@torch.no_grad()
def group_norms(powers: Tensor, runtime: OptimizerRuntime) -> list[float]:
    """Norms from what :func:`local_group_powers` gave on every rank. Collective, and synchronises."""
    norms: list[float] = runtime.reduce_sum(powers).sqrt().tolist()
    return norms
