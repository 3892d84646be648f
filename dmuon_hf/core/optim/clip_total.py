"""The norm of all gradients of a model whose parameters lie on several meshes, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim.clip_global import muon_optimizer
from dmuon_hf.core.optim.gradients import copies_of, local_tensor
from dmuon_hf.core.optim.norms import weighted_norm_power

__all__ = ["clip_total_grad_norm_"]


@torch.no_grad()
def clip_total_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    optimizer: Any = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for parameters that are not all on one mesh, which torch refuses.

    Tensor parallelism beside what only FSDP2 shards, expert-parallel stacks, owned, sharded and plain parameters: the
    norm is that of the whole gradients, every element counted once, and the same on every rank. Plain gradients are
    taken to be alike on all ranks, as under DDP. Every rank calls it with the parameters of its model, all of which lie
    on meshes that it is part of; one small reduction for each mesh. Does not wait for the device unless
    ``error_if_nonfinite``.

    Args:
        parameters: All of them, or one.
        max_norm: Gradients are scaled by ``max_norm / norm`` if that is below 1.
        norm_type: ``p > 0``, or infinity.
        error_if_nonfinite: Raise, on every rank, if the norm is infinite or NaN.
        foreach: As of torch: ``False`` takes one tensor at a time.
        optimizer: The ``Muon(agreement_group=...)`` of this stage of a pipeline, or a wrapper of it: the norm is then
            that over all stages, which take part with one reduction more.

    Returns:
        The norm before clipping, a plain scalar tensor.

    Raises:
        ConfigurationError: ``norm_type`` is out of range.
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set.
    """
    if not norm_type > 0.0:
        raise ConfigurationError(f"norm_type must be above 0, got {norm_type!r}")
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for param in listed:
        if param.grad is not None:
            mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(param)
    norms = [_norm_of(mesh, [_grad(p) for p in params], norm_type, foreach) for mesh, params in by_mesh.items()]
    total = torch.tensor(0.0)
    if norms:
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if optimizer is not None:
        total = muon_optimizer(optimizer).stages.norm(total, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped. With "
            "error_if_nonfinite=False the following step() is skipped on all ranks."
        )
    for mesh, params in by_mesh.items():
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, _on(mesh, total), foreach)
    return total


def _norm_of(mesh: DeviceMesh | None, grads: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """The plain fp32 norm of gradients on one mesh. Collective over it."""
    ranks = None if mesh is None else mesh.mesh.flatten().tolist()
    weighted = [(local_tensor(grad, "a gradient"), 1.0 / copies_of(grad, ranks)) for grad in grads]
    power = weighted_norm_power(weighted, norm_type, device=weighted[0][0].device, foreach=foreach)
    if math.isinf(norm_type):
        # A maximum over ranks may drop NaN; infinity stands for both.
        power = power.nan_to_num(nan=math.inf)
    if mesh is not None:
        kind = Partial("max" if math.isinf(norm_type) else "sum")
        summed = DTensor.from_local(power, mesh, [kind] * mesh.ndim, run_check=False).full_tensor()
        power = summed.wait() if isinstance(summed, AsyncCollectiveTensor) else summed
    norm: Tensor = power if math.isinf(norm_type) else power ** (1.0 / norm_type)
    return norm.float()


def _on(mesh: DeviceMesh | None, total: Tensor) -> Tensor:
    return total if mesh is None else DTensor.from_local(total, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad
