"""Gradients that travel in one all-reduce, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from dmuon_hf.core.lockstep import Channel
from dmuon_hf.core.replicated.parts import grad_part, part_like, part_of
from dmuon_hf.core.runtime.collectives import InFlight, issue_on
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext

__all__ = ["GradBucket", "bucket_name"]


def bucket_name(unit: str) -> str:
    """What the bucket of a unit's gradients is called."""
    return f"unit {unit}"


class GradBucket:
    """The gradients of some parameters, replaced by their mean over all data-parallel ranks.

    What is on ``.grad`` counts, from this pass and from those before it: a part that was averaged already is the same
    on every rank, and stays what it is. A parameter without a gradient here counts as zero; one without on any rank
    keeps none, for which each parameter has a flag that travels behind the gradients. Of a DTensor all that is about
    this rank's part of it.

    Attributes:
        name: What errors call it.
        params: The parameters by canonical name, in the order of the buffer.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[tuple[str, nn.Parameter]],
        *,
        group: ProcessGroup,
        context: DedicatedCommContext,
        dtype: torch.dtype,
    ) -> None:
        self.name = name
        self.params = tuple(params)
        self._group = group
        self._size = dist.get_world_size(group)
        self._context = context
        self._dtype = dtype
        self._arrived: set[int] = set()
        self._sent: list[nn.Parameter] = []
        self._packed: Tensor | None = None
        self._flight: InFlight | None = None

    @property
    def nbytes(self) -> int:
        """Payload of the all-reduce, in bytes, when every parameter is trained."""
        return self._dtype.itemsize * sum(part_of(param).numel() + 1 for _, param in self.params)

    @property
    def launched(self) -> bool:
        return self._packed is not None

    @property
    def complete(self) -> bool:
        """Whether every trained parameter has its gradient of this pass."""
        return all(i in self._arrived for i, (_, param) in enumerate(self.params) if param.requires_grad)

    def arrived(self, i: int) -> None:
        self._arrived.add(i)

    @torch.no_grad()
    def launch(self) -> None:
        """Send what is on the parameters' ``.grad``. Collective."""
        self._sent = [param for _, param in self.params if param.requires_grad]
        sizes = [part_of(param).numel() for param in self._sent]
        device = self._context.device.device
        packed = torch.empty(sum(sizes) + len(sizes), dtype=self._dtype, device=device)
        *parts, flags = packed.split([*sizes, len(sizes)])
        grads = [grad_part(param) for param in self._sent]
        flags.copy_(torch.tensor([grad is not None for grad in grads], dtype=self._dtype))
        present = [(part, grad.reshape(-1)) for part, grad in zip(parts, grads, strict=True) if grad is not None]
        _write_shares(present, self._size)
        missing = [part for part, grad in zip(parts, grads, strict=True) if grad is None]
        if missing:
            torch._foreach_zero_(missing)
        self._packed = packed
        self._context.monitor.issue(Channel.SHARD, f"gradient average of {self.name}")
        with record_function(f"dmuon::average {self.name}"):
            self._flight = issue_on(
                self._context.device,
                self._context.reduce_stream,
                [packed],
                lambda: [dist.all_reduce(packed, group=self._group, async_op=True)],
            )

    @torch.no_grad()
    def finish(self) -> None:
        """Put the means on ``.grad``. Waits for the device where a gradient is missing here, to learn if it is all.

        Where the buffer is laid out as the gradients are, they become views of it, which saves a copy of them all.
        DTensors do not: ``copy.deepcopy`` fails on those whose local tensor begins inside of its storage.
        """
        if self._flight is None:
            return
        packed = self._wait()
        sizes = [part_of(param).numel() for param in self._sent]
        *parts, flags = packed.split([*sizes, len(sizes)])
        means = [part.view_as(part_of(param)) for param, part in zip(self._sent, parts, strict=True)]
        copied: list[tuple[Tensor, Tensor]] = []
        seen = flags.tolist() if any(param.grad is None for param in self._sent) else [1.0] * len(means)
        for param, mean, has_grad in zip(self._sent, means, seen, strict=True):
            grad = None if param.grad is None else part_of(param.grad)
            is_view = not isinstance(param, DTensor)
            if grad is not None and not (is_view and grad.dtype is mean.dtype and grad.is_contiguous()):
                copied.append((grad, mean))
            elif has_grad:
                param.grad = part_like(param, mean.to(param.dtype, copy=not is_view))
        if copied:
            torch._foreach_copy_([grad for grad, _ in copied], [mean for _, mean in copied])

    def end_pass(self) -> None:
        """Make ready for the next pass; what is in flight is waited for and dropped."""
        if self._flight is not None:
            self._wait()
        self._packed = None
        self._arrived.clear()

    def _wait(self) -> Tensor:
        assert self._flight is not None and self._packed is not None
        with self._context.monitor.at(f"gradient average of {self.name}"):
            self._flight.wait()
        self._flight = None
        packed, self._packed = self._packed, self._packed[:0]
        return packed


def _write_shares(pairs: Sequence[tuple[Tensor, Tensor]], ranks: int) -> None:
    """Write each gradient's share of the mean into its part: no sum of many ranks overflows, and none is divided after.

    One pass where a call costs little, two calls where each is a launch.
    """
    if not pairs:
        return
    parts, grads = [part for part, _ in pairs], [grad for _, grad in pairs]
    if parts[0].device.type == "cpu" and all(grad.dtype is parts[0].dtype for grad in grads):
        for part, grad in pairs:
            torch.div(grad, ranks, out=part)
        return
    torch._foreach_copy_(parts, grads)
    torch._foreach_div_(parts, float(ranks))
