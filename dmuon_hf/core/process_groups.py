"""Process groups that belong to this package alone.

A clone of a mesh dimension's group keeps the asynchronous collectives of the runtime out of the sequence that the
trainer's own logging, metric and checkpoint collectives use. Clones are reused by every model on the same ranks and
forgotten when the default group they were made under is destroyed, so that a second ``init_process_group`` in the same
process (notebooks, tests, elastic restarts) starts afresh.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["clone_group", "live_clones"]

_Key = tuple[str, str, tuple[int, ...]]
# The default group is the lifetime of every other group; keyed weakly so that a destroyed world drops its clones.
_clones: weakref.WeakKeyDictionary[ProcessGroup, dict[_Key, ProcessGroup]] = weakref.WeakKeyDictionary()


def clone_group(
    ranks: Sequence[int], *, like: ProcessGroup, purpose: str, across: Sequence[ProcessGroup] = ()
) -> ProcessGroup:
    """A group over ``ranks`` with the backend of ``like``, made once per purpose.

    It waits as long as ``like`` or the default group, whichever is more patient: what the user gave
    ``init_process_group`` is how long a rank may work alone, and torch gives it to no other group.

    Collective over ``ranks`` and nobody else; every member calls it in the same order. Other ranks of the job, as other
    stages of a pipeline, may make other groups at the same time, or none.

    Args:
        ranks: Global ranks, in the order that gives the group ranks.
        like: Group whose backend is used.
        purpose: Clones for different purposes are different communicators.
        across: Groups that together connect all ``ranks``; ``like`` by default.

    Raises:
        ConfigurationError: on all ranks, if they belong to different numbers of groups: torch names the new one after
            that number, so that they would wait for each other in vain.
    """
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("clone_group needs an initialised default process group: call init_process_group first")
    cached = _clones.setdefault(world, {})
    backend = dist.get_backend(like)
    key = (purpose, backend, tuple(ranks))
    if key not in cached:
        _require_equal_counts(across or (like,))
        # Older releases of torch have no such argument, and sort.
        in_order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
        with _not_split_from(world, ranks) as device:
            group = dist.new_group(
                list(ranks),
                timeout=_longest_timeout(like, world),
                backend=backend,
                use_local_synchronization=True,
                group_desc=f"dmuon_{purpose}",
                device_id=device,
                **in_order,
            )
        if not isinstance(group, ProcessGroup):
            raise RuntimeError(f"rank {dist.get_rank()} is not among the ranks {list(ranks)} of the group it asked for")
        cached[key] = group
    return cached[key]


def _require_equal_counts(across: Sequence[ProcessGroup]) -> None:
    least = most = len(dist.distributed_c10d._world.pg_names)
    for group in across:
        if dist.get_backend(group) != "fake":
            counts = [(least, most)] * dist.get_world_size(group)
            dist.all_gather_object(counts, (least, most), group=group)
            least, most = min(low for low, _ in counts), max(high for _, high in counts)
    if most != least:
        raise ConfigurationError(
            f"the ranks of this mesh belong to different numbers of process groups, {least} to {most}, and torch can "
            "make no further group over them then. Make groups of only some of these ranks after dedicate_params()"
        )


@contextlib.contextmanager
def _not_split_from(world: ProcessGroup, ranks: Sequence[int]) -> Iterator[torch.device | None]:
    """Context in which a group of ``ranks`` is made by them alone; gives the device that it is bound to.

    Where the default group is bound to a device (``init_process_group(device_id=...)``) torch splits new communicators
    from its own, for which NCCL needs every rank of the job. So it is not bound for the moment.
    """
    device: torch.device | None = world.bound_device_id
    if device is None or len(ranks) == world.size():
        yield device
        return
    world.bound_device_id = None
    try:
        yield device
    finally:
        world.bound_device_id = device


def _longest_timeout(*groups: ProcessGroup) -> timedelta | None:
    """The most that a collective of any of ``groups`` may take; ``None``, torch's default, where no backend says."""
    found: list[timedelta] = []
    for group in groups:
        for device in group._device_types:
            # A backend without options raises.
            with contextlib.suppress(AttributeError, RuntimeError):
                found.append(group._get_backend(device).options._timeout)
    return max(found, default=None)


def live_clones() -> int:
    """How many clones exist under the current default group."""
    world = dist.group.WORLD
    return len(_clones.get(world, {})) if world is not None else 0
