"""FSDP2's waits for its own collectives, on the CPU: they end when the ranks are known to have diverged.

FSDP2 waits inside of gloo, for as long as its timeout, and what ends that wait is a closed connection. In a model with
owned weights it waits as the runtime does (:meth:`LockstepMonitor.wait`): the rank raises where it stands, with the
reason. On an accelerator, and in models without owned weights, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dmuon_hf.core.lockstep import monitor_in

__all__ = ["WatchedCollectives", "awaiting_gathers"]


class WatchedCollectives:
    """In place of ``torch.distributed`` in FSDP2's module of collectives: the same, but for how the host waits."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather_single(self, *args: Any, **kwargs: Any) -> Any:
        return _issued(dist.all_gather_single, "FSDP2 all-gather", args, kwargs)

    def reduce_scatter_single(self, *args: Any, **kwargs: Any) -> Any:
        return _issued(dist.reduce_scatter_single, "FSDP2 gradient reduction", args, kwargs)

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        return _issued(dist.all_reduce, "FSDP2 gradient reduction", args, kwargs)


def _issued(collective: Callable[..., Any], what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    monitor = None if kwargs.get("async_op") else monitor_in(kwargs["group"])
    if monitor is None:
        return collective(*args, **kwargs)
    monitor.wait(collective(*args, **{**kwargs, "async_op": True}), what)
    return None


def awaiting_gathers(copy_out: Callable[..., None]) -> Callable[..., None]:
    """In place of ``foreach_all_gather_copy_out``, which waits for the gathers that were issued ahead."""

    def foreach_all_gather_copy_out(result: Any, fsdp_params: list[Any], group: dist.ProcessGroup) -> None:
        monitor = monitor_in(group) if isinstance(result.all_gather_work, dist.Work) else None
        if monitor is not None:
            monitor.wait(result.all_gather_work, "FSDP2 all-gather")
        copy_out(result, fsdp_params, group)

    return foreach_all_gather_copy_out
