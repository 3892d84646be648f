"""AdamW on the local part of ordinary parameters: torch's own forms, fused on accelerators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from dmuon_hf.core.device import host_to_device

__all__ = ["apply_adamw"]

_Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


@torch.no_grad()
def apply_adamw(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any]
) -> None:
    """One AdamW step on local tensors, in place.

    Elementwise, so the update of a shard is the shard of the update. A gradient in another dtype than its parameter is
    cast to the parameter's; the state has the parameter's dtype, as ``torch.optim.AdamW`` has it, or else is updated
    together with the parameter in the wider of the two dtypes, and rounded. Equals ``AdamW()`` on a CPU and
    ``AdamW(fused=True)`` on accelerators; the two differ by rounding.

    Args:
        params: Local parameters.
        grads: Local gradients, one per parameter.
        states: ``step`` (fp32 scalar on the CPU), ``exp_avg`` and ``exp_avg_sq`` (local) of each parameter.
        group: ``lr`` (a plain number), ``betas``, ``eps``, ``weight_decay``.
    """
    fused: dict[tuple[torch.device, torch.dtype], _Lists] = {}
    rest: _Lists = ([], [], [], [], [])
    rounded: list[tuple[Tensor, Tensor]] = []
    for given, grad, state in zip(params, grads, states, strict=True):
        kept = (given, state["exp_avg"], state["exp_avg_sq"])
        wide = torch.promote_types(given.dtype, kept[1].dtype)
        param, first_moment, second_moment = (tensor.to(wide) for tensor in kept)
        rounded += [(kept[i], new) for i, new in enumerate((param, first_moment, second_moment)) if new is not kept[i]]
        row = (param, grad.to(wide), first_moment, second_moment)
        lists = fused.setdefault((param.device, param.dtype), ([], [], [], [], [])) if _takes_fused(row) else rest
        for column, value in zip(lists, (*row, state["step"]), strict=True):
            column.append(value)
    beta1, beta2 = group["betas"]
    rule = {
        "amsgrad": False,
        "beta1": beta1,
        "beta2": beta2,
        "lr": group["lr"],
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "maximize": False,
    }
    for (device, _), (weights, gradients, first, second, steps) in fused.items():
        torch._foreach_add_(steps, 1.0)
        torch._fused_adamw_(weights, gradients, first, second, [], _on(device, steps), **rule)
    weights, gradients, first, second, steps = rest
    if weights:
        adamw(weights, gradients, first, second, [], steps, **rule)
    for kept_tensor, new in rounded:
        kept_tensor.copy_(new)


def _takes_fused(row: Sequence[Tensor]) -> bool:
    """Whether a parameter is updated by the fused kernel: on an accelerator that has one.

    It walks through memory, so all four have to lie there alike. That of the CPU rounds an element by its place, vector
    or tail, and so a shard otherwise than the whole.
    """
    device = row[0].device.type
    return device != "cpu" and device in _get_fused_kernels_supported_devices() and all(map(_is_dense, row))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.is_floating_point()


def _on(device: torch.device, steps: list[Tensor]) -> list[Tensor]:
    """Step counts where the kernel reads them, by one copy that the host does not wait for."""
    return steps if device.type == "cpu" else list(host_to_device(torch.stack(steps), device).unbind())
