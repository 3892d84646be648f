"""A unit: the dedicated parameters of one hook boundary, gathered, used and reduced together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dmuon_hf.core.errors import DMuonError
from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.runtime.collectives import InFlight
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.dedicated import DedicatedParam, Version
from dmuon_hf.core.runtime.layout import PackedLayout
from dmuon_hf.core.runtime.lockstep import Channel
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from dmuon_hf.core.runtime.placement import WeightPlacement
from dmuon_hf.core.runtime.reduction import OwnerReduction, PendingReduction
from dmuon_hf.core.runtime.states import GradState, WeightState, grad_machine, weight_machine

__all__ = ["Unit"]


class Unit:
    """Weights and gradients of one hook boundary.

    The packed buffer's storage is freed and reallocated in place, so tensors that autograd saved keep pointing at it,
    as in FSDP2. The unsharded parameters view that storage through a version counter of their own: filling the buffer
    again is not a modification that autograd has to refuse, because it restores the same values.

    Attributes:
        params: The dedicated parameters in buffer order.
        requires_sync: Whether backward reduces gradients, or accumulates them locally (``no_sync``).
    """

    def __init__(
        self,
        *,
        name: str,
        index: int,
        module: nn.Module,
        params: Sequence[DedicatedParam],
        layout: PackedLayout,
        topology: Topology,
        context: DedicatedCommContext,
        placement: WeightPlacement,
        reduction: OwnerReduction,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        reshard_after_forward: bool,
    ) -> None:
        self.name = name
        self.index = index
        self.module = module
        self.params = list(params)
        self.layout = layout
        self.topology = topology
        self.context = context
        self.placement = placement
        self.reduction = reduction
        self.reduce_dtype = reduce_dtype
        self.reshard_after_forward = reshard_after_forward
        self.requires_sync = True
        self.saw_grad = [False] * len(self.params)

        self._weights = weight_machine(name)
        self._grads = grad_machine(name)
        self._buffer = torch.empty(layout.numel, dtype=compute_dtype, device=topology.device)
        self._storage_bytes = self._buffer.untyped_storage().nbytes()
        self._unsharded = [self._unsharded_parameter(i) for i in range(len(self.params))]
        self._buffer.untyped_storage().resize_(0)
        self._gathered: tuple[Version, ...] | None = None
        self._gather: InFlight | None = None

        self._accumulated: list[Tensor | None] = [None] * len(self.params)
        self._unsynchronised = 0
        # The gradients this unit put on the owned parameters; any other object there came from the caller.
        self._own_grads: list[Tensor | None] = [None] * len(self.params)
        self._pending: PendingReduction | None = None
        self._forward_calls = 0
        self._inputs_done = False
        self._sent = False
        self._arrived: set[int] = set()
        self._in_forward = 0

    def _unsharded_parameter(self, i: int) -> nn.Parameter:
        shape, segment = self.layout.shapes[i], self.layout.segments[i]
        view = torch.empty(0, dtype=self._buffer.dtype, device=self._buffer.device)
        stride = torch.empty(shape, device="meta").stride()
        view.set_(self._buffer.untyped_storage(), segment.start, shape, stride)
        return nn.Parameter(view, requires_grad=self.params[i].param.requires_grad)

    # -- weights ------------------------------------------------------------------------------------------------------

    @property
    def weight_state(self) -> WeightState:
        return self._weights.state

    @property
    def gather_bytes(self) -> int:
        """Payload of one gather of this unit, in bytes."""
        return self._storage_bytes

    @property
    def reduce_bytes(self) -> int:
        """Payload of one gradient reduction of this unit (the shard stage), in bytes."""
        return self.layout.numel * self.reduce_dtype.itemsize

    @property
    def unsharded(self) -> list[nn.Parameter]:
        """The parameters that the module holds during its forward, in buffer order."""
        return self._unsharded

    def versions(self) -> tuple[Version, ...]:
        return tuple(param.version for param in self.params)

    def gather(self) -> None:
        """Issue the gather of the newest weights unless they are here or on their way. Collective (shard group)."""
        versions = self.versions()
        if self._weights.state is not WeightState.SHARDED:
            if self._gathered == versions:
                return
            self.wait_gather()
        else:
            self._buffer.untyped_storage().resize_(self._storage_bytes)
        self._weights.to(WeightState.GATHERING)
        self._gathered = versions
        self.context.monitor.issue(Channel.SHARD, f"gather of unit {self.name}")
        self._gather = self.placement.gather(self._buffer, versions)

    def wait_gather(self) -> None:
        """Order the current stream (CPU: the host) after the gather."""
        if self._weights.state is WeightState.GATHERING:
            assert self._gather is not None
            with self.context.monitor.at(f"gather of unit {self.name}"):
                self._gather.wait()
            self._gather = None
            self._weights.to(WeightState.GATHERED)

    def reshard(self) -> None:
        """Free the whole weights. They stay while the module's forward is running."""
        if self._in_forward or self._weights.state is WeightState.SHARDED:
            return
        self.wait_gather()
        self._weights.to(WeightState.SHARDED)
        self._buffer.untyped_storage().resize_(0)

    def enter_forward(self, *, in_backward: bool) -> None:
        """Make the module hold the whole weights for its forward."""
        self._unshard()
        if not in_backward:
            self._forward_calls += 1
        self._in_forward += 1

    def leave_forward(self) -> None:
        """Give the owned parameters back to the module; also after an exception in its forward."""
        if self._in_forward == 0:
            return
        self._in_forward -= 1
        if self._in_forward == 0 and self._grads.state is GradState.IDLE:
            self._show_owned()

    def enter_backward(self) -> None:
        """Make the module hold the whole weights until its gradients have left: a recomputation may read them there."""
        if self._grads.state is GradState.IDLE:
            self._grads.to(GradState.COLLECTING)
        self._unshard()

    def _unshard(self) -> None:
        self.gather()
        self.wait_gather()
        for param, unsharded in zip(self.params, self._unsharded, strict=True):
            if unsharded.requires_grad != param.param.requires_grad:
                unsharded.requires_grad_(param.param.requires_grad)
            param.install(unsharded)

    def _show_owned(self) -> None:
        for param in self.params:
            param.install(param.param)

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def grad_state(self) -> GradState:
        return self._grads.state

    @property
    def is_ready(self) -> bool:
        return self._grads.state is GradState.READY

    def inputs_done(self) -> None:
        """Autograd has left the module through its inputs."""
        self._inputs_done = True
        self._settle()

    def grad_arrived(self, i: int) -> None:
        """Autograd has accumulated into unsharded parameter ``i``."""
        if self._sent:
            raise DMuonError(
                f"{self.params[i].name} received a gradient after the gradients of unit {self.name!r} were sent to "
                "their owners: the module's weights were used outside of its forward. Choose a hook boundary that "
                "contains every use (hook_boundary_resolver)."
            )
        if self._grads.state is GradState.IDLE:
            self._grads.to(GradState.COLLECTING)
        self._arrived.add(i)
        self._settle()

    def _settle(self) -> None:
        """Ready once the only use of the weights in this pass is over and every gradient is here.

        With several uses (shared modules, two forwards before one backward) this rank cannot tell which is the last, so
        the unit waits for the end of the pass.
        """
        trainable = sum(unsharded.requires_grad for unsharded in self._unsharded)
        if (
            self._grads.state is GradState.COLLECTING
            and self._inputs_done
            and self._forward_calls == 1
            and len(self._arrived) == trainable
        ):
            self._grads.to(GradState.READY)

    @property
    def has_unsynchronised_grads(self) -> bool:
        """Whether passes under ``no_sync`` wait for one that reduces; the same on every rank."""
        return self._unsynchronised > 0 and any(param.param.grad is not None for param in self.params)

    def launch_reduction(self) -> None:
        """Send the gradients of this pass, and those accumulated before, to the owners. Collective (shard group)."""
        self._fold()
        self._show_owned()
        grads = self._accumulated
        self._accumulated = [None] * len(self.params)
        self._unsynchronised = 0
        self._sent = True
        self._grads.to(GradState.REDUCING)
        self.context.monitor.issue(Channel.SHARD, f"reduction of unit {self.name}")
        self._pending = self.reduction.launch(grads)

    def finish_first_stage(self) -> None:
        if self._pending is not None:
            with self.context.monitor.at(f"reduction of unit {self.name}"):
                self._pending.finish_first_stage()

    def finish_reduction(self) -> None:
        """Add the mean gradients to the owned parameters' ``.grad``, on every rank in the same form."""
        if self._pending is None:
            return
        with self.context.monitor.at(f"reduction of unit {self.name}"):
            bucket = self._pending.finish()
        self._pending = None
        own = iter(self.reduction.own_views(bucket))
        for i, param in enumerate(self.params):
            grad = next(own) if param.is_owner else None
            if param.param.requires_grad:
                self._add_grad(i, grad)
        self._grads.to(GradState.IDLE)

    def end_without_sync(self) -> None:
        """Keep the gradients of this pass on this rank (``no_sync``)."""
        self._fold()
        self._show_owned()
        self._unsynchronised += 1
        for i, param in enumerate(self.params):
            if param.param.requires_grad and param.param.grad is None:
                self._add_grad(i, None)
        if self._grads.state is not GradState.IDLE:
            self._grads.to(GradState.IDLE)

    def _add_grad(self, i: int, grad: Tensor | None) -> None:
        """Add a gradient (``None`` off the owner, or for a zero one) to the owned parameter's ``.grad``."""
        owned = self.params[i].param
        assert isinstance(owned, OwnedTensor)
        if owned.grad is None:
            local = torch.zeros_like(owned._local_tensor) if grad is None else grad.to(owned.dtype)
            owned.grad = OwnedTensor.from_local(local, owned.device_mesh, owner=owned.owner, shape=owned.shape)
            self._own_grads[i] = owned.grad
        elif grad is not None:
            assert isinstance(owned.grad, OwnedTensor)
            owned.grad._local_tensor.add_(grad)

    def has_grad(self, i: int) -> bool:
        """Whether this rank saw a gradient of matrix ``i`` since gradients were zeroed, or the caller set one."""
        grad = self.params[i].param.grad
        return grad is not None and (self.saw_grad[i] or grad is not self._own_grads[i])

    def end_pass(self) -> None:
        """Reset what one backward pass has counted and free the whole weights."""
        self._forward_calls = 0
        self._inputs_done = False
        self._sent = False
        self._arrived.clear()
        self.reshard()

    def _fold(self) -> None:
        """Move autograd's gradients into the accumulation in the reduction's dtype.

        A missing ``.grad`` on the owned parameter means that somebody zeroed gradients since the last pass (through the
        optimizer, the module or the parameter): what was accumulated before is dropped then.
        """
        for i, (param, unsharded) in enumerate(zip(self.params, self._unsharded, strict=True)):
            if param.param.grad is None:
                self._accumulated[i] = None
                self.saw_grad[i] = False
            fresh, unsharded.grad = unsharded.grad, None
            if fresh is None:
                continue
            self.saw_grad[i] = True
            fresh = fresh.detach()
            kept = self._accumulated[i]
            if kept is not None:
                kept.add_(fresh)
            else:
                self._accumulated[i] = fresh.to(self.reduce_dtype)

    def discard_grads(self) -> None:
        """Drop every gradient that has not reached an owner; an unfinished reduction is waited for and dropped."""
        if self._pending is not None:
            with self.context.monitor.at(f"reduction of unit {self.name}"):
                self._pending.finish()
            self._pending = None
        for unsharded in self._unsharded:
            unsharded.grad = None
        self._accumulated = [None] * len(self.params)
        self._unsynchronised = 0
        self.saw_grad = [False] * len(self.params)
        if self._grads.state is not GradState.IDLE:
            self._grads.to(GradState.IDLE)
            self._show_owned()
