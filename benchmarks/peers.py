"""Other ways to run Muon under FSDP2, and the torch optimizers that stand for them in the benchmarks.

  gathered     the math of torch.optim.Muon: every rank gathers every whole update and orthogonalises all of them
  muon-fsdp2   from PyPI: each update is gathered on one rank and the result scattered, 8 of them in flight
  heavyball    from PyPI, its Muon: gathers the update, the gradient and the weight of each matrix on every rank

All of them iterate in bfloat16. They are used as they come, compiled by torch.compile where they ask for it. Parameters
that are no matrices go to foreach AdamW, the fastest way to update them.
"""

from __future__ import annotations

import importlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _adjust_lr, _zeropower_via_newtonschulz

__all__ = ["PYPI", "GatheredMuon", "Together", "make_muon", "why_missing"]

PYPI = {"muon-fsdp2": "muon_fsdp2", "heavyball": "heavyball"}
"""Peers that have to be installed, and the modules that they are."""


class GatheredMuon(torch.optim.Optimizer):
    """``torch.optim.Muon`` for FSDP2's shards: gather the whole update, orthogonalise it on every rank, keep the shard.

    Momentum is elementwise and stays sharded, so a matrix costs one all-gather. ``step()`` is a collective of the mesh
    that the parameters are sharded on, with the learning-rate rule ``match_rms_adamw``.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise NotImplementedError("GatheredMuon takes no closure")
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer, grad = state["momentum_buffer"], param.grad
        assert isinstance(param, DTensor) and isinstance(grad, DTensor)
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"])
        assert isinstance(update, DTensor)
        direction = _zeropower_via_newtonschulz(update.full_tensor(), (DEFAULT_A, DEFAULT_B, DEFAULT_C), 5, EPS)
        lr = _adjust_lr(group["lr"], "match_rms_adamw", param.shape)
        weight = param.to_local()
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(_shard_like(param, direction), alpha=-lr)


def _shard_like(param: DTensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that all ranks hold; cut without communication."""
    mesh = param.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    part: Tensor = replicated.redistribute(placements=param.placements).to_local()
    return part


class Together:
    """Several optimizers, used as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def make_muon(peer: str, matrices: Sequence[nn.Parameter], *, lr: float) -> torch.optim.Optimizer:
    """The optimizer of ``matrices``, which FSDP2 has sharded, by a peer that this module names.

    Raises:
        ImportError: A peer from PyPI is not importable.
    """
    if peer == "gathered":
        return GatheredMuon(matrices, lr=lr)
    # Compiled in this process: a pool of compilers would stay beside the measurement.
    torch._inductor.config.compile_threads = 1
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\._inductor")
    module: Any = importlib.import_module(PYPI[peer])
    optimizer: torch.optim.Optimizer
    if peer == "muon-fsdp2":
        optimizer = module.Muon([{"params": list(matrices), "lr": lr, "use_muon": True}])
    else:
        optimizer = module.Muon(list(matrices), lr=lr)
    return optimizer


def why_missing(peer: str) -> str | None:
    """Why this machine cannot run a peer, with what to do; None if it can."""
    if peer not in PYPI:
        return None
    try:
        importlib.import_module(PYPI[peer])
    except Exception as error:
        return f"{peer} cannot be imported ({error}); pip install --no-deps --target DIR {peer}, then --rivals DIR"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"{peer} is compiled by torch.compile, and there is no C++ compiler {compiler}; CXX names another"
    return None
