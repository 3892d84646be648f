"""One small agreement per step: whether every rank steps, and which matrices.

[Note: lockstep] A rank must not decide from what it holds. Each rank puts into one fp32 vector whether its gradients
are finite, how many backward passes it has run, and which dedicated matrices it saw a gradient for; the elementwise
maximum over all data-parallel ranks is the same everywhere, and so is every decision taken from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.optim.interfaces import OptimizerRuntime

__all__ = ["StepVerdict", "agree_on_step", "any_nonfinite"]


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """What all ranks do in this step; equal on every rank."""

    finite: bool
    reached: tuple[bool, ...]
    """Per dedicated matrix, in plan order: some rank saw a gradient."""


def any_nonfinite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """fp32 scalar on ``device``: 1 where any element of ``tensors`` is infinite or NaN, else 0. Does not synchronise.

    The largest magnitude is used, not the 2-norm, which overflows in fp32 for finite elements above 1e19.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    found = torch.zeros((), dtype=torch.float32, device=device)
    for same_kind in by_kind.values():
        largest = torch.stack(torch._foreach_norm(same_kind, float("inf")))
        found = torch.maximum(found, (~torch.isfinite(largest)).any().to(device=device, dtype=torch.float32))
    return found


def agree_on_step(runtime: OptimizerRuntime, grads: Sequence[Tensor], found_inf: Tensor | None) -> StepVerdict:
    """Agree with all data-parallel ranks on this step. Collective; one device synchronisation.

    Args:
        runtime: Runtime of the model, its gradients prepared.
        grads: Every gradient this rank holds, local tensors.
        found_inf: What a gradient scaler found on this rank, or ``None`` without one.

    Raises:
        LockstepError: The ranks have run different numbers of backward passes.
    """
    device = runtime.topology.device
    count = runtime.backward_count
    values = torch.tensor([0.0, count, -count, *map(float, runtime.grad_flags())], dtype=torch.float32).to(device)
    values[0] = any_nonfinite(grads, device)
    if found_inf is not None:
        values[0] = torch.maximum(values[0], (found_inf.to(device) != 0).to(torch.float32))
    nonfinite, most, least_negated, *reached = runtime.agree(values).tolist()
    if most != -least_negated:
        raise LockstepError(
            f"step() found between {-least_negated:.0f} and {most:.0f} backward passes since zero_grad() on the ranks, "
            f"{count} on this one. Every data-parallel rank must run the same number of synchronised backward passes "
            "before step(); feed all ranks the same number of batches."
        )
    return StepVerdict(finite=nonfinite == 0.0, reached=tuple(flag != 0.0 for flag in reached))
