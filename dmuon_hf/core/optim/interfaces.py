"""What the optimizer asks of the runtime: the whole of it, so that the two can be read and tested apart.

``binding.py`` finds the runtime of a model. Beside it only ``state.py``, which knows the layouts that state can have,
and ``clip_buckets.py`` and ``stages.py``, which ask what a group communicates with, import from the runtime. The
protocols:

- `MatrixSource`: parameters on the muon route, whatever form they have; the only thing that `Muon` steps.
- `DedicatedMatrix`: a matrix, who computes its update, and how to say that it changed.
- `MatrixUnit`: matrices that become visible together, and their publish.
- `OptimizerRuntime`: the units, the gradients, and what the ranks agree on.

Another way to keep matrices whole for their update is another implementation of the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from dmuon_hf.core.lockstep import LockstepMonitor
from dmuon_hf.core.ns.agreement import Call
from dmuon_hf.core.optim.update import MuonRule, Orthogonalize, OwnedMatrix
from dmuon_hf.core.plan import MatrixSpec

__all__ = [
    "DedicatedMatrix",
    "Layout",
    "MatrixSource",
    "MatrixUnit",
    "OnBatch",
    "OptimizerRuntime",
    "TensorAxis",
    "TensorPart",
]

OnBatch: TypeAlias = Callable[[Sequence[OwnedMatrix]], None]
"""Called before each batch that is orthogonalised, with its matrices."""


class MatrixSource(Protocol):
    """Parameters on the muon route: where gradient, momentum and weight are on this rank, and who computes the update.

    The state of a parameter is ``momentum_buffer``, in the layout of the parameter; of a dedicated one, in that of its
    ``state_like``. Where its rule normalises rows it has a ``second_moment`` too, which whoever holds some of a matrix
    keeps for all its rows, equal on all of them after a step. Ranks that share a parameter call every method together,
    in the same order.
    """

    @property
    def route(self) -> str:
        """Name of this kind of source, for descriptions."""

    @property
    def params(self) -> Mapping[str, nn.Parameter]:
        """This rank's parameters by canonical name."""

    @property
    def specs(self) -> Mapping[str, MatrixSpec]:
        """The logical matrices in each of them, in a stack those of a member."""

    def flags(self) -> Tensor:
        """Float32 vector of what this rank saw gradients for; as long on every rank. Does not synchronise.

        Its elementwise maximum over all ranks comes back as ``reached``; what an element stands for is the source's.
        """

    def update(
        self,
        rules: Mapping[int, MuonRule],
        state: Mapping[Tensor, Mapping[str, Tensor]],
        reached: Sequence[bool],
        orthogonalize: Orthogonalize,
        *,
        on_batch: OnBatch | None = None,
    ) -> int:
        """Update momentum and weight of what is reached. Collective.

        Args:
            rules: The rule of each parameter's group, by the parameter's identity; without one it is left alone.
            state: The optimizer's state.
            reached: What all ranks agreed on, as ``flags``.
            orthogonalize: Newton-Schulz.
            on_batch: Called before each batch.

        Returns:
            Logical matrices that were orthogonalised on this rank.
        """

    def newton_schulz_calls(self, rules: Mapping[int, MuonRule], orthogonalize: Orthogonalize) -> set[Call]:
        """Every distinct call that any rank makes in a step in which every matrix is reached. No communication."""

    def gradients(self) -> dict[str, Tensor]:
        """Live gradients that this rank holds some of, by name: DTensors, or plain where no other rank holds any."""


T = TypeVar("T")


