"""The Muon part of a step: units in plan order, in windows, each published as soon as its matrices are updated.

A publish that is issued after the last matrix travels while nothing is computed. Issued per unit it travels while the
owners work on later units, and the first units, which the next forward wants first, are the first to arrive. The price
is in Newton-Schulz: matrices of one shape run as one batch, and a unit alone holds few that one rank owns. So a window
takes as many consecutive units as hold ``WINDOW_NUMEL`` elements of this rank, which keep an accelerator busy whatever
their shapes: a large matrix is a window of its own, a small model is one. Windows differ between ranks; the order of
the publishes is that of the plan on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch

from dmuon_hf.core.optim.interfaces import MatrixUnit
from dmuon_hf.core.optim.update import MuonRule, Orthogonalize, OwnedMatrix, apply_muon

__all__ = ["WINDOW_NUMEL", "sweep", "update_window", "windows"]

# 32 matrices of (1024, 1024), two of (4096, 4096): a window's products take longer than their launches.
WINDOW_NUMEL: Final = 1 << 25


def windows(
    units: Sequence[MatrixUnit], mine: Mapping[int, OwnedMatrix], most: int = WINDOW_NUMEL
) -> Iterator[list[MatrixUnit]]:
    """Consecutive units, together at most ``most`` elements of this rank, or a unit of more alone.

    Units before the first matrix of this rank wait for nothing: each is a window.

    Args:
        units: In plan order.
        mine: What this rank updates, by the identity of the parameter.
        most: Bound in elements.
    """
    window: list[MatrixUnit] = []
    numel = 0
    for unit in units:
        size = sum(mine[id(m.param)].weight.numel() for m in unit.matrices if id(m.param) in mine)
        if window and (numel == 0 or numel + size > most):
            yield window
            window, numel = [], 0
        window.append(unit)
        numel += size
    if window:
        yield window


@torch.no_grad()
def sweep(
    units: Sequence[MatrixUnit],
    rules: Mapping[int, MuonRule],
    mine: Mapping[int, OwnedMatrix],
    orthogonalize: Orthogonalize,
    *,
    on_batch: Callable[[Sequence[OwnedMatrix]], None] | None = None,
) -> int:
    """Update what this rank owns and publish every unit; returns the number of logical matrices. Collective (HSDP).

    Args:
        units: All units, in plan order.
        rules: What takes part in this step on any rank: the rule of its group, one object per group, by the identity
            of the parameter. Gathered copies of these are stale afterwards, on every rank.
        mine: The ones among them that this rank owns.
        orthogonalize: Newton-Schulz.
        on_batch: Called before each batch with its matrices.
    """
    count = 0
    for window in windows(units, mine):
        with torch.profiler.record_function(f"dmuon::newton_schulz {_label(window)}"):
            count += update_window(window, rules, mine, orthogonalize, on_batch=on_batch)
        for unit in window:
            for matrix in unit.matrices:
                if id(matrix.param) in rules:
                    matrix.mark_updated()
            unit.publish()
    return count


def update_window(
    window: Sequence[MatrixUnit],
    rules: Mapping[int, MuonRule],
    mine: Mapping[int, OwnedMatrix],
    orthogonalize: Orthogonalize,
    *,
    on_batch: Callable[[Sequence[OwnedMatrix]], None] | None = None,
) -> int:
    """Update this rank's matrices of a window, group by group: rules that happen to be equal change no batch."""
    groups: dict[int, tuple[MuonRule, list[OwnedMatrix]]] = {}
    for unit in window:
        for matrix in unit.matrices:
            key = id(matrix.param)
            if key in mine:
                groups.setdefault(id(rules[key]), (rules[key], []))[1].append(mine[key])
    return sum(apply_muon(matrices, rule, orthogonalize, on_batch=on_batch) for rule, matrices in groups.values())


def _label(window: Sequence[MatrixUnit]) -> str:
    return window[0].name if len(window) == 1 else f"{window[0].name} to {window[-1].name}"
