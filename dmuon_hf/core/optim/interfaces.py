"""What the optimizer asks of the runtime: the whole of it, so that the two can be read and tested apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from dmuon_hf.core.plan import MatrixSpec

__all__ = ["DedicatedMatrix", "HasDevice", "OptimizerRuntime"]


class DedicatedMatrix(Protocol):
    """One dedicated parameter as the optimizer sees it."""

    @property
    def name(self) -> str: ...
    @property
    def param(self) -> nn.Parameter: ...
    @property
    def spec(self) -> MatrixSpec: ...
    @property
    def is_owner(self) -> bool: ...


class HasDevice(Protocol):
    """The part of the topology that the optimizer uses."""

    @property
    def device(self) -> torch.device: ...


class OptimizerRuntime(Protocol):
    """Every method is called by all data-parallel ranks in the same order."""

    @property
    def topology(self) -> HasDevice: ...
    @property
    def dedicated(self) -> Mapping[str, DedicatedMatrix]: ...
    @property
    def backward_count(self) -> int: ...
    def prepare_grads(self) -> None: ...
    def grad_flags(self) -> list[bool]: ...
    def agree(self, values: Tensor) -> Tensor: ...
    def reduce_sum(self, values: Tensor) -> Tensor: ...
    def discard_grads(self) -> None: ...
    def publish(self, *, asynchronous: bool) -> None: ...
    def set_forward_prefetch_depth(self, depth: int) -> None: ...
