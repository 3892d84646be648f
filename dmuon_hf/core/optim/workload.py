"""What the owners will call Newton-Schulz with, known on every rank before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon_hf.core.ns.agreement import Call
from dmuon_hf.core.optim.interfaces import DedicatedMatrix
from dmuon_hf.core.optim.update import MuonRule, OwnedMatrix, apply_muon, momentum_dtype

__all__ = ["newton_schulz_calls"]


def newton_schulz_calls(
    groups: Iterable[Mapping[str, Any]], names: Iterable[Sequence[str]], dedicated: Mapping[str, DedicatedMatrix]
) -> set[Call]:
    """Every distinct call that any rank makes in a step in which every matrix has a gradient. No communication.

    Found by running the update of each owner on tensors without data.

    Args:
        groups: The optimizer's groups, of both routes.
        names: Canonical names of their parameters.
        dedicated: The dedicated matrices by these names.
    """
    calls: set[Call] = set()

    def record(matrices: Tensor, *, steps: int | None = None) -> Tensor:
        calls.add(Call(tuple(matrices.shape), matrices.dtype, steps))
        return torch.empty_like(matrices)

    for group, group_names in zip(groups, names, strict=True):
        if group["route"] != "muon":
            continue
        # Numbers that no shape depends on.
        rule = MuonRule(0.0, 0.0, group["nesterov"], group["ns_steps"], 0.0, group["lr_scale"])
        by_owner: dict[tuple[int, int], list[OwnedMatrix]] = {}
        for name in group_names:
            by_owner.setdefault(dedicated[name].owner, []).append(_without_data(dedicated[name]))
        for owned in by_owner.values():
            apply_muon(owned, rule, record)
    return calls


def _without_data(matrix: DedicatedMatrix) -> OwnedMatrix:
    param = matrix.param
    weight = torch.empty(param.shape, dtype=param.dtype, device="meta")
    momentum = torch.empty(param.shape, dtype=momentum_dtype(param), device="meta")
    return OwnedMatrix(matrix.name, weight, torch.empty_like(momentum), momentum, matrix.spec)
