"""Streams and groups shared by all units of a model."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch.distributed import ProcessGroup

from dmuon_hf.core.device import DeviceHandle
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.lockstep import LockstepMonitor
from dmuon_hf.core.runtime.forward_profile import forward_profile
from dmuon_hf.core.scratch import reused_ways

__all__ = ["DedicatedCommContext"]


class DedicatedCommContext:
    """Side streams for the runtime's collectives, and the replicate group of an HSDP mesh.

    Attributes:
        broadcast_stream: Gathers of weights over the shard dimension. High priority, as the next one, which counts for
            backends that run collectives on it; NCCL runs them on a stream of the group, and this one waits.
        reduce_stream: Reductions of gradients over the shard dimension.
        replicate_reduce_stream: Second stage of the HSDP gradient reduction. Apart from the publish, so that a large
            reduction does not stand in front of the weights the next forward waits for.
        replicate_broadcast_stream: Publish of updated weights over the replicate dimension.
        row_stream: Gathers of parameters on the route ``"sharded_adamw"``: the first of these, or one of their own
            with :attr:`separate_row_stream`.
        separate_row_stream: Whether the optimizer asked for that.
        monitor: Notes what this rank issues and waits for; raises when the ranks have diverged.
        forward_profile: Counters of gathers for forward, ``None`` unless the environment asked for them.
        reused_buffers: What ``tp_buffer_reuse`` keeps: buffers of the ways ``"gather"`` and ``"scatter"``.
        publish_bucket_bytes: Most bytes of several units that are published together under HSDP.
        replicate_group: Group over the replicate dimension, ``None`` on a 1-D mesh.

    Streams are made when they are first asked for, since not every device of a single process has any; on the CPU they
    are no-ops. Normally built by :func:`dmuon_hf.core.dedicate_params`.
    """

    def __init__(
        self,
        device: torch.device,
        replicate_group: ProcessGroup | None = None,
        *,
        tp_buffer_reuse: bool | str = False,
        replicate_broadcast_bucket_mb: float = 0.0,
    ) -> None:
        if not replicate_broadcast_bucket_mb >= 0.0:
            raise ConfigurationError(
                f"replicate_broadcast_bucket_mb must be 0 or more MiB, got {replicate_broadcast_bucket_mb!r}"
            )
        self.reused_buffers = reused_ways(tp_buffer_reuse)
        self.publish_bucket_bytes = replicate_broadcast_bucket_mb * 2**20
        self.separate_row_stream = False
        self.monitor = LockstepMonitor()
        self.device = DeviceHandle(device)
        self.device.host_wait = self.monitor.wait
        self.replicate_group = replicate_group
        self.forward_profile = forward_profile(device)

    @cached_property
    def broadcast_stream(self) -> Any:
        return self.device.new_stream(high_priority=True)

    @property
    def row_stream(self) -> Any:
        return self._own_row_stream if self.separate_row_stream else self.broadcast_stream

    @cached_property
    def _own_row_stream(self) -> Any:
        return self.device.new_stream(high_priority=True)

    @cached_property
    def reduce_stream(self) -> Any:
        return self.device.new_stream(high_priority=True)

    @cached_property
    def replicate_reduce_stream(self) -> Any:
        return self.device.new_stream(high_priority=False)

    @cached_property
    def replicate_broadcast_stream(self) -> Any:
        return self.device.new_stream(high_priority=False)
