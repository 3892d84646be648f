"""Gathering an owned tensor, and the way of a gradient back to its owner: each the derivative of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement

from dmuon_hf.core.runtime.ownership import broadcast_from_owner, reduce_to_owner

if TYPE_CHECKING:
    from dmuon_hf.core.runtime.owned_tensor import OwnedTensor

__all__ = ["gather", "in_owned_form", "local_part", "summed_axes"]


def gather(owned: OwnedTensor, summed: Mapping[int, float]) -> Tensor:
    """The owner's values on every rank, as a plain tensor that shares nothing; differentiable. Collective.

    Args:
        owned: Values; every rank gets those of the owner at its own place on axes that are not owned over.
        summed: Mesh axes over which the ranks' gradients add up, and the factor of their sum. Over the others every
            rank has the same gradient, and the owner takes its own without communication.
    """
    return cast(Tensor, _Gather.apply(owned, summed))


def local_part(owned: OwnedTensor) -> Tensor:
    """What this rank holds, sharing its storage; a gradient of it is this rank's part of the gradient."""
    return cast(Tensor, _LocalPart.apply(owned))


def in_owned_form(grad: Tensor, like: OwnedTensor) -> Tensor:
    """A whole gradient that every rank has, in the layout of ``like``; an owned one as it is."""
    if type(grad) is type(like):
        return grad
    return cast(Tensor, _Scatter.apply(grad.full_tensor() if isinstance(grad, DTensor) else grad, like, {}))


def summed_axes(owned: OwnedTensor, grad_placements: Sequence[Placement] | None) -> dict[int, float]:
    """The owned axes over which gradients of the placements given are sums, with the factor of each.

    Raises:
        NotImplementedError: A gradient that is neither replicated nor a partial sum or mean.
    """
    axes: dict[int, float] = {}
    for axis, placement in enumerate(grad_placements or ()):
        if axis not in owned._ownership.axes or placement.is_replicate():
            continue
        if not isinstance(placement, Partial) or placement.reduce_op not in ("sum", "avg"):
            raise NotImplementedError(
                f"grad_placements {tuple(grad_placements or ())} of an owned tensor: only Replicate(), Partial() and "
                'Partial("avg") are defined on the mesh axes that it is owned over'
            )
        axes[axis] = 1.0 if placement.reduce_op == "sum" else 1.0 / owned.device_mesh.size(axis)
    return axes


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owned: OwnedTensor, summed: Mapping[int, float]) -> Tensor:
        ctx.owned, ctx.summed = owned.detach(), summed
        local, ownership = owned._local_tensor, owned._ownership
        value = local.clone() if ownership.is_owner else local.new_empty(ownership.part(owned._spec)[0])
        broadcast_from_owner(value, owned.device_mesh, ownership)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _Scatter.apply(grad, ctx.owned, ctx.summed)), None


class _Scatter(torch.autograd.Function):
    """What every rank has, or has a share of, to the owner."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, like: OwnedTensor, summed: Mapping[int, float]) -> Tensor:
        ctx.summed = summed
        if summed:
            value = value.clone(memory_format=torch.contiguous_format)
            reduce_to_owner(value, like.device_mesh, like._ownership, summed)
        # A copy: autograd adds later gradients in place, and the value may be somebody else's gradient too.
        if value.shape == like.shape:
            local = like._ownership.cut(value, like._spec)
        else:
            local = value if like.is_owner else value[:0]
        return like.like(local.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        for factor in ctx.summed.values():
            whole = whole * factor
        return whole, None, None


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owned: OwnedTensor) -> Tensor:
        ctx.owned = owned.detach()
        return owned._local_tensor.view_as(owned._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return cast(Tensor, _Wrap.apply(grad, ctx.owned))


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, like: OwnedTensor) -> Tensor:
        return like.like(local.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return cast("OwnedTensor", grad).to_local(), None