class DedicatedMatrix(Protocol):
    """One dedicated parameter.

    ``param``, its ``.grad`` and its state have one layout: whole on the rank that computes the update, ``owner``, and
    without rows on the others. Under replication parameter and gradient are whole on all ranks. With a ``part`` all
    that holds for this rank's part of it on the tensor-parallel axis.
    """

    @property
    def name(self) -> str: ...
    @property
    def param(self) -> nn.Parameter: ...
    @property
    def spec(self) -> MatrixSpec: ...
    @property
    def state_like(self) -> Tensor:
        """A tensor in the layout of the state."""

    @property
    def held_grad(self) -> Tensor | None:
        """The live gradient as far as this rank holds it: plain where no other rank does, a DTensor where others do."""

    @property
    def route(self) -> str: ...
    @property
    def optim_dtype(self) -> torch.dtype | None: ...
    @property
    def is_sharded(self) -> bool:
        """Whether nobody owns it, and every rank keeps and updates some rows."""

    @property
    def is_owner(self) -> bool: ...
    @property
    def owner(self) -> tuple[int, int]: ...
    @property
    def part(self) -> TensorPart | None:
        """Its place on the tensor-parallel axis; ``None`` where every rank there has the whole."""

    def mark_updated(self) -> None:
        """The owner has updated the matrix, so that gathered copies are stale. Called on every rank."""


class MatrixUnit(Protocol):
    """Matrices that become visible to the other ranks together."""

    @property
    def name(self) -> str: ...
    @property
    def matrices(self) -> Sequence[DedicatedMatrix]: ...
    def publish(self) -> None:
        """Issue what brings the updates to other replicas; the next forward waits for it. Collective under HSDP."""


class TensorPart(Protocol):
    """Where a matrix lies on the tensor-parallel axis."""

    @property
    def placement(self) -> Placement: ...


class TensorAxis(Protocol):
    """The tensor-parallel ranks at this rank's data-parallel place."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def group(self) -> ProcessGroup | None: ...


class Layout(Protocol):
    """The part of the topology that the optimizer uses."""

    @property
    def mesh(self) -> DeviceMesh | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def compares_replicas(self) -> bool: ...
    @property
    def replica_distance(self) -> int: ...
    @property
    def keeps_whole(self) -> bool: ...
    @property
    def slot(self) -> tuple[int, int]: ...
    @property
    def ranks(self) -> Sequence[int] | None: ...
    @property
    def tensor(self) -> TensorAxis | None: ...


class OptimizerRuntime(Protocol):
    """Every method is called by all ranks of the model in the same order."""

    @property
    def topology(self) -> Layout: ...
    @property
    def dedicated(self) -> Mapping[str, DedicatedMatrix]: ...
    @property
    def matrix_units(self) -> Sequence[MatrixUnit]: ...
    @property
    def backward_count(self) -> int: ...
    @property
    def reused_buffers(self) -> Collection[Literal["gather", "scatter"]]:
        """The ways of the exchange on a tensor-parallel axis whose buffers are kept."""

    def prepare_grads(self) -> None: ...
    def grad_flags(self) -> list[bool]: ...
    @property
    def left_frozen(self) -> Collection[str]: ...
    @property
    def stacks(self) -> Mapping[str, MatrixSpec]: ...
    def misplaced(self, model: nn.Module) -> dict[str, str]: ...
    def unsynchronised(self, param: nn.Parameter) -> str | None: ...
    def any_rank(self, condition: bool) -> bool: ...
    def exchange(self, value: T) -> list[T]: ...
    def agree(self, values: Tensor) -> Tensor: ...
    def maximum(self, values: Tensor) -> Tensor: ...
    def reduce_sum(self, values: Tensor) -> Tensor: ...
    def from_first(self, value: Any) -> Any: ...
    def discard_grads(self) -> None: ...
    def finish_publish(self) -> None: ...
    def set_forward_prefetch_depth(self, depth: int) -> None: ...
    def prefetch_first(self, count: int) -> None: ...
    def prefetch_sharded(self) -> None: ...
    def separate_row_stream(self, separate: bool) -> None: ...
    def fence(self) -> None: ...
    def watch_also(self, monitor: LockstepMonitor) -> None:
        """Let waits of this runtime end when ``monitor``, of more ranks, proves that they are in vain."""
