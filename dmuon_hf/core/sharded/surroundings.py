"""What the optimizer asks of the surroundings of a model without dedicated parameters.

Gradients are synchronised by whoever sharded the model, so there are no hooks; what is left is what the ranks agree on.
The lockstep monitor follows that alone: a rank that does not come to a step, or is gone, is named while the others wait
in one. Passes of backward are not counted; each one that communicates makes the ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon_hf.core.grid_group import GridGroup
from dmuon_hf.core.lockstep import Channel, LockstepMonitor
from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.plan import MatrixSpec
from dmuon_hf.core.runtime.fsdp_grads import discard_unreduced_grads
from dmuon_hf.core.scratch import Way
from dmuon_hf.core.sharded.ranks import Team

__all__ = ["Surroundings"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where this rank stands in the team."""

    device: torch.device
    slot: tuple[int, int]
    ranks: Sequence[int] | None
    compares_replicas: bool = False
    keeps_whole: bool = False
    replica_distance: int = 1
    tensor: None = None
    mesh: None = None


class Surroundings:
    """The ranks that step together on a model without dedicated parameters."""

    def __init__(self, model: nn.Module, team: Team) -> None:
        self._model = model
        self._team = team
        self.topology = _Place(
            device=team.device,
            slot=(team.ranks.index(team.rank), 0),
            ranks=None if team.group is None else team.ranks,
        )
        self.monitor = LockstepMonitor()
        if team.group is not None:
            self.monitor.start(_topology(team, team.group))
        self.dedicated: Mapping[str, Any] = {}
        self.matrix_units: Sequence[Any] = ()
        self.left_frozen: frozenset[str] = frozenset()
        self.stacks: Mapping[str, MatrixSpec] = {}

    @property
    def reused_buffers(self) -> frozenset[Way]:
        """None: what lies in shards travels in fresh buffers."""
        return frozenset()

    # -- gradients ---------------------------------------------------------------------------------------------------

    @property
    def backward_count(self) -> int:
        """Nobody counts: there are no hooks."""
        return 0

    @torch.no_grad()
    def prepare_grads(self) -> None:
        """Make parameters and gradients ready for an update: every parameter sharded, every gradient laid out as it.

        FSDP2 keeps whole weights after a forward without a backward, and would use them again. DTensor leaves partial
        sums on weights that tensor-parallel ranks keep whole and use on parts of a sequence. Collective for those.
        """
        for module in self._fsdp():
            module.reshard()
        for param in self._model.parameters():
            grad = param.grad
            if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
                param.grad = grad.redistribute(placements=param.placements)

    def grad_flags(self) -> list[bool]:
        return []

    def discard_grads(self) -> None:
        """Drop what FSDP2 keeps of passes that were never reduced."""
        for module in self._fsdp():
            discard_unreduced_grads(module)

    def _fsdp(self) -> list[FSDPModule]:
        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]

    # -- what the model uses -----------------------------------------------------------------------------------------

    def misplaced(self, model: nn.Module) -> dict[str, str]:
        return {}

    def unsynchronised(self, param: nn.Parameter) -> str | None:
        return None

    # -- agreement ---------------------------------------------------------------------------------------------------

    def agree(self, values: Tensor) -> Tensor:
        """:meth:`maximum` once per optimizer step, on the host. Collective."""
        with self.monitor.at("optimizer agreement"):
            agreed = self._all_reduce(values, dist.ReduceOp.MAX, "optimizer agreement").cpu()
        self.monitor.step += 1
        return agreed

    def maximum(self, values: Tensor) -> Tensor:
        """Elementwise maximum of a small vector over all ranks. Collective."""
        return self._all_reduce(values, dist.ReduceOp.MAX, "agreement of the ranks")

    def reduce_sum(self, values: Tensor) -> Tensor:
        """Elementwise sum of a small vector over all ranks. Collective."""
        return self._all_reduce(values, dist.ReduceOp.SUM, "sum over the ranks")

    def any_rank(self, condition: bool) -> bool:
        """Whether ``condition`` holds on some rank. Collective."""
        return bool(self.maximum(torch.tensor([float(condition)])).item())

    def exchange(self, value: T) -> list[T]:
        """What each rank passes; small and picklable. Collective."""
        what = "exchange of what each rank found"
        self.monitor.issue(Channel.CONTROL, what)
        with self.monitor.at(what):
            return self._team.gather(value)

    def from_first(self, value: T) -> T:
        """What the first rank passes, on all. Collective."""
        return self.exchange(value)[0]

    def _all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        self.monitor.issue(Channel.CONTROL, what)
        with self.monitor.at(what):
            return self._team.all_reduce(values, op, self.monitor.wait)

    # -- weights -----------------------------------------------------------------------------------------------------

    def finish_publish(self) -> None:
        """Nothing is published: every rank updates what it holds."""

    def prefetch_sharded(self) -> None:
        """Nothing: what is sharded here, others gather."""

    def separate_row_stream(self, separate: bool) -> None:
        """Nothing, as well."""

    def prefetch_first(self, count: int) -> None:
        """Nothing is gathered here; see :meth:`set_forward_prefetch_depth`."""

    def fence(self) -> None:
        """The ranks have no process group of this package's own."""

    def watch_also(self, monitor: LockstepMonitor) -> None:
        """Let waits here end when ``monitor``, of more ranks, proves that they are in vain."""
        self.monitor.follow(monitor)

    def set_forward_prefetch_depth(self, depth: int) -> None:
        """Whoever sharded the model gathers it."""


def _topology(team: Team, group: ProcessGroup) -> Topology:
    """The team as the monitor knows ranks: one row of them."""
    return Topology.of_ranks(GridGroup([group], team.ranks), team.device)
