"""Statistics of owned tensors: numbers that every rank has, which compute with plain tensors and with DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["OwnedScalar", "replicated"]


def replicated(value: Tensor, mesh: DeviceMesh) -> DTensor:
    """A value that every rank of the mesh has."""
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


class OwnedScalar(DTensor):
    """A replicated 0-d DTensor that is a plain number beside plain tensors.

    So ``loss + 0.01 * weight.square().sum()`` is as good as with a plain weight, forward and backward, while beside
    FSDP2's DTensors it is one of them. ``full_tensor()`` and ``to_local()`` give the plain tensor.
    """

    @staticmethod
    def of(value: Tensor, mesh: DeviceMesh) -> OwnedScalar:
        """Wrap a value that all ranks of ``mesh`` have."""
        spec = replicated(value, mesh)._spec
        return cast(OwnedScalar, OwnedScalar.__new__(OwnedScalar, value, spec, requires_grad=False))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The number as a plain tensor. No communication."""
        return cast(Tensor, _Plain.apply(self))

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The number as a plain tensor. No communication."""
        return cast(Tensor, _Plain.apply(self))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat = [value for value in tree_leaves((args, kwargs or {})) if isinstance(value, Tensor)]
        numbers = [value for value in flat if isinstance(value, OwnedScalar)]
        mesh = numbers[0].device_mesh
        if any(isinstance(value, DTensor) and not isinstance(value, OwnedScalar) for value in flat):
            args, kwargs = tree_map(_as_dtensor, (args, kwargs or {}))
            return func(*args, **kwargs)
        local_args, local_kwargs = tree_map(_as_plain, (args, kwargs or {}))
        result = func(*local_args, **local_kwargs)
        if func._schema.is_mutable:
            return args[0]
        alone = len(numbers) == len(flat)
        return tree_map(lambda value: OwnedScalar.of(value, mesh) if alone and _is_number(value) else value, result)


def _as_plain(value: Any) -> Any:
    return value._local_tensor if isinstance(value, OwnedScalar) else value


def _as_dtensor(value: Any) -> Any:
    return replicated(value._local_tensor, value.device_mesh) if isinstance(value, OwnedScalar) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: OwnedScalar) -> Tensor:
        return number._local_tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
