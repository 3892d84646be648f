"""What the owners will call Newton-Schulz with, known on every rank before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dmuon_hf.core.ns.agreement import Call
from dmuon_hf.core.optim.interfaces import DedicatedMatrix, MatrixUnit
from dmuon_hf.core.optim.sweep import update_window, windows
from dmuon_hf.core.optim.update import MuonRule, OwnedMatrix, empty_second_moment, momentum_dtype

__all__ = ["newton_schulz_calls"]


def newton_schulz_calls(units: Sequence[MatrixUnit], rules: Mapping[int, MuonRule]) -> set[Call]:
    """Every distinct call that any rank makes in a step in which every matrix has a gradient. No communication.

    Found by running the update of each owner on tensors without data.

    Args:
        units: All units, in plan order.
        rules: The rule of each parameter's group, as :func:`~dmuon_hf.core.optim.sweep.sweep` takes it.
    """
    calls: set[Call] = set()

    def record(matrices: Tensor, *, steps: int | None = None) -> Tensor:
        calls.add(Call(tuple(matrices.shape), matrices.dtype, steps))
        return torch.empty_like(matrices)

    by_owner: dict[tuple[int, int], dict[int, OwnedMatrix]] = {}
    for unit in units:
        for matrix in unit.matrices:
            if id(matrix.param) in rules:
                by_owner.setdefault(matrix.owner, {})[id(matrix.param)] = _without_data(matrix, rules[id(matrix.param)])
    for mine in by_owner.values():
        for window in windows(units, mine):
            update_window(window, rules, mine, record)
    return calls


def _without_data(matrix: DedicatedMatrix, rule: MuonRule) -> OwnedMatrix:
    param = matrix.param
    weight = torch.empty(param.shape, dtype=param.dtype, device="meta")
    momentum = torch.empty(param.shape, dtype=matrix.optim_dtype or momentum_dtype(param), device="meta")
    second_moment = empty_second_moment(weight, matrix.spec) if rule.normalises_rows else None
    weight, momentum = matrix.spec.stored(weight), matrix.spec.stored(momentum)
    return OwnedMatrix(
        matrix.name, weight, torch.empty_like(weight), momentum, matrix.spec.unfolded, second_moment=second_moment
    )
