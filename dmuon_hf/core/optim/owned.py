"""The source of dedicated matrices: the owner alone computes; no traffic but the publish, of HSDP and replication.

Matrices with parts on a tensor-parallel axis are owned part by part, and brought together on that axis first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor, nn

from dmuon_hf.core.device import host_to_device
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.agreement import Call
from dmuon_hf.core.optim.columns import ColumnPolicy
from dmuon_hf.core.optim.gradients import local_tensor
from dmuon_hf.core.optim.interfaces import DedicatedMatrix, OnBatch, OptimizerRuntime
from dmuon_hf.core.optim.sweep import sweep
from dmuon_hf.core.optim.tensor_parallel import tensor_parallel_matrices
from dmuon_hf.core.optim.update import MuonRule, Orthogonalize, OwnedMatrix
from dmuon_hf.core.optim.workload import newton_schulz_calls
from dmuon_hf.core.plan import MatrixSpec, stored_matrices

__all__ = ["OwnedSource"]


class OwnedSource:
    """`MatrixSource` of the dedicated parameters of a runtime; plain ones in a single process.

    Args:
        runtime: The model's.
        forced: Canonical name to the route that the caller's groups put it on, whatever the policy of
            ``dedicate_params`` said. What is on another route than muon is left to :class:`ManagedAdamW`.

    Raises:
        ConfigurationError: A group forces something that is no matrix onto the muon route.
    """

    route = "muon"

    def __init__(
        self, runtime: OptimizerRuntime, forced: Mapping[str, str], columns: ColumnPolicy | None = None
    ) -> None:
        self._runtime = runtime
        self._taken = [forced.get(name, matrix.route) == "muon" for name, matrix in runtime.dedicated.items()]
        self._matrices = list(compress(runtime.dedicated.values(), self._taken))
        for matrix in self._matrices:
            if matrix.route != "muon":
                _check_shape(matrix)
            matrix.spec.check_foldable(matrix.param, matrix.name)
        self._stacks = [matrix for matrix in self._matrices if matrix.param.ndim == 3 and not matrix.spec.folded]
        self._parallel = tensor_parallel_matrices(runtime, self._matrices, columns)

    @property
    def params(self) -> Mapping[str, nn.Parameter]:
        return {matrix.name: matrix.param for matrix in self._matrices}

    @property
    def specs(self) -> Mapping[str, MatrixSpec]:
        return {matrix.name: matrix.spec for matrix in self._matrices}

    @torch.no_grad()
    def flags(self) -> Tensor:
        """One per parameter, in plan order, then one per member of every stack.

        A member has one where its gradient on the owner is not zero: an expert without tokens gets zeros.
        """
        seen = torch.tensor(
            [float(flag) for flag in compress(self._runtime.grad_flags(), self._taken)], dtype=torch.float32
        )
        if not self._stacks:
            return seen
        device = self._runtime.topology.device
        return torch.cat([host_to_device(seen, device), *(_members_seen(stack, device) for stack in self._stacks)])

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

        What a tensor-parallel axis has in parts is updated before the rest, by an exchange on that axis.

        Raises:
            ConfigurationError: A gradient is gone; before anything is updated.
        """
        taken: dict[int, MuonRule] = {}
        mine: dict[int, OwnedMatrix] = {}
        members = self._members(reached[len(self._matrices) :])
        for matrix, has_grad in zip(self._matrices, reached, strict=False):
            key = id(matrix.param)
            if has_grad and key in rules:
                taken[key] = rules[key]
                if matrix.is_owner:
                    mine[key] = _owned_matrix(matrix, state[matrix.param], members.get(key))
        count = 0
        if self._parallel is not None:
            parts = {key: mine.pop(key) for key in self._parallel.keys & mine.keys()}
            count = self._parallel.update(taken, parts, orthogonalize, on_batch=on_batch)
        return count + sweep(self._runtime.matrix_units, taken, mine, orthogonalize, on_batch=on_batch)

    def _members(self, reached: Sequence[bool]) -> dict[int, tuple[int, ...]]:
        """Which members of each stack some rank saw a gradient for, by the identity of the parameter."""
        flags = iter(reached)
        return {
            id(stack.param): tuple(index for index in range(len(stack.param)) if next(flags)) for stack in self._stacks
        }

    def newton_schulz_calls(self, rules: Mapping[int, MuonRule], orthogonalize: Orthogonalize) -> set[Call]:
        if self._parallel is None:
            return newton_schulz_calls(self._runtime.matrix_units, rules)
        whole = {key: rule for key, rule in rules.items() if key not in self._parallel.keys}
        return newton_schulz_calls(self._runtime.matrix_units, whole) | self._parallel.newton_schulz_calls(
            rules, orthogonalize
        )

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the matrices that this rank owns; under replication of all, which every rank holds.

        With owners beside a tensor-parallel axis, on which several ranks hold parts or copies, all as they lie.
        """
        topology = self._runtime.topology
        if topology.tensor is not None and not topology.keeps_whole:
            held = {matrix.name: matrix.param.grad for matrix in self._matrices}
        else:
            held = {matrix.name: matrix.held_grad for matrix in self._matrices}
        return {name: grad for name, grad in held.items() if grad is not None}


def _check_shape(matrix: DedicatedMatrix) -> None:
    try:
        matrix.spec.validate(stored_matrices(matrix.param.shape, matrix.spec)[1])
    except (ConfigurationError, NotImplementedError) as error:
        raise type(error)(f"{matrix.name} cannot be put on the muon route by its group: {error}") from error


def _members_seen(stack: DedicatedMatrix, device: torch.device) -> Tensor:
    """One per member whether its gradient is not zero; zeros on ranks that do not own the stack, or saw none."""
    if not stack.is_owner or stack.param.grad is None:
        return torch.zeros(len(stack.param), dtype=torch.float32, device=device)
    grad = local_tensor(stack.param.grad, f"the gradient of {stack.name}")
    seen: Tensor = torch.linalg.vector_norm(grad, float("inf"), dim=(1, 2)) > 0
    return seen.to(torch.float32)


def _owned_matrix(matrix: DedicatedMatrix, state: Mapping[str, Tensor], members: tuple[int, ...] | None) -> OwnedMatrix:
    param, stored = matrix.param, matrix.spec.stored
    if param.grad is None:
        raise ConfigurationError(f"the gradient of {matrix.name!r} is gone: set no .grad to None before step()")
    grad = local_tensor(param.grad, matrix.name)
    return OwnedMatrix(
        name=matrix.name,
        weight=stored(local_tensor(param, matrix.name)),
        grad=stored(grad.contiguous() if matrix.spec.folded else grad),
        momentum=stored(local_tensor(state["momentum_buffer"], matrix.name)),
        spec=matrix.spec.unfolded,
        members=members,
        second_moment=local_tensor(state["second_moment"], matrix.name) if "second_moment" in state else None,
    )
