"""A unit: the dedicated parameters of one hook boundary, gathered, used and reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.runtime.dedicated import DedicatedParam
from dmuon_hf.core.runtime.gradients import UnitGrads
from dmuon_hf.core.runtime.layout import PackedLayout
from dmuon_hf.core.runtime.weights import UnitWeights

__all__ = ["NO_COPY", "Unit"]

NO_COPY = (
    "a model whose weights have owners on a mesh cannot be deep-copied, as FSDP2's cannot: copy it before "
    "dedicate_params() (a reference model, an average of weights), or load dmuon.get_model_state_dict(model, "
    "rank0_only=False) into another model"
)


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
        reshard_after_backward: Whether they are freed when their gradients have left.
        unshard_in_backward: Whether backward needs them.
        forward_prefetch, backward_prefetch: Units that this one gathers ahead, in place of the next in order.
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
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self._reduces = True
        self._all_reduces = True

    @property
    def requires_sync(self) -> bool:
        """Whether backward reduces gradients, or accumulates them on this rank (``no_sync``).

        A pass that FSDP2 would reduce inside of each replica only is accumulated too: the sum is the same, and takes
        one reduction in place of one per pass.
        """
        return self._reduces and self._all_reduces

    @requires_sync.setter
    def requires_sync(self, value: bool) -> None:
        self._reduces = self._all_reduces = value

    def set_requires_all_reduce(self, value: bool) -> None:
        """Whether a pass reduces over the replicas as well; nothing where there are none."""
        if self.grads.spans_replicas:
            self._all_reduces = value

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        # Reached through the hooks of the boundary, by a copy of the model or of a part of it.
        raise ConfigurationError(f"{NO_COPY} (reached {self.name!r})")

    @property
    def gather_bytes(self) -> int:
        """Payload of one gather of this unit, in bytes."""
        return self.weights.nbytes

    @property
    def reduce_bytes(self) -> int:
        """Payload of one gradient reduction of this unit (the shard stage), in bytes."""
        return self.grads.payload_numel * self.grads.reduce_dtype.itemsize

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
        if self.unshard_in_backward:
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
        self.reshard_after_pass()

    def reshard_after_pass(self) -> None:
        """Free the whole weights at the end of a backward pass, unless they are wanted for the next one."""
        if self.reshard_after_backward:
            self.weights.reshard()

    def reshard(self) -> None:
        """Give the owned parameters back to the module and free the whole weights, unless a pass is using them."""
        if not self.weights.is_read and not self.grads.reads_weights:
            self.weights.show_owned()
            self.weights.reshard()

    def discard_grads(self) -> None:
        """Drop every gradient that has not reached an owner, and leave a pass that did not finish."""
        was_inside = self.grads.reads_weights
        self.grads.discard()
        if was_inside:
            self.weights.show_owned()
