"""One small agreement per step: whether every rank steps, and which matrices.

[Note: lockstep] A rank must not decide from what it holds. Each rank puts into one fp32 vector whether its gradients
are finite, how many backward passes it has run, whether its model is still the one that the optimizer was made for,
and which matrices of every source it saw a gradient for; the elementwise maximum over all data-parallel ranks is the
same everywhere, and so is every decision taken from it.

It is issued by ``step()`` and not when backward ends: clipping, unscaling and the caller may write gradients in
between, on one rank and not on another, and a second agreement about that would cost what the first one saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from dmuon_hf.core.device import host_to_device
from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.optim.binding import Findings
from dmuon_hf.core.optim.gradients import check_and_unscale_
from dmuon_hf.core.optim.interfaces import OptimizerRuntime
from dmuon_hf.core.optim.stages import Stages

__all__ = ["StepVerdict", "agree_on_step"]


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """What all ranks do in this step; equal on every rank."""

    finite: bool
    sound: bool
    """No rank has found fault with its model, and the same parameters train on all."""
    reached: tuple[tuple[bool, ...], ...]
    """Per source and flag: some rank saw a gradient."""


def agree_on_step(
    runtime: OptimizerRuntime,
    stages: Stages,
    flags: Sequence[Tensor],
    grads: Sequence[Tensor],
    findings: Findings,
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> StepVerdict:
    """Unscale the gradients and agree with all data-parallel ranks on this step.

    Collective; one device synchronisation, and another one where other stages have to agree.

    Args:
        runtime: Runtime of the model, its gradients prepared.
        stages: Whoever has to agree beyond its ranks.
        flags: Those of every source.
        grads: Every gradient this rank holds, local tensors.
        findings: What this rank found out about its model.
        grad_scale: Loss scale that they carry, or ``None``; they are divided by it in place.
        found_inf: What a gradient scaler found on this rank, or ``None`` without one.

    Raises:
        LockstepError: The ranks have run different numbers of backward passes, or another stage refuses the step.
        ConfigurationError: The loss scales of the stages differ.
    """
    device = runtime.topology.device
    count = runtime.backward_count
    digest = findings.digest
    model = [float(not findings.is_sound), *digest, *(-part for part in digest)]
    mine = torch.tensor([0.0, count, -count, *model], dtype=torch.float32)
    # Flags that are on the host travel with the rest.
    near = list(takewhile(lambda part: part.device.type == "cpu", (mine, *flags)))
    values = torch.cat([host_to_device(part, device) for part in (torch.cat(near), *flags[len(near) - 1 :])])
    values[:1] = check_and_unscale_(grads, grad_scale, device)
    if found_inf is not None:
        values[:1] = torch.maximum(values[:1], (found_inf.to(device) != 0).to(torch.float32))
    nonfinite, most, least_negated, problem, *agreed = runtime.agree(values).tolist()
    digests, agreed = agreed[: len(model) - 1], agreed[len(model) - 1 :]
    sound = problem == 0.0 and all(high == -low for high, low in zip(digests[:2], digests[2:], strict=True))
    refused = not sound or most != -least_negated
    finite = not stages.agree(nonfinite != 0.0, refused, grad_scale)
    if sound and most != -least_negated:
        raise LockstepError(
            f"step() found between {-least_negated:.0f} and {most:.0f} backward passes since zero_grad() on the ranks, "
            f"{count} on this one. Every data-parallel rank must run the same number of synchronised backward passes "
            "before step(); feed all ranks the same number of batches."
        )
    ends = list(accumulate(len(part) for part in flags))
    reached = tuple(
        tuple(flag != 0.0 for flag in agreed[end - len(part) : end]) for part, end in zip(flags, ends, strict=True)
    )
    return StepVerdict(finite=finite, sound=sound, reached=reached)
