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

from dmuon_hf.core.errors import DMuonError

__all__ = ["OwnedScalar", "replicated"]

aten = torch.ops.aten


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
        _refuse_data(func, flat)
        if any(isinstance(value, DTensor) and not isinstance(value, OwnedScalar) for value in flat):
            args, kwargs = tree_map(_as_dtensor, (args, kwargs or {}))
            return func(*args, **kwargs)
        local_args, local_kwargs = tree_map(_as_plain, (args, kwargs or {}))
        result = func(*local_args, **local_kwargs)
        if func._schema.is_mutable:
            return args[0]
        # Of a statistic and constants a statistic is made, which may still be told from data.
        alone = all(isinstance(value, OwnedScalar) or (_in_forward() and not value.requires_grad) for value in flat)
        return tree_map(lambda value: OwnedScalar.of(value, mesh) if alone and _is_number(value) else value, result)


# Of these the derivative with respect to a number does not depend on what stands beside it.
_SUMS = frozenset(
    {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor, aten.rsub.Tensor}
    | {aten.stack.default, aten.cat.default}
)


def _in_forward() -> bool:
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _refuse_data(func: OpOverload, flat: Sequence[Tensor]) -> None:
    """Refuse a loss that depends on the statistic otherwise than by a term: its gradient differs between ranks.

    The owner takes its own gradient, which is that of the mean over all ranks if they are equal.
    """
    if not _in_forward() or not any(value.requires_grad for value in flat if isinstance(value, OwnedScalar)):
        return
    data = [value for value in flat if value.requires_grad and not isinstance(value, DTensor)]
    if all(value.numel() == 1 for value in data) and (func in _SUMS or not data):
        return
    raise DMuonError(
        f"{func} puts a statistic of an owned weight, which is equal on all ranks, together with data of this rank, so "
        'that its gradient is not: take weight.full_tensor(grad_placements=[Partial("avg")]), with one placement for '
        "each dimension of the mesh, or compute inside of the forward of the weight's block. As it is, the statistic "
        "may be added to a loss"
    )


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
