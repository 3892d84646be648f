"""The gradients of a unit: collected by autograd on this rank, sent to the owners, added to the owned parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.weak import TensorWeakRef

from dmuon_hf.core.errors import DMuonError
from dmuon_hf.core.lockstep import Channel
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.dedicated import DedicatedParam
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from dmuon_hf.core.runtime.reduction import PendingReduction, Reduction
from dmuon_hf.core.runtime.states import GradState, grad_machine

__all__ = ["UnitGrads"]


class UnitGrads:
    """Gradients of one unit through a backward pass, and those of passes under ``no_sync`` before it.

    Attributes:
        reduce_dtype: Dtype in which they are accumulated on this rank and travel.
    """

    def __init__(
        self,
        *,
        name: str,
        params: Sequence[DedicatedParam],
        unsharded: Sequence[nn.Parameter],
        context: DedicatedCommContext,
        reduction: Reduction,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.reduce_dtype = reduce_dtype
        self._name = name
        self._params = params
        self._unsharded = unsharded
        self._context = context
        self._reduction = reduction
        self._machine = grad_machine(name)
        self._pending: PendingReduction | None = None
        # Forwards since the end of the last pass: how often this pass may come through.
        self._uses = 0
        # Passes under no_sync since the last one that reduced, and what they left.
        self._unreduced_passes = 0
        self._accumulated: list[Tensor | None] = [None] * len(params)
        # Per matrix: whether this rank saw a gradient since gradients were zeroed, and the tensor that this unit put on
        # the owned parameter. Any other object there came from the caller.
        self._seen = [False] * len(params)
        # What this class put on `.grad`, which whoever zeroes gradients may free at once.
        self._put: list[TensorWeakRef | None] = [None] * len(params)

    @property
    def state(self) -> GradState:
        return self._machine.state

    @property
    def reads_weights(self) -> bool:
        """Whether a backward pass is inside the unit, so that its module has to hold the whole weights."""
        return self.state in (GradState.COLLECTING, GradState.READY)

    @property
    def has_unreduced_passes(self) -> bool:
        """Whether passes under ``no_sync`` wait for one that reduces; the same on every rank."""
        return self._unreduced_passes > 0 and any(param.param.grad is not None for param in self._params)

    def has_grad(self, i: int) -> bool:
        """Whether this rank saw a gradient of matrix ``i`` since gradients were zeroed, or the caller set one."""
        grad, put = self._params[i].param.grad, self._put[i]
        return grad is not None and (self._seen[i] or put is None or grad is not put())

    @property
    def spans_replicas(self) -> bool:
        """Whether reductions have a stage over replicas."""
        return self._reduction.spans_replicas

    @property
    def payload_numel(self) -> int:
        """Elements of the shard stage of one reduction."""
        return self._reduction.numel

    def set_divide_factor(self, factor: float | None) -> None:
        """What sums over all ranks are divided by, the number of ranks by default."""
        self._reduction.divide_factor = factor

    # -- during a pass ------------------------------------------------------------------------------------------------

    def count_use(self) -> None:
        """A forward that a backward pass may come back through."""
        self._uses += 1

    def begin(self) -> None:
        """The pass has reached the unit, by its outputs or by one of its weights."""
        if self.state is GradState.IDLE:
            self._machine.to(GradState.COLLECTING)

    def inputs_done(self) -> None:
        """Autograd has left the module through its inputs: complete, if that was the only use of its weights.

        Whatever of the module took part in the pass has run by then: autograd runs what was recorded later first. A
        weight without a gradient had no part in it on this rank and counts as zero, so that the moment follows from
        the program and not from the data. With several uses (shared modules, two forwards before one backward) this
        rank cannot tell which is the last, so the unit waits for the end of the pass.
        """
        self.begin()
        if self.state is GradState.COLLECTING and self._uses == 1:
            self._machine.to(GradState.READY)

    def arrives_owned(self, i: int) -> None:
        """Autograd is about to accumulate into the owned parameter ``i`` itself, as from a penalty on weights."""
        if self._params[i].param.grad is None:
            # Zeroed since the last pass: afterwards that could not be seen any more.
            self._accumulated[i] = None
        self._seen[i] = True

    def arrived(self, i: int) -> None:
        """Autograd has accumulated into unsharded parameter ``i``."""
        if self.state in (GradState.REDUCING, GradState.REDUCED):
            raise DMuonError(
                f"{self._params[i].name} received a gradient after the gradients of unit {self._name!r} were sent to "
                "their owners: the module's weights were used outside of its forward. Choose a hook boundary that "
                "contains every use (hook_boundary_resolver)."
            )
        self.begin()

    def launch(self) -> None:
        """Send the gradients of this pass, and those accumulated before, to the owners. Collective (shard group)."""
        grads = self._collect()
        self._accumulated = [None] * len(self._params)
        self._unreduced_passes = 0
        self._machine.to(GradState.REDUCING)
        self._context.monitor.issue(Channel.SHARD, f"reduction of unit {self._name}")
        with record_function(f"dmuon::reduce {self._name}"):
            self._pending = self._reduction.launch(grads)

    def finish_first_stage(self) -> None:
        if self._pending is not None:
            with self._context.monitor.at(f"reduction of unit {self._name}"):
                self._pending.finish_first_stage()

    def finish(self) -> None:
        """Add the mean gradients to the owned parameters' ``.grad``, on every rank in the same form."""
        if self._pending is None:
            return
        with self._context.monitor.at(f"reduction of unit {self._name}"):
            bucket = self._pending.finish()
        self._pending = None
        own = iter(self._reduction.own_views(bucket))
        for i, param in enumerate(self._params):
            grad = next(own) if param.is_owner else None
            if param.param.requires_grad:
                self._add(i, grad)
        self._machine.to(GradState.REDUCED)
        self._run_user_hooks()

    def keep(self) -> None:
        """Keep the gradients of this pass on this rank (``no_sync``)."""
        for i, grad in enumerate(self._collect()):
            # What autograd left is converted once; what is accumulated already has the dtype.
            self._accumulated[i] = None if grad is None else grad.to(self.reduce_dtype)
        self._unreduced_passes += 1
        for i, param in enumerate(self._params):
            if param.param.requires_grad and param.param.grad is None:
                self._add(i, None)

    def end_pass(self) -> None:
        """Reset what one backward pass has counted."""
        self._uses = 0
        if self.state is not GradState.IDLE:
            self._machine.to(GradState.IDLE)

    def discard(self) -> None:
        """Drop every gradient that has not reached an owner; an unfinished reduction is waited for and dropped."""
        if self._pending is not None:
            with self._context.monitor.at(f"reduction of unit {self._name}"):
                self._pending.finish()
            self._pending = None
        for unsharded in self._unsharded:
            unsharded.grad = None
        self._accumulated = [None] * len(self._params)
        self._unreduced_passes = 0
        self._seen = [False] * len(self._params)
        if self.state is not GradState.IDLE:
            self._machine.to(GradState.IDLE)

    # -- values -------------------------------------------------------------------------------------------------------

    def _collect(self) -> list[Tensor | None]:
        """Autograd's gradients of this pass, each added to what was accumulated before; none is left behind.

        A gradient that nothing was accumulated for stays as autograd made it: packing converts it, in one copy.

        A missing ``.grad`` on the owned parameter means that somebody zeroed gradients since the last pass (through the
        optimizer, the module or the parameter): what was accumulated before is dropped then.
        """
        grads: list[Tensor | None] = []
        for i, (param, unsharded) in enumerate(zip(self._params, self._unsharded, strict=True)):
            if param.param.grad is None:
                self._accumulated[i] = None
                self._seen[i] = False
            fresh, unsharded.grad = unsharded.grad, None
            kept = self._accumulated[i]
            if fresh is not None:
                self._seen[i] = True
                fresh = fresh.detach()
                if param.part is not None:
                    fresh = param.part.part_of_grad(fresh)
                kept = fresh if kept is None else kept.add_(fresh)
            grads.append(kept)
        return grads

    @torch.no_grad()
    def _run_user_hooks(self) -> None:
        """Call what ``register_post_accumulate_grad_hook`` put on the owned parameters, as FSDP2 does for its own.

        On every rank in buffer order, whether or not some rank had a gradient: nobody knows before the step.
        """
        for i, param in enumerate(self._params):
            owned = param.param
            hooks = owned._post_accumulate_grad_hooks
            if not hooks or not owned.requires_grad:
                continue
            for hook in tuple(hooks.values()):
                hook(owned)
            # Whatever a hook left there stands for the gradient of this pass.
            self._put[i] = None if owned.grad is None else TensorWeakRef(owned.grad)

    def _add(self, i: int, grad: Tensor | None) -> None:
        """Add a gradient (``None`` off the owner, or for a zero one) to the owned parameter's ``.grad``."""
        owned = self._params[i].param
        assert isinstance(owned, OwnedTensor)
        if owned.grad is None:
            local = torch.zeros_like(owned._local_tensor) if grad is None else grad.to(owned.dtype)
            owned.grad = owned.like(local)
            self._put[i] = TensorWeakRef(owned.grad)
        elif grad is not None:
            assert isinstance(owned.grad, OwnedTensor)
            owned.grad._local_tensor.add_(grad)
