"""Clipping of the gradients of matrices by their global norm, or by a strategy of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim.gradients import copies_of, local_tensor, share_of
from dmuon_hf.core.optim.interfaces import OptimizerRuntime
from dmuon_hf.core.optim.norms import clip_coefficient, root_of_power, scale_, weighted_norm_power
from dmuon_hf.core.optim.stages import Stages

__all__ = [
    "MuonGradClipRequest",
    "MuonGradClipStats",
    "MuonGradClipStrategy",
    "clip_grad_norm_",
    "muon_optimizer",
    "register_muon_grad_clip_strategy",
]


@dataclass(frozen=True, slots=True)
class MuonGradClipStats:
    """What a clip found and did; equal on all ranks.

    Attributes:
        total_norm: Norm before clipping.
        max_norm: Bound asked for, ``None`` for statistics only.
        norm_type: ``p`` of the norm.
        clip_coef: Factor the gradients were multiplied by.
        clipped: Whether they were.
        param_count: Parameters of the muon route with a gradient, over all ranks.
        found_inf: The norm is infinite or NaN; the gradients were left as they are, and ``step()`` will skip.
        strategy: Name of the strategy.
    """

    total_norm: float
    max_norm: float | None
    norm_type: float
    clip_coef: float
    clipped: bool
    param_count: int
    found_inf: bool
    strategy: str = "global_norm"


@dataclass(frozen=True, slots=True)
class MuonGradClipRequest:
    """What a strategy works on.

    Attributes:
        gradients: Live gradients of matrices, by canonical name: whole tensors as stored of those that this rank owns,
            this rank's part of those that stay sharded.
        weights: By the same names the reciprocal of how many ranks hold the same elements: what a part counts in a sum
            over all ranks. What scales one copy must scale all of them.
        max_norm: As given by the caller.
        norm_type: As given by the caller.
        foreach: As given by the caller; ``False`` asks for one tensor at a time.
        device: Where the reductions want their argument.
        reduce_sum: Sum of a small tensor over all ranks that step together; a collective.
        reduce_max: Maximum of a small fp32 tensor over all ranks that step together; a collective.
        count: This rank's share of the number of matrices with a gradient.
    """

    gradients: dict[str, Tensor]
    weights: dict[str, float]
    max_norm: float | None
    norm_type: float
    foreach: bool | None
    device: torch.device
    reduce_sum: Callable[[Tensor], Tensor]
    reduce_max: Callable[[Tensor], Tensor]
    count: float


MuonGradClipStrategy: TypeAlias = Callable[[MuonGradClipRequest], MuonGradClipStats]


@runtime_checkable
class _MuonOptimizer(Protocol):
    """The part of ``Muon`` that clipping uses."""

    last_muon_grad_clip_stats: MuonGradClipStats | None

    @property
    def runtime(self) -> OptimizerRuntime: ...
    @property
    def stages(self) -> Stages: ...
    def matrix_gradients(self) -> dict[str, Tensor]: ...


def _global_norm(request: MuonGradClipRequest) -> MuonGradClipStats:
    """One norm over the gradients of all matrices of all ranks."""
    grads = list(request.gradients.values())
    weighted = [(grad, request.weights[name]) for name, grad in request.gradients.items()]
    power = weighted_norm_power(weighted, request.norm_type, device=request.device, foreach=request.foreach)
    values = torch.stack([power, torch.full_like(power, request.count)])
    if math.isinf(request.norm_type):
        # A maximum over ranks may drop NaN; infinity stands for both.
        largest = request.reduce_max(power.nan_to_num(nan=math.inf).float().reshape(1))
        values[0] = 0.0
        values = request.reduce_sum(values)
        values[0] = largest[0]
    else:
        values = request.reduce_sum(values)
    total_power, count = values.tolist()
    total_norm = root_of_power(total_power, request.norm_type)
    coefficient = clip_coefficient(total_norm, request.max_norm)
    scale_(grads, coefficient, foreach=request.foreach)
    return MuonGradClipStats(
        total_norm=total_norm,
        max_norm=request.max_norm,
        norm_type=request.norm_type,
        clip_coef=coefficient,
        clipped=coefficient < 1.0,
        param_count=round(count),
        found_inf=not math.isfinite(total_norm),
    )


_STRATEGIES: dict[str, MuonGradClipStrategy] = {"global_norm": _global_norm}


def register_muon_grad_clip_strategy(name: str, strategy: MuonGradClipStrategy) -> None:
    """Make ``strategy`` available as ``clip_grad_norm_(..., strategy=name)``; all ranks register the same ones.

    The strategy is called on every rank with the live gradients that this rank holds and may scale them in place. What
    it decides for all ranks it must take from the reductions of the request.

    Raises:
        ConfigurationError: ``name`` is taken.
    """
    if name in _STRATEGIES:
        raise ConfigurationError(f"a gradient clip strategy {name!r} exists already: choose another name")
    _STRATEGIES[name] = strategy


@torch.no_grad()
def clip_grad_norm_(
    optimizer: Any,
    max_norm: float | None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    strategy: str | MuonGradClipStrategy = "global_norm",
) -> MuonGradClipStats:
    """Clip the gradients of the matrices of ``Muon``, and only those, by their global norm. Collective over all ranks.

    With ``Muon(agreement_group=...)`` the norm, and the collective, are those of all stages of a pipeline.
    Newton-Schulz fixes the size of the update, so this guards the momentum against outliers; it sets no learning rate.

    Args:
        optimizer: ``Muon``, or a wrapper that holds one as ``.optimizer``.
        max_norm: Bound; ``None`` only takes the norm.
        norm_type: ``p > 0``, or infinity.
        error_if_nonfinite: Raise, on every rank, when the norm is infinite or NaN.
        foreach: ``False`` takes one tensor at a time instead of multi-tensor kernels.
        strategy: Name of a registered strategy, or one itself.

    Raises:
        ConfigurationError: An argument is out of range, the strategy unknown, or the optimizer no ``Muon``.
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set.
    """
    muon = muon_optimizer(optimizer)
    if max_norm is not None and not max_norm >= 0.0:
        raise ConfigurationError(f"max_norm must be at least 0 or None, got {max_norm!r}")
    if not norm_type > 0.0:
        raise ConfigurationError(f"norm_type must be above 0, got {norm_type!r}")
    if isinstance(strategy, str):
        if strategy not in _STRATEGIES:
            raise ConfigurationError(
                f"unknown gradient clip strategy {strategy!r}, registered are {sorted(_STRATEGIES)}"
            )
        strategy = _STRATEGIES[strategy]
    runtime = muon.runtime
    runtime.prepare_grads()
    gradients = muon.matrix_gradients()
    stats = strategy(
        MuonGradClipRequest(
            gradients={name: local_tensor(grad, f"the gradient of {name}") for name, grad in gradients.items()},
            weights={name: 1.0 / copies_of(grad, runtime.topology.ranks) for name, grad in gradients.items()},
            count=sum(share_of(grad, runtime.topology.ranks) for grad in gradients.values()),
            max_norm=None if max_norm is None else float(max_norm),
            norm_type=float(norm_type),
            foreach=foreach,
            device=runtime.topology.device,
            reduce_sum=muon.stages.reduce_sum,
            reduce_max=muon.stages.maximum,
        )
    )
    muon.last_muon_grad_clip_stats = stats
    if error_if_nonfinite and stats.found_inf:
        raise RuntimeError(
            f"the norm of order {norm_type} of the dedicated gradients is {stats.total_norm}, so they cannot be "
            "clipped. With error_if_nonfinite=False the following step() is skipped on all ranks."
        )
    return stats


def muon_optimizer(optimizer: Any) -> _MuonOptimizer:
    """The ``Muon`` that ``optimizer`` is or wraps."""
    candidate = optimizer
    while not isinstance(candidate, _MuonOptimizer):
        candidate = getattr(candidate, "optimizer", None)
        if candidate is None:
            raise ConfigurationError(f"expected a Muon optimizer or a wrapper of one, got {type(optimizer).__name__}")
    return candidate
