"""Process groups that belong to this package alone.

A clone of a mesh dimension's group keeps the asynchronous collectives of the runtime out of the sequence that the
trainer's own logging, metric and checkpoint collectives use. Clones are reused by every model on the same ranks and
forgotten when the default group they were made under is destroyed, so that a second ``init_process_group`` in the same
process (notebooks, tests, elastic restarts) starts afresh.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["clone_group", "live_clones"]

_Key = tuple[str, str, tuple[int, ...]]
# The default group is the lifetime of every other group; keyed weakly so that a destroyed world drops its clones.
_clones: weakref.WeakKeyDictionary[ProcessGroup, dict[_Key, ProcessGroup]] = weakref.WeakKeyDictionary()


def clone_group(ranks: Sequence[int], *, like: ProcessGroup, purpose: str) -> ProcessGroup:
    """A group over ``ranks`` with the backend of ``like``, made once per purpose.

    Collective over ``ranks`` only (other ranks of the job need not call it); every member calls it in the same order.

    Args:
        ranks: Global ranks, in the order that gives the group ranks.
        like: Group whose backend is used.
        purpose: Clones for different purposes are different communicators.
    """
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("clone_group needs an initialised default process group: call init_process_group first")
    cached = _clones.setdefault(world, {})
    backend = dist.get_backend(like)
    key = (purpose, backend, tuple(ranks))
    if key not in cached:
        group = dist.new_group(
            list(ranks),
            backend=backend,
            use_local_synchronization=True,
            group_desc=f"dmuon_{purpose}",
        )
        if not isinstance(group, ProcessGroup):
            raise RuntimeError(f"rank {dist.get_rank()} is not among the ranks {list(ranks)} of the group it asked for")
        cached[key] = group
    return cached[key]


def live_clones() -> int:
    """How many clones exist under the current default group."""
    world = dist.group.WORLD
    return len(_clones.get(world, {})) if world is not None else 0
