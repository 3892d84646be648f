"""A process group that only pretends, to plan and count for more ranks than there are processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_world(world: int, *, rank: int = 0) -> Iterator[None]:
    """Be one rank of `world` inside the block, in a process without a group; collectives move nothing.

    Use it in a plain process: `run_ranks(fn, 1, init=False)`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
