"""Managed parameters that AdamW updates: by their owners, with their units, or row by row by all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim.interfaces import DedicatedMatrix, OptimizerRuntime
from dmuon_hf.core.optim.step import step_adamw
from dmuon_hf.core.plan import SHARDED

__all__ = ["ManagedAdamW"]


class ManagedAdamW:
    """The managed parameters of a runtime that AdamW updates, none of them in most models.

    The tensors of their state lie as they do: on the owner alone, without rows elsewhere, or in the rows of each rank.
    Every rank keeps the step count.

    Args:
        runtime: The model's.
        forced: Canonical name to the route that the caller's groups put it on; see :class:`OwnedSource`.

    Raises:
        ConfigurationError: A group forces ``"sharded_adamw"`` on a parameter that has an owner, or ``"muon"`` on one
            that has none: where a parameter lies is decided when it is dedicated.
    """

    def __init__(self, runtime: OptimizerRuntime, forced: Mapping[str, str]) -> None:
        self._runtime = runtime
        for name, matrix in runtime.dedicated.items():
            _check_route(matrix, forced.get(name))
        self._taken = [forced.get(name, matrix.route) != "muon" for name, matrix in runtime.dedicated.items()]
        self._params = list(compress(runtime.dedicated.values(), self._taken))
        self.ids = frozenset(id(matrix.param) for matrix in self._params)
        """Identities of the parameters."""

    def flags(self) -> Tensor:
        """One per parameter, in plan order; see :meth:`MatrixSource.flags`."""
        if not self._params:
            return torch.empty(0)
        return torch.tensor([float(flag) for flag in compress(self._runtime.grad_flags(), self._taken)])

    def update(
        self, groups: Iterable[Mapping[str, Any]], state: Mapping[Tensor, Mapping[str, Tensor]], reached: Sequence[bool]
    ) -> None:
        """Update what some rank saw a gradient for, before the units are published. No communication."""
        taken = list(compress(self._params, reached))
        if not taken:
            return
        mine = {id(matrix.param) for matrix in taken if matrix.is_owner}
        for group in groups:
            if group["route"] == "adamw":
                step_adamw(group, state, [param for param in group["params"] if id(param) in mine])
        for matrix in taken:
            if not matrix.is_owner:
                state[matrix.param]["step"].add_(1.0)
            matrix.mark_updated()


def _check_route(matrix: DedicatedMatrix, forced: str | None) -> None:
    if forced == SHARDED and not matrix.is_sharded:
        raise ConfigurationError(
            f"{matrix.name} has an owner, and its group asks for 'sharded_adamw': give it that route in the "
            "param_policy of dedicate_params(), which cuts it into rows while every rank has the whole"
        )
    if forced == "muon" and matrix.is_sharded:
        raise ConfigurationError(
            f"{matrix.name} is on the route 'sharded_adamw', in rows on all ranks, and its group asks for 'muon': "
            "give it that route in the param_policy of dedicate_params()"
        )
