"""The weights of a unit: gathered, shown to the module, and freed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.profiler import record_function

from dmuon_hf.core.lockstep import Channel
from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.runtime.collectives import InFlight
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.dedicated import DedicatedParam, Version, without_values
from dmuon_hf.core.runtime.layout import PackedLayout
from dmuon_hf.core.runtime.placement import WeightPlacement
from dmuon_hf.core.runtime.states import WeightState, weight_machine

__all__ = ["UnitWeights"]


class UnitWeights:
    """Whole weights of one unit in a packed buffer, beside the owned parameters they are made from.

    The buffer's storage is freed and reallocated in place, so tensors that autograd saved keep pointing at it, as in
    FSDP2. The unsharded parameters view that storage through a version counter of their own: filling the buffer again
    is not a modification that autograd has to refuse, because it restores the same values.

    Attributes:
        name: Path of the boundary module.
        placement: How the weights become whole.
        unsharded: What the module holds during its forward and backward, in buffer order.
        buffer: The packed weights; without memory while they are sharded.
    """

    def __init__(
        self,
        *,
        name: str,
        params: Sequence[DedicatedParam],
        layout: PackedLayout,
        topology: Topology,
        context: DedicatedCommContext,
        placement: WeightPlacement,
        compute_dtype: torch.dtype,
    ) -> None:
        self.placement = placement
        self.buffer = torch.empty(placement.buffer_numel, dtype=compute_dtype, device=topology.device)
        self.nbytes = self.buffer.untyped_storage().nbytes()
        self.name = name
        self._params = params
        self._layout = layout
        self._context = context
        self._machine = weight_machine(name)
        self.unsharded = [self._unsharded_parameter(i) for i in range(len(params))]
        self.buffer.untyped_storage().resize_(0)
        self._versions: tuple[Version, ...] | None = None
        self._gather: InFlight | None = None
        self._readers = 0

    def _unsharded_parameter(self, i: int) -> nn.Parameter:
        shape, segment = self._layout.shapes[i], self._layout.segments[i]
        view = torch.empty(0, dtype=self.buffer.dtype, device=self.buffer.device)
        stride = torch.empty(shape, device="meta").stride()
        view.set_(self.buffer.untyped_storage(), segment.start, shape, stride)
        param = self._params[i]
        shown = view if param.part is None else param.part.show(view)
        return nn.Parameter(shown, requires_grad=param.param.requires_grad)

    @property
    def state(self) -> WeightState:
        return self._machine.state

    @property
    def is_read(self) -> bool:
        """Whether a forward of the module is running."""
        return self._readers > 0

    def versions(self) -> tuple[Version, ...]:
        """What the current contents of the owned parameters are called."""
        return tuple(param.version for param in self._params)

    def gather(self) -> None:
        """Issue the gather of the newest weights unless they are here or on their way. Collective (shard group)."""
        versions = self.versions()
        if self.state is WeightState.SHARDED:
            self._require_values()
            self.buffer.untyped_storage().resize_(self.nbytes)
        elif self._versions == versions:
            return
        else:
            self.wait()
        self._context.monitor.issue(Channel.SHARD, f"gather of unit {self.name}")
        self._machine.to(WeightState.GATHERING)
        self._versions = versions
        with record_function(f"dmuon::gather {self.name}"), self._profiled_gather():
            self._gather = self.placement.gather(self.buffer, versions)

    def _require_values(self) -> None:
        """Refuse weights of a model that was dedicated on meta and not materialised since; so on every rank."""
        for param in self._params:
            if param.param.is_meta and self.buffer.device.type != "meta":
                raise without_values(param.name, self.buffer.device)

    def wait(self) -> None:
        """Order the current stream (CPU: the host) after the gather."""
        if self.state is WeightState.GATHERING:
            assert self._gather is not None
            with self._context.monitor.at(f"gather of unit {self.name}"), self._profiled_wait():
                self._gather.wait()
            self._gather = None
            self._machine.to(WeightState.GATHERED)

    def _profiled_gather(self) -> AbstractContextManager[None]:
        profile = self._context.forward_profile
        if profile is None:
            return nullcontext()
        return profile.gather(self.name, self.nbytes, self.placement.stream)

    def _profiled_wait(self) -> AbstractContextManager[None]:
        profile = self._context.forward_profile
        return nullcontext() if profile is None else profile.wait(self.name)

    def reshard(self) -> None:
        """Free the whole weights. They stay while a forward of the module is running."""
        if self._readers or self.state is WeightState.SHARDED:
            return
        self.wait()
        self._machine.to(WeightState.SHARDED)
        self.buffer.untyped_storage().resize_(0)

    def hold(self) -> None:
        """A forward of the module begins: the weights stay whole until it has ended."""
        self._readers += 1

    def release(self) -> bool:
        """A forward of the module has ended, also by an exception; whether that was the last one under way."""
        if self._readers == 0:
            return False
        self._readers -= 1
        return self._readers == 0

    def show_whole(self) -> None:
        """Make the module hold the whole weights, gathered unless they are here. Collective (shard group)."""
        for param in self._params:
            param.refuse_tensor_hooks()
        self.gather()
        self.wait()
        for param, unsharded in zip(self._params, self.unsharded, strict=True):
            if unsharded.requires_grad != param.param.requires_grad:
                unsharded.requires_grad_(param.param.requires_grad)
            param.install(unsharded)

    def show_owned(self) -> None:
        """Give the owned parameters back to the module."""
        for param in self._params:
            param.install(param.param)
