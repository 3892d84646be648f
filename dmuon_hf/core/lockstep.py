"""A meeting point for collectives that user code may have put behind ``if rank == 0``: an error instead of a hang."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.grid_group import GridGroup

__all__ = ["MEETING_TIMEOUT", "meet"]

MEETING_TIMEOUT = timedelta(seconds=30)
"""How long a rank waits for the others before it names those that are missing."""


def meet(what: str, group: GridGroup | None, *, timeout: timedelta = MEETING_TIMEOUT) -> None:
    """Return when every rank of ``group`` has called this for ``what``.

    The ranks meet in the rendezvous store: that costs a round trip, and leaves the group's own collectives, which
    cannot be taken back, untouched.

    Args:
        what: name of the call, as the user knows it.
        group: the ranks to meet. Nothing to do without a group or with one rank.
        timeout: longest time between the first and the last rank.

    Raises:
        LockstepError: some ranks did not come in time; the message names them.
    """
    if group is None or not group.talks:
        return
    ranks = group.ranks
    store = dist.distributed_c10d._get_default_store()
    place = f"dmuon_hf/{what}/{ranks[0]}-{ranks[-1]}-{len(ranks)}"
    # Meetings are numbered per rank; one that gives up does not count it, so that it can come again to the same one.
    number = f"{place}/number/{dist.get_rank()}"
    meeting = f"{place}/{store.add(number, 0)}"
    if store.add(f"{meeting}/arrived/{dist.get_rank()}", 1) == 1 and store.add(f"{meeting}/count", 1) == len(ranks):
        store.set(f"{meeting}/complete", "1")
    try:
        store.wait([f"{meeting}/complete"], timeout)
    except (dist.DistStoreError, RuntimeError) as error:
        missing = [rank for rank in ranks if store.add(f"{meeting}/arrived/{rank}", 0) == 0]
        if not missing:
            raise
        raise LockstepError(
            f"{what} is collective, but ranks {missing} did not call it within {timeout.total_seconds():.0f} s of rank "
            f"{dist.get_rank()}: call it on every rank, not under `if rank == 0`, and let rank 0 write the result. "
            "If the other ranks are merely late, pass a longer timeout"
        ) from error
    store.add(number, 1)
