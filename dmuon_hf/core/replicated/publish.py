"""After a step: updated matrices travel from their owners to all ranks, into the parameters themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from dmuon_hf.core.lockstep import Channel
from dmuon_hf.core.replicated.arriving import arrived, arriving
from dmuon_hf.core.replicated.params import ReplicatedParam
from dmuon_hf.core.replicated.parts import part_of
from dmuon_hf.core.runtime.collectives import InFlight, broadcast_segments, issue_on
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.compiling import untraced

__all__ = ["UnitPublish"]


class UnitPublish:
    """The matrices of one unit on their way from their owners.

    The module waits before its forward, so that the publish is hidden behind the forward of the modules before it, and
    before its state dict is read or loaded; whoever else touches a matrix waits there. Nothing is copied: a matrix is
    sent from, and received into, its parameter. Parts of DTensors, which others can read without being seen, are waited
    for at once.
    """

    def __init__(
        self, name: str, params: Sequence[ReplicatedParam], *, group: ProcessGroup, context: DedicatedCommContext
    ) -> None:
        self.name = name
        self.params = tuple(params)
        self._group = group
        self._context = context
        self._flight: InFlight | None = None
        self._on_the_way: list[nn.Parameter] = []
        self._staged: list[tuple[nn.Parameter, Tensor]] = []

    @property
    def nbytes_by_owner(self) -> dict[int, int]:
        """Payload of a publish of every matrix, by the owner's rank."""
        found: dict[int, int] = {}
        for param in self.params:
            found[param.owner_shard] = found.get(param.owner_shard, 0) + part_of(param.param).nbytes
        return found

    def issue(self) -> None:
        """Send every matrix that has changed; the last publish is waited for first. Collective."""
        self.wait()
        changed = [param for param in self.params if param.changed]
        if not changed:
            return
        segments = [self._segment(param.param) for param in changed]
        owners = [param.owner_shard for param in changed]
        for param in changed:
            param.changed = False
        self._context.monitor.issue(Channel.SHARD, f"publish of unit {self.name}")
        with torch.no_grad(), record_function(f"dmuon::publish {self.name}"):
            self._flight = issue_on(
                self._context.device,
                self._context.broadcast_stream,
                segments,
                lambda: broadcast_segments(segments, owners, self._group),
            )
        self._on_the_way = [param.param for param in changed]
        if not all(arriving(param, self.wait) for param in self._on_the_way):
            self.wait()

    def _segment(self, param: nn.Parameter) -> Tensor:
        """What the collective reads or writes: the parameter, or a copy of one that is not contiguous."""
        value = part_of(param)
        if value.is_contiguous():
            return value.view(-1)
        staged = value.contiguous()
        self._staged.append((param, staged))
        return staged.view(-1)

    def wait(self) -> None:
        """Order the current stream (CPU: the host) after the last publish."""
        if self._flight is None:
            return
        with self._context.monitor.at(f"publish of unit {self.name}"):
            self._flight.wait()
        self._flight = None
        for param in self._on_the_way:
            arrived(param)
        self._on_the_way.clear()
        with torch.no_grad():
            for param, staged in self._staged:
                part_of(param).copy_(staged)
        self._staged.clear()

    def attach(self, root: nn.Module, boundary: nn.Module) -> None:
        """Have whoever reads the matrices wait: forwards, state dicts, loading.

        A matrix whose hook boundary is its own module may be read by other modules, as the output matrix is by some
        losses: the forward of the whole model waits for it.
        """
        holders = {module: None for param in self.params for module, _ in param.places}
        readers = dict.fromkeys([boundary, *holders])
        if boundary in holders:
            readers[root] = None

        def before_forward(*_: Any) -> None:
            self.wait()

        for module in readers:
            module.register_forward_pre_hook(untraced(before_forward), prepend=True)
        for module in dict.fromkeys([root, *readers]):
            module.register_state_dict_pre_hook(before_forward)
            module.register_load_state_dict_pre_hook(before_forward)
