"""Dedicated matrices whose parts lie on several tensor-parallel ranks: brought together on that axis alone.

All parts of a matrix have their owners at one data-parallel place, where the ranks of the tensor-parallel axis have it
together. Momentum is kept by part; directions travel to one worker of them for each matrix, updates travel back, in the
packed buckets of :mod:`dmuon_hf.core.sharded`, or only Gram matrices travel (:mod:`.columns`). The axis of each
data-parallel place works for itself, on what is owned there, so the work is divided over all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dmuon_hf.core.ns.agreement import Call
from dmuon_hf.core.optim.columns import ColumnPolicy, require_gram, update_columns
from dmuon_hf.core.optim.interfaces import DedicatedMatrix, OnBatch, OptimizerRuntime, TensorAxis
from dmuon_hf.core.optim.update import MuonRule, Orthogonalize, OwnedMatrix
from dmuon_hf.core.scratch import Way
from dmuon_hf.core.sharded.exchange import Exchange
from dmuon_hf.core.sharded.itinerary import itinerary_of
from dmuon_hf.core.sharded.plan import ShardedEntry, ShardedPlan, make_sharded_plan
from dmuon_hf.core.sharded.ranks import Team
from dmuon_hf.core.sharded.second_moments import SecondMoments
from dmuon_hf.core.sharded.step import LocalParameter, ShardedStep
from dmuon_hf.core.sharded.workload import newton_schulz_calls
from dmuon_hf.core.shards.layout import Cut, ShardLayout

__all__ = ["TensorParallelMatrices", "tensor_parallel_matrices"]


class TensorParallelMatrices:
    """The matrices of a runtime that have parts, and the work of this rank on those that are owned at its place.

    Args:
        matrices: All that have a ``part``, of all owners, in plan order.
        axis: The tensor-parallel axis through this rank.
        slot: This rank's data-parallel place.
        team: The ranks of the axis.
        policy: Which of them are orthogonalised where their parts lie; ``None``: none.
        reused: The ways whose exchange buffers are kept between batches and steps.
    """

    def __init__(
        self,
        matrices: Sequence[DedicatedMatrix],
        axis: TensorAxis,
        slot: tuple[int, int],
        team: Team,
        policy: ColumnPolicy | None = None,
        reused: Collection[Way] = (),
    ) -> None:
        self._policy = policy
        self.keys = frozenset(id(matrix.param) for matrix in matrices)
        self._names = {matrix.name: id(matrix.param) for matrix in matrices}
        self._team = team
        by_owner: dict[tuple[int, int], list[DedicatedMatrix]] = {slot: []}
        for matrix in matrices:
            by_owner.setdefault(matrix.owner, []).append(matrix)
        # Of the other places only what their ranks compute is asked for, which does not depend on who they are.
        self._plans: dict[tuple[int, int], ShardedPlan] = {
            owner: make_sharded_plan([_entry(matrix, axis) for matrix in owned], axis.ranks)
            for owner, owned in by_owner.items()
        }
        self._here = by_owner[slot]
        self._plan = self._plans[slot]
        self._itinerary = itinerary_of(self._plan, team.rank)
        self._exchange = Exchange(team, reused)
        self._second_moments = SecondMoments(self._plan, self._exchange)

    def update(
        self,
        rules: Mapping[int, MuonRule],
        mine: Mapping[int, OwnedMatrix],
        orthogonalize: Orthogonalize,
        *,
        on_batch: OnBatch | None = None,
    ) -> int:
        """Update this rank's parts; returns how many logical matrices it orthogonalised. Collective over the axis.

        Args:
            rules: The rule of each matrix that takes part in this step, by the identity of its parameter.
            mine: This rank's parts of them, by the same; others are left out.
            orthogonalize: Newton-Schulz.
            on_batch: Called before each batch with this rank's parts of its matrices.
        """
        local: dict[int, LocalParameter] = {}
        columns: list[tuple[ShardedEntry, OwnedMatrix, MuonRule]] = []
        for index, (matrix, entry) in enumerate(zip(self._here, self._plan.entries, strict=True)):
            key = id(matrix.param)
            if key not in mine:
                continue
            part = mine[key]
            if self._stays(entry, rules[key], orthogonalize):
                columns.append((entry, part, rules[key]))
            else:
                local[index] = LocalParameter(part.weight, part.grad, part.momentum, rules[key], part.second_moment)
        count = 0
        if columns:
            assert self._team.group is not None
            count = update_columns(columns, self._team.group, require_gram(orthogonalize))
        step = ShardedStep(
            self._plan,
            self._itinerary,
            self._exchange,
            local=local,
            reached=[[index in local] for index in range(len(self._here))],
            second_moments=self._second_moments,
            normalised=[index for index, part in local.items() if part.rule.normalises_rows],
            orthogonalize=orthogonalize,
            on_batch=on_batch,
        )
        return count + step.run()

    def _stays(self, entry: ShardedEntry, rule: MuonRule, orthogonalize: Orthogonalize) -> bool:
        """Whether a matrix is orthogonalised where its parts lie."""
        if self._policy is None:
            return False
        return self._policy.takes(entry, rule, require_gram(orthogonalize), self._team.device)

    def newton_schulz_calls(self, rules: Mapping[int, MuonRule], orthogonalize: Orthogonalize) -> set[Call]:
        """Every distinct call that any rank makes for whole matrices among these. No communication."""
        calls: set[Call] = set()
        for plan in self._plans.values():
            named = {
                entry.name: rules[self._names[entry.name]]
                for entry in plan.entries
                if self._names[entry.name] in rules
                and not self._stays(entry, rules[self._names[entry.name]], orthogonalize)
            }
            calls |= newton_schulz_calls(plan, named, orthogonalize, self._team.device)
        return calls


def tensor_parallel_matrices(
    runtime: OptimizerRuntime, owned: Sequence[DedicatedMatrix], policy: ColumnPolicy | None = None
) -> TensorParallelMatrices | None:
    """Those of ``owned`` that have parts on a tensor-parallel axis; ``None`` if there are none."""
    topology = runtime.topology
    matrices = [matrix for matrix in owned if matrix.part is not None]
    if topology.tensor is None or not matrices:
        return None
    axis = topology.tensor
    team = Team(axis.ranks, axis.ranks[axis.rank], topology.device, axis.group)
    return TensorParallelMatrices(matrices, axis, topology.slot, team, policy, runtime.reused_buffers)


def _entry(matrix: DedicatedMatrix, axis: TensorAxis) -> ShardedEntry:
    assert matrix.part is not None
    cut = None if matrix.part.placement.is_replicate() else Cut(matrix.part.placement.dim)  # type: ignore[attr-defined]
    layout = ShardLayout(tuple(matrix.param.shape), (axis.size,), tuple(axis.ranks), (cut,))
    return ShardedEntry(matrix.name, matrix.param.dtype, matrix.spec, layout)
