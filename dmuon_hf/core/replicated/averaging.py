"""When the gradients of whole parameters are averaged: during backward, in one order on every rank.

[Note: averaging in one order]
Buckets leave in the order of their list, each when all of its gradients are there and all before it have left; the end
of the pass sends the rest. Which parameters took part in a pass may differ between ranks, so it decides over when a
bucket leaves and never over the order. Late buckets, which hold what no unit holds, leave at the end.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from dmuon_hf.core.errors import ConfigurationError, DMuonError
from dmuon_hf.core.replicated.bucket import GradBucket
from dmuon_hf.core.runtime.compiling import untraced
from dmuon_hf.core.runtime.pipelining import follow_pipelining, lead_through_stages
from dmuon_hf.core.runtime.schedule import graph_task
from dmuon_hf.core.runtime.watch import differentiable_tensors

__all__ = ["GradientAveraging"]

# How many buckets may be on their way while backward goes on: bounds the memory of their copies.
_IN_FLIGHT = 2


class GradientAveraging:
    """Replaces gradients by their means over all data-parallel ranks.

    Attributes:
        requires_sync: Whether backward averages gradients, or accumulates them on this rank (``no_sync``).
        synchronised: Passes that averaged since gradients were zeroed.
        active: Whether a pass has begun and not ended.
        interrupted: Whether a pass was abandoned since gradients were zeroed.
    """

    def __init__(self, root: nn.Module) -> None:
        self.requires_sync = True
        self.synchronised = 0
        self.active = False
        self.interrupted = False
        self._buckets: list[GradBucket] = []
        self._early = 0
        self._cursor = 0
        self._unfinished = 0
        self._kept_passes = False
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._wrappers_sync = True
        self._root = weakref.ref(root)
        self._on_output = untraced(lambda _: self._begin())
        root.register_forward_pre_hook(untraced(self._pre_forward))
        root.register_forward_hook(untraced(self._post_forward))
        lead_through_stages(self)

    def add(self, buckets: Iterable[GradBucket], *, late: bool) -> None:
        """Average the gradients of these, too; ``late`` ones at the end of the pass."""
        for bucket in buckets:
            place = len(self._buckets) if late else self._early
            self._buckets.insert(place, bucket)
            self._early += not late
            for i, (_, param) in enumerate(bucket.params):
                trainable = param.requires_grad
                # Torch takes no hook of a frozen parameter, which may be trained later.
                param.requires_grad_(True).register_post_accumulate_grad_hook(untraced(self._on_grad(bucket, i)))
                param.requires_grad_(trainable)

    def follow(self, wrapper: DistributedDataParallel) -> None:
        """Accumulate where a ``DistributedDataParallel`` around the model does."""
        self._wrappers.add(wrapper)

    @property
    def buckets(self) -> tuple[GradBucket, ...]:
        """What travels together, in the order in which it leaves."""
        return tuple(self._buckets)

    @property
    def wrappers(self) -> tuple[DistributedDataParallel, ...]:
        return tuple(self._wrappers)

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything that is averaged, by canonical name."""
        for bucket in self._buckets:
            yield from bucket.params

    def covers(self, param: nn.Parameter) -> bool:
        """Whether the gradient of ``param`` is averaged, here or by a ``DistributedDataParallel`` around the model."""
        if any(param is other for _, other in self.params()):
            return True
        return any(param is other for wrapper in self._wrappers for other in wrapper._module_parameters)

    # -- stages of a pipeline -----------------------------------------------------------------------------------------

    def averages(self, module: nn.Module) -> bool:
        """Whether the gradient of a parameter at or below ``module`` is averaged here."""
        averaged = {id(param) for _, param in self.params()}
        return any(id(param) in averaged for param in module.parameters())

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Context of the backward pass of a microbatch: gradients are averaged in the last one of a batch.

        ``DistributedDataParallel`` does so too, although all forwards run under its ``no_sync``.
        """
        required, self.requires_sync = self.requires_sync, self.requires_sync and last
        self._wrappers_sync = True
        try:
            yield
        finally:
            self.requires_sync = required

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _pre_forward(self, module: nn.Module, args: Any) -> None:
        if module is not self._root() or graph_task() != -1:
            return
        self.abandon()
        follow_pipelining()
        if torch.is_grad_enabled():
            # DistributedDataParallel decides in forward, too, whether the backward of it will reduce.
            self._wrappers_sync = all(wrapper.require_backward_grad_sync for wrapper in self._wrappers)
            if any(wrapper._join_config.enable for wrapper in self._wrappers):
                raise ConfigurationError(
                    "DistributedDataParallel.join() lets ranks with less data step without the others, but every rank "
                    "updates matrices that the others need: give all ranks the same number of batches"
                )

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self._root() and graph_task() == -1 and torch.is_grad_enabled():
            # The outermost pass begins here; reentrant checkpointing runs others inside of it.
            for tensor in differentiable_tensors(output):
                tensor.register_hook(self._on_output)

    def _on_grad(self, bucket: GradBucket, i: int) -> Callable[[Tensor], None]:
        # Weakly: torch keeps these hooks where the garbage collector does not look.
        weak = weakref.ref(self)

        def hook(_: Tensor) -> None:
            averaging = weak()
            if averaging is not None:
                averaging._arrived(bucket, i)

        return hook

    def _begin(self) -> None:
        if not self.active:
            # A container of several stages has no forward in which to do so.
            follow_pipelining()
            self.active = True
            self._cursor = self._unfinished = 0
            Variable._execution_engine.queue_callback(self._end)

    def _arrived(self, bucket: GradBucket, i: int) -> None:
        self._begin()
        if not self._syncs:
            return
        if bucket.launched:
            raise DMuonError(
                f"{bucket.params[i][0]} received a gradient after that of {bucket.name!r} was sent to the other ranks: "
                "its module is used by several reentrant checkpoints. Checkpoint with use_reentrant=False"
            )
        bucket.arrived(i)
        while self._cursor < self._early and self._buckets[self._cursor].complete:
            self._launch_next()

    @property
    def _syncs(self) -> bool:
        return self.requires_sync and self._wrappers_sync

    def _launch_next(self) -> None:
        if self._cursor - self._unfinished >= _IN_FLIGHT:
            self._buckets[self._unfinished].finish()
            self._unfinished += 1
        self._buckets[self._cursor].launch()
        self._cursor += 1

    def _end(self) -> None:
        if self._syncs:
            while self._cursor < len(self._buckets):
                self._launch_next()
            for bucket in self._buckets[self._unfinished :]:
                bucket.finish()
            self.synchronised += 1
        self._kept_passes = not self._syncs
        self._end_pass()

    def _end_pass(self) -> None:
        self.active = False
        for bucket in self._buckets:
            bucket.end_pass()

    # -- between passes -----------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Drop a pass that an exception ended midway, if there was one. Does nothing inside a pass."""
        if self.active and graph_task() == -1:
            self.interrupted = True
            self._end_pass()

    def reset(self) -> None:
        """Start over: gradients were zeroed."""
        self.abandon()
        self.interrupted = False
        self.synchronised = 0
        self._kept_passes = False

    @property
    def has_unreduced_passes(self) -> bool:
        """Whether gradients of passes under ``no_sync`` wait for one that averages; the same on every rank."""
        return self._kept_passes and any(param.grad is not None for _, param in self.params())
