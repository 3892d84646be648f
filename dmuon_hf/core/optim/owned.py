"""The source of dedicated matrices: the owner alone computes; no traffic but the publish, of HSDP and replication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.agreement import Call
from dmuon_hf.core.optim.gradients import local_tensor
from dmuon_hf.core.optim.interfaces import DedicatedMatrix, OnBatch, OptimizerRuntime
from dmuon_hf.core.optim.sweep import sweep
from dmuon_hf.core.optim.update import MuonRule, Orthogonalize, OwnedMatrix
from dmuon_hf.core.optim.workload import newton_schulz_calls

__all__ = ["OwnedSource"]


class OwnedSource:
    """`MatrixSource` of the dedicated parameters of a runtime; plain ones in a single process."""

    route = "muon"

    def __init__(self, runtime: OptimizerRuntime) -> None:
        self._runtime = runtime

    @property
    def params(self) -> Mapping[str, nn.Parameter]:
        return {name: matrix.param for name, matrix in self._runtime.dedicated.items()}

    def flags(self) -> Tensor:
        """One per matrix, in plan order."""
        return torch.tensor([float(flag) for flag in self._runtime.grad_flags()], dtype=torch.float32)

    def update(
        self,
        rules: Mapping[int, MuonRule],
        state: Mapping[Tensor, Mapping[str, Tensor]],
        reached: Sequence[bool],
        orthogonalize: Orthogonalize,
        *,
        on_batch: OnBatch | None = None,
    ) -> int:
        """Update the matrices that this rank owns, and publish every unit, which is collective under HSDP.

        Raises:
            ConfigurationError: A gradient is gone; before anything is updated.
        """
        taken: dict[int, MuonRule] = {}
        mine: dict[int, OwnedMatrix] = {}
        for matrix, has_grad in zip(self._runtime.dedicated.values(), reached, strict=True):
            key = id(matrix.param)
            if has_grad and key in rules:
                taken[key] = rules[key]
                if matrix.is_owner:
                    mine[key] = _owned_matrix(matrix, state[matrix.param]["momentum_buffer"])
        return sweep(self._runtime.matrix_units, taken, mine, orthogonalize, on_batch=on_batch)

    def newton_schulz_calls(self, rules: Mapping[int, MuonRule], orthogonalize: Orthogonalize) -> set[Call]:
        return newton_schulz_calls(self._runtime.matrix_units, rules)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the matrices that this rank owns; under replication of all, which every rank holds."""
        held = {name: matrix.held_grad for name, matrix in self._runtime.dedicated.items()}
        return {name: grad for name, grad in held.items() if grad is not None}


def _owned_matrix(matrix: DedicatedMatrix, momentum: Tensor) -> OwnedMatrix:
    param = matrix.param
    if param.grad is None:
        raise ConfigurationError(f"the gradient of {matrix.name!r} is gone: set no .grad to None before step()")
    return OwnedMatrix(
        name=matrix.name,
        weight=local_tensor(param, matrix.name),
        grad=local_tensor(param.grad, matrix.name),
        momentum=local_tensor(momentum, matrix.name),
        spec=matrix.spec,
    )
