"""A unit: the dedicated parameters of one hook boundary, gathered, used and reduced together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dmuon_hf.core.runtime.dedicated import DedicatedParam
from dmuon_hf.core.runtime.gradients import UnitGrads
from dmuon_hf.core.runtime.layout import PackedLayout
from dmuon_hf.core.runtime.weights import UnitWeights

__all__ = ["Unit"]


class Unit:
    """One hook boundary: the life of its weights and that of its gradients, and where the two meet.

    Attributes:
        name: Path of the boundary module.
        index: Position in the plan.
        module: The boundary.
        params: The dedicated parameters in buffer order.
        layout: How they lie in the packed buffer.
        weights: Gathered for forward and backward.
        grads: Reduced at the end of backward.
        reshard_after_forward: Whether whole weights are freed between forward and backward.
        requires_sync: Whether backward reduces gradients, or accumulates them on this rank (``no_sync``).
    """

    def __init__(
        self,
        *,
        name: str,
        index: int,
        module: nn.Module,
        params: Sequence[DedicatedParam],
        layout: PackedLayout,
        weights: UnitWeights,
        grads: UnitGrads,
        reshard_after_forward: bool,
    ) -> None:
        self.name = name
        self.index = index
        self.module = module
        self.params = list(params)
        self.layout = layout
        self.weights = weights
        self.grads = grads
        self.reshard_after_forward = reshard_after_forward
        self.requires_sync = True

    @property
    def gather_bytes(self) -> int:
        """Payload of one gather of this unit, in bytes."""
        return self.weights.nbytes

    @property
    def reduce_bytes(self) -> int:
        """Payload of one gradient reduction of this unit (the shard stage), in bytes."""
        return self.layout.numel * self.grads.reduce_dtype.itemsize

    # -- forward ------------------------------------------------------------------------------------------------------

    def enter_forward(self, *, in_backward: bool) -> None:
        """Make the module hold the whole weights for its forward. Collective (shard group)."""
        self.weights.show_whole()
        self.weights.hold()
        if not in_backward:
            self.grads.count_use()

    def leave_forward(self) -> None:
        """Give the owned parameters back to the module; also after an exception in its forward."""
        if self.weights.release() and not self.grads.reads_weights:
            self.weights.show_owned()

    # -- backward -----------------------------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """Make the module hold the whole weights until its gradients have left: a recomputation may read them there."""
        self.grads.begin()
        self.weights.show_whole()

    def launch_reduction(self) -> None:
        """Send the gradients of this pass, and those accumulated before, to the owners. Collective (shard group)."""
        self.grads.launch()
        self.weights.show_owned()

    def finish_reduction(self) -> None:
        """Add the mean gradients to the owned parameters' ``.grad``."""
        self.grads.finish()

    def keep_grads(self) -> None:
        """Keep the gradients of this pass on this rank (``no_sync``)."""
        self.grads.keep()
        self.weights.show_owned()

    def end_pass(self) -> None:
        """Make ready for the next pass, with the weights freed."""
        self.grads.end_pass()
        self.weights.reshard()

    def discard_grads(self) -> None:
        """Drop every gradient that has not reached an owner, and leave a pass that did not finish."""
        was_inside = self.grads.reads_weights
        self.grads.discard()
        if was_inside:
            self.weights.show_owned()
