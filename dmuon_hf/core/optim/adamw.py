"""AdamW on the local part of ordinary parameters: torch's own functional form, so it equals ``torch.optim.AdamW``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

__all__ = ["apply_adamw"]


@torch.no_grad()
def apply_adamw(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any]
) -> None:
    """One AdamW step on local tensors, in place.

    Elementwise, so the update of a shard is the shard of the update. A gradient in another dtype than its parameter is
    cast to the parameter's; the state keeps the parameter's dtype, as ``torch.optim.AdamW`` has it.

    Args:
        params: Local parameters.
        grads: Local gradients, one per parameter.
        states: ``step`` (fp32 scalar on the CPU), ``exp_avg`` and ``exp_avg_sq`` (local) of each parameter.
        group: ``lr`` (a plain number), ``betas``, ``eps``, ``weight_decay``.
    """
    if not params:
        return
    beta1, beta2 = group["betas"]
    adamw(
        list(params),
        [grad.to(param.dtype) for param, grad in zip(params, grads, strict=True)],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
