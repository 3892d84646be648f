"""What the workers will call Newton-Schulz with, known on every rank before the first step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dmuon_hf.core.ns.agreement import Call
from dmuon_hf.core.optim.update import (
    MuonRule,
    Orthogonalize,
    OwnedMatrix,
    Stack,
    apply_muon,
    empty_second_moment,
    orthogonal_updates,
    second_moments,
)
from dmuon_hf.core.sharded.bucket import alike
from dmuon_hf.core.sharded.itinerary import lying_whole
from dmuon_hf.core.sharded.plan import ShardedEntry, ShardedPlan
from dmuon_hf.core.sharded.wire import wire_dtype

__all__ = ["newton_schulz_calls"]


def newton_schulz_calls(
    plan: ShardedPlan, rules: Mapping[str, MuonRule], orthogonalize: Orthogonalize, device: torch.device
) -> set[Call]:
    """Every distinct call that any rank makes in a step in which every matrix is reached. No communication.

    Found by running the update of each rank on tensors without data.

    Args:
        plan: What all ranks agreed on.
        rules: Rules by name; parameters without one, which other ranks have, are left out.
        orthogonalize: Newton-Schulz.
        device: Where it runs.
    """
    calls: set[Call] = set()

    def record(matrices: Tensor, *, steps: int | None = None) -> Tensor:
        calls.add(Call(tuple(matrices.shape), matrices.dtype, steps))
        return torch.empty_like(matrices)

    by_worker: dict[tuple[int, int], list[ShardedEntry]] = {}
    for task in plan.tasks:
        if plan.entries[task.entry].name in rules:
            by_worker.setdefault((task.bucket, task.worker), []).append(plan.entries[task.entry])
    for entries in by_worker.values():
        stacks: list[Stack] = []
        for members in alike(entries, lambda entry: (entry.stored, entry.spec, rules[entry.name])).values():
            entry = members[0]
            dtype = wire_dtype(orthogonalize, entry.momentum_dtype, device)
            directions = torch.empty((len(members), *entry.stored), dtype=dtype, device="meta")
            rule = rules[entry.name]
            kept = second_moments([_without_data(entry, rule)] * len(members))
            stacks.append(Stack(directions, entry.spec, rule, kept))
        orthogonal_updates(stacks, record)
    for rank in plan.ranks:
        by_rule: dict[MuonRule, list[OwnedMatrix]] = {}
        for place in lying_whole(plan, rank):
            entry = plan.entries[place.entry]
            if entry.name in rules:
                by_rule.setdefault(rules[entry.name], []).append(_without_data(entry, rules[entry.name]))
        for rule, matrices in by_rule.items():
            apply_muon(matrices, rule, record)
    return calls


def _without_data(entry: ShardedEntry, rule: MuonRule) -> OwnedMatrix:
    weight = torch.empty(entry.stored, dtype=entry.dtype, device="meta")
    momentum = torch.empty(entry.stored, dtype=entry.momentum_dtype, device="meta")
    second_moment = empty_second_moment(weight, entry.spec) if rule.normalises_rows else None
    return OwnedMatrix(
        entry.name, weight, torch.empty_like(momentum), momentum, entry.spec, second_moment=second_moment
    )
