"""A step that is agreed on beyond the ranks of the model: over the stages of a pipeline.

Each stage is a model of its own, with its own owners and its own agreement. Where the caller asks for it the stages
agree too, on a group of the caller's that joins them: one more small reduction a step, and one in each clip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon_hf.core.errors import ConfigurationError, LockstepError
from dmuon_hf.core.grid_group import GridGroup
from dmuon_hf.core.lockstep import Channel, LockstepMonitor, meet
from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.optim.interfaces import OptimizerRuntime
from dmuon_hf.core.runtime.collectives import device_of_group

__all__ = ["AgreementGroup", "Stages", "sum_over_stages"]

AgreementGroup = ProcessGroup | DeviceMesh


@dataclass(frozen=True, slots=True)
class _Reach:
    """A group as the ranks that it joins, and where it communicates."""

    grid: GridGroup
    device: torch.device

    @classmethod
    def of(cls, group: AgreementGroup) -> _Reach:
        if isinstance(group, DeviceMesh):
            groups = [group.get_group(dim) for dim in range(group.ndim) if group.size(dim) > 1] or [group.get_group(0)]
            ranks = group.mesh.flatten().tolist()
        elif isinstance(group, ProcessGroup):
            groups, ranks = [group], dist.get_process_group_ranks(group)
        else:
            raise ConfigurationError(
                f"agreement_group must be a process group or a device mesh that joins pipeline stages, got {group!r}"
            )
        if dist.get_rank() not in ranks:
            raise ConfigurationError(f"rank {dist.get_rank()} is not among the ranks {ranks} of the agreement_group")
        return cls(GridGroup(groups, ranks), device_of_group(groups[0]))

    def shared_with(self, ranks: Sequence[int]) -> int:
        """How many of ``ranks``, which all bring the same, are in it."""
        return len(set(self.grid.ranks).intersection(ranks))


def sum_over_stages(values: Tensor, group: AgreementGroup | None, ranks: Sequence[int]) -> Tensor:
    """The sum over the stages that ``group`` joins of values that are equal on all ``ranks``, one stage. Collective."""
    if group is None:
        return values
    reach = _Reach.of(group)
    result = (values.detach() / reach.shared_with(ranks)).to(reach.device, copy=True)
    reach.grid.all_reduce(result, dist.ReduceOp.SUM)
    return result.to(values.device)


class Stages:
    """Agreement of a model's ranks with those of other stages; with its own alone where ``group`` is ``None``.

    Every rank of ``group`` makes one at the same time. A rank that has ended, or raised, is named to those of other
    stages that wait for this group, or in a collective of their own model.

    Args:
        group: Ranks of several stages, whichever of each. Together with the ranks of the models it connects them all:
            the pipeline dimension of a mesh, or the whole mesh.
        runtime: That of this rank's model.

    Raises:
        ConfigurationError: ``group`` is no such thing, or without this rank.
    """

    def __init__(self, group: AgreementGroup | None, runtime: OptimizerRuntime) -> None:
        self._reach: _Reach | None = None
        self._runtime = runtime
        if group is None:
            return
        reach = _Reach.of(group)
        if reach.grid.size == 1:
            return
        self._reach = reach
        self._monitor = LockstepMonitor()
        meet("Muon(agreement_group=...)", reach.grid)
        self._monitor.start(Topology.of_ranks(reach.grid, reach.device))
        runtime.watch_also(self._monitor)

    def follow(self, runtime: OptimizerRuntime) -> None:
        """The model was dedicated anew."""
        self._runtime = runtime
        if self._reach is not None:
            runtime.watch_also(self._monitor)

    def maximum(self, values: Tensor) -> Tensor:
        """Elementwise maximum of a small fp32 vector over all ranks of all stages. Collective."""
        return self._reduce(self._runtime.maximum(values), dist.ReduceOp.MAX)

    def reduce_sum(self, values: Tensor) -> Tensor:
        """Elementwise sum of a small vector over all ranks of all stages. Collective."""
        return self.add_up(self._runtime.reduce_sum(values))

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over stages of what is equal on all ranks of each. Collective."""
        if self._reach is None:
            return values
        ranks = self._runtime.topology.ranks or [dist.get_rank()]
        return self._reduce(values / self._reach.shared_with(ranks), dist.ReduceOp.SUM)

    def norm(self, norm: Tensor, norm_type: float) -> Tensor:
        """The norm over all stages of what has ``norm`` in this one. Collective."""
        own = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if math.isinf(norm_type):
            # A maximum over ranks may drop NaN; infinity stands for both.
            return self._reduce(own.nan_to_num(nan=math.inf), dist.ReduceOp.MAX)
        return self.add_up(own.double() ** norm_type).pow(1.0 / norm_type).to(own.dtype)

    def agree(self, nonfinite: bool, refused: bool, grad_scale: Tensor | None) -> bool:
        """Whether a gradient of any stage is infinite or NaN. Collective; the host waits.

        Args:
            nonfinite: Whether one of this stage is.
            refused: Whether this stage will raise, and update nothing.
            grad_scale: Loss scale that the gradients carry, or ``None``.

        Raises:
            LockstepError: Another stage will raise.
            ConfigurationError: The loss scales of the stages differ.
        """
        if self._reach is None:
            return nonfinite
        self._monitor.step += 1
        scale = 1.0 if grad_scale is None else float(grad_scale)
        mine = torch.tensor([nonfinite, refused, scale, -scale], dtype=torch.float32)
        worst, somewhere, largest, smallest = self._reduce(mine, dist.ReduceOp.MAX).tolist()
        if somewhere and not refused:
            raise LockstepError(
                "another pipeline stage refuses this step, and its error says why: no stage has updated anything"
            )
        if largest != -smallest and not refused:
            raise ConfigurationError(
                f"the loss scales of the pipeline stages are {-smallest:g} to {largest:g}: GradScaler.update() saw the "
                "gradients of its own stage alone. After a step that was skipped (optimizer.skipped_steps has grown) "
                "call scaler.update(scaler.get_scale() * scaler.get_backoff_factor()) on every stage"
            )
        return bool(worst)

    def _reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self._reach is None:
            return values
        what = "agreement of the pipeline stages"
        result = values.detach().to(self._reach.device, copy=True)
        self._monitor.issue(Channel.CONTROL, what)
        with self._monitor.at(what):
            self._reach.grid.all_reduce(result, op, wait=self._monitor.wait)
        return result.to(values.device)
