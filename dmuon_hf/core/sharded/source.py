"""``ShardedSource``: Muon on parameters that stay where they are, DTensors of any layout.

Momentum is elementwise, so every rank keeps it for its own part. What needs the whole matrix travels: directions to one
worker for each matrix, updates home to everyone who holds some of it. A matrix that lies whole on a rank stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.lockstep import LockstepMonitor
from dmuon_hf.core.ns.agreement import Call
from dmuon_hf.core.optim.gradients import local_tensor
from dmuon_hf.core.optim.interfaces import OnBatch
from dmuon_hf.core.optim.update import MuonRule, Orthogonalize
from dmuon_hf.core.plan import LinkCosts, MatrixSpec, stored_matrices
from dmuon_hf.core.sharded.exchange import Exchange
from dmuon_hf.core.sharded.itinerary import itinerary_of
from dmuon_hf.core.sharded.plan import BUCKET_NUMEL, ShardedEntry, make_sharded_plan
from dmuon_hf.core.sharded.ranks import agree_on_entries, join
from dmuon_hf.core.sharded.second_moments import SecondMoments
from dmuon_hf.core.sharded.step import LocalParameter, ShardedStep
from dmuon_hf.core.sharded.workload import newton_schulz_calls
from dmuon_hf.core.shards.layout import layout_of
from dmuon_hf.core.shards.runs import placed

__all__ = ["ShardedMatrix", "ShardedSource"]


@dataclass(frozen=True, slots=True)
class ShardedMatrix:
    """One parameter: ``(out, in)``, or a stack ``(count, out, in)`` whose every member ``spec`` describes."""

    name: str
    param: nn.Parameter
    spec: MatrixSpec = field(default_factory=MatrixSpec)

    def stored(self, tensor: Tensor, what: str) -> Tensor:
        """What this rank holds of the parameter, or of what lies as it, as the matrix or stack that is stored there."""
        local = local_tensor(tensor, what)
        return self.spec.stored(local.contiguous() if self.spec.folded and tensor is self.param.grad else local)


def _entry(matrix: ShardedMatrix, rank: int) -> ShardedEntry:
    layout = layout_of(matrix.param, matrix.name, rank=rank)
    stored_matrices(matrix.param.shape, matrix.spec)
    matrix.spec.check_foldable(matrix.param, matrix.name)
    if matrix.spec.folded:
        layout = layout.folded(matrix.name)
    return ShardedEntry(matrix.name, matrix.param.dtype, matrix.spec.unfolded, layout)


class ShardedSource:
    """`MatrixSource` of the parameters of one optimizer that stay where they are, their workers and their exchange.

    All ranks of the parameters' meshes construct it together.

    Args:
        matrices: This rank's parameters.
        bucket_numel: Most elements that a worker takes in with one bucket. Two buckets are in memory at a time.
        links: Costs of the wire, by which copies of a matrix share the work or not; by default those usual for the
            device.
        mesh: Of some of the ranks that step together, which all hold what is plain alike; ``None`` if it is this
            rank's alone.
        monitor: That of the ranks that step together: it names the ranks where an exchange is waited for in vain.

    Raises:
        ConfigurationError: A parameter is neither a matrix nor a stack, or its local tensors do not fit its placements.
        LockstepError: The ranks have different parameters.
    """

    route = "sharded_muon"

    def __init__(
        self,
        matrices: Sequence[ShardedMatrix],
        *,
        bucket_numel: int = BUCKET_NUMEL,
        links: LinkCosts | None = None,
        mesh: DeviceMesh | None = None,
        monitor: LockstepMonitor | None = None,
    ) -> None:
        self._mesh = mesh
        self.matrices = {matrix.name: matrix for matrix in matrices}
        self.team = join([matrix.param for matrix in matrices])
        mine = [_entry(matrix, self.team.rank) for matrix in matrices]
        with torch.no_grad():
            shapes = [tuple(matrix.stored(matrix.param, matrix.name).shape) for matrix in matrices]
        entries = agree_on_entries(mine, shapes, self.team)
        links = links or LinkCosts.beside(self.team.device.type)
        self.plan = make_sharded_plan(entries, self.team.ranks, bucket_numel=bucket_numel, links=links)
        if len(set(self.team.gather(self.plan.digest()))) != 1:
            raise LockstepError(
                "the ranks planned their sharded matrices differently, though they know the same of them"
            )
        self._itinerary = itinerary_of(self.plan, self.team.rank)
        self._exchange = Exchange(self.team, wait=None if monitor is None else _watched(monitor))
        self._second_moments = SecondMoments(self.plan, self._exchange)
        self._known_normalised: frozenset[int] | None = None
        self._first_flag = _offsets(entry.count for entry in self.plan.entries)

    @property
    def params(self) -> Mapping[str, nn.Parameter]:
        return {name: matrix.param for name, matrix in self.matrices.items()}

    @property
    def specs(self) -> Mapping[str, MatrixSpec]:
        return {name: matrix.spec for name, matrix in self.matrices.items()}

    # -- what is to be agreed on -------------------------------------------------------------------------------------

    @torch.no_grad()
    def flags(self) -> Tensor:
        """Per stored matrix of all ranks whether this one saw a gradient for it.

        A member of a stack has one where its part here is not zero: an expert without tokens gets zeros.
        """
        flags = torch.zeros(self._first_flag[-1], dtype=torch.float32, device=self.team.device)
        for index, entry, matrix in self._mine():
            grad = matrix.param.grad
            if grad is None:
                continue
            first = self._first_flag[index]
            if not entry.is_stack:
                flags[first] = 1.0
                continue
            local = local_tensor(grad, f"the gradient of {entry.name}")
            if local.numel() == 0:
                continue
            seen = (torch.linalg.vector_norm(local, float("inf"), dim=(1, 2)) > 0).to(flags)
            coordinate = entry.layout.coordinates()[entry.layout.ranks.index(self.team.rank)]
            for inner, outer in placed(entry.layout.held(coordinate)[0]):
                flags[first + outer.start : first + outer.stop] = seen[inner]
        return flags

    # -- step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(
        self,
        rules: Mapping[int, MuonRule],
        state: Mapping[Tensor, Mapping[str, Tensor]],
        reached: Sequence[bool],
        orthogonalize: Orthogonalize,
        *,
        on_batch: OnBatch | None = None,
    ) -> int:
        """Update what this rank holds of every matrix that some rank saw a gradient for. Collective over the team."""
        local = {
            index: LocalParameter(
                weight=matrix.stored(matrix.param, matrix.name),
                grad=self._gradient(matrix),
                rule=rules[id(matrix.param)],
                **_local_state(state[matrix.param], matrix),
            )
            for index, _, matrix in self._mine()
            if id(matrix.param) in rules
        }
        left_alone = {name for name, matrix in self.matrices.items() if id(matrix.param) not in rules}
        taken = [
            [flag and entry.name not in left_alone for flag in reached[first : first + entry.count]]
            for first, entry in zip(self._first_flag, self.plan.entries, strict=False)
        ]
        return ShardedStep(
            self.plan,
            self._itinerary,
            self._exchange,
            local=local,
            reached=taken,
            second_moments=self._second_moments,
            normalised=self._normalised(rules),
            orthogonalize=orthogonalize,
            on_batch=on_batch,
        ).run()

    def _normalised(self, rules: Mapping[int, MuonRule]) -> Collection[int]:
        """The entries whose rows are normalised, known to every rank of the team; their rules never change.

        The first call is a collective over the team where some rank holds other parameters than another.
        """
        if self._known_normalised is None:
            rule_of = {index: rules.get(id(matrix.param)) for index, _, matrix in self._mine()}
            mine = [index for index, rule in rule_of.items() if rule is not None and rule.normalises_rows]
            everywhere = all(set(entry.layout.ranks) == set(self.team.ranks) for entry in self.plan.entries)
            found = [mine] if everywhere else self.team.gather(mine)
            self._known_normalised = frozenset(index for indices in found for index in indices)
        return self._known_normalised

    def newton_schulz_calls(self, rules: Mapping[int, MuonRule], orthogonalize: Orthogonalize) -> set[Call]:
        named = {name: rules[id(m.param)] for name, m in self.matrices.items() if id(m.param) in rules}
        return newton_schulz_calls(self.plan, named, orthogonalize, self.team.device)

    def gradients(self) -> dict[str, Tensor]:
        """Every gradient, as the parameter lies; a plain one that others hold too as a DTensor around it."""
        grads = {name: m.param.grad for name, m in self.matrices.items() if m.param.grad is not None}
        return {name: self._shared(grad) for name, grad in grads.items()}

    def _shared(self, grad: Tensor) -> Tensor:
        if self._mesh is None or isinstance(grad, DTensor):
            return grad
        return DTensor.from_local(grad, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)

    def _gradient(self, matrix: ShardedMatrix) -> Tensor:
        """The local gradient; zeros where this rank saw none but another one did, or none was reached."""
        grad = matrix.param.grad
        if grad is None:
            return torch.zeros_like(matrix.stored(matrix.param, matrix.name))
        return matrix.stored(grad, f"the gradient of {matrix.name}")

    def _mine(self) -> Iterable[tuple[int, ShardedEntry, ShardedMatrix]]:
        for index, entry in enumerate(self.plan.entries):
            if self.team.rank in entry.layout.ranks:
                yield index, entry, self.matrices[entry.name]


def _watched(monitor: LockstepMonitor) -> Callable[[Any], None]:
    def wait(work: Any) -> None:
        with monitor.at("exchange of sharded matrices"):
            monitor.wait(work)

    return wait


def _local_state(state: Mapping[str, Tensor], matrix: ShardedMatrix) -> dict[str, Tensor]:
    """This rank's part of the state of a parameter, as :class:`LocalParameter` names it."""
    local = {"momentum": matrix.stored(state["momentum_buffer"], matrix.name)}
    if "second_moment" in state:
        local["second_moment"] = local_tensor(state["second_moment"], matrix.name)
    return local


def _offsets(counts: Iterable[int]) -> list[int]:
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets
