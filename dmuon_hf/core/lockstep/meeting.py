"""A meeting point for collectives that user code may have put behind ``if rank == 0``: an error instead of a hang."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.grid_group import GridGroup
from dmuon_hf.core.lockstep.farewell import guard_exit

if TYPE_CHECKING:
    from dmuon_hf.core.lockstep.monitor import LockstepMonitor

__all__ = ["await_all", "meet"]

logger = logging.getLogger(__name__)

_UNWATCHED_TIMEOUT = dist.default_pg_timeout
_REPORT_AFTER = 30.0
_LONGEST_PAUSE = 0.1


def meet(
    what: str,
    group: GridGroup | None,
    *,
    monitor: LockstepMonitor | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Return when every rank of ``group`` has called this for ``what``.

    The ranks meet in the rendezvous store: that costs some round trips, and leaves the group's own collectives, which
    cannot be taken back, untouched. One that gives up can come again and meets the others then.

    Args:
        what: Name of the call, as the user knows it.
        group: The ranks to meet. Nothing to do without a group, with one rank or on a fake group.
        monitor: That of a runtime on exactly these ranks; it ends a meeting to which a rank is known never to come.
        timeout: Longest time to wait for the last rank. Left out, a monitored rank waits as long as it takes, and
            another one half an hour, the time that torch gives a collective.

    Raises:
        LockstepError: Some ranks did not come in time, or are known never to come; the message names them.
    """
    if group is None or not group.talks:
        return
    ranks = group.ranks
    try:
        if monitor is not None and monitor.is_open:
            with monitor.meeting(what) as store:
                await_all(what, store, ranks, check=lambda missing: monitor.check(), timeout=timeout)
        else:
            store = dist.PrefixStore(  # type: ignore[attr-defined]
                f"dmuon_hf/{group.name}", dist.distributed_c10d._get_default_store()
            )
            await_all(
                what,
                store,
                ranks,
                check=lambda missing: _member.look_for(what, missing),
                timeout=timeout or _UNWATCHED_TIMEOUT,
            )
    except dist.DistNetworkError as error:
        raise LockstepError(
            f"{what} is collective, but the process that hosts the job's rendezvous store, often rank 0, has ended: "
            "all ranks have to call it before any of them leaves"
        ) from error


def await_all(
    what: str,
    store: Any,
    ranks: Sequence[int],
    *,
    check: Callable[[Callable[[], list[int]]], None],
    timeout: timedelta | None,
) -> None:
    """Return when all ``ranks``, global ones, have called this for ``what`` in ``store``.

    ``check``, which is called while some are missing and told how to find out which, raises to give up.
    """
    # Meetings are numbered per rank; one that gives up does not count it, so that it can come again to the same one.
    me = dist.get_rank()
    number = f"{what}/number/{me}"
    meeting = f"{what}/{store.add(number, 0)}"
    if store.add(f"{meeting}/arrived/{me}", 1) == 1 and store.add(f"{meeting}/count", 1) == len(ranks):
        store.set(f"{meeting}/complete", "1")

    def missing() -> list[int]:
        return [rank for rank in ranks if store.add(f"{meeting}/arrived/{rank}", 0) == 0]

    started, pause, told = time.monotonic(), 0.001, False
    while not store.check([f"{meeting}/complete"]):
        check(missing)
        waited = time.monotonic() - started
        if timeout is not None and waited >= timeout.total_seconds():
            raise LockstepError(
                f"{what} is collective, but ranks {missing()} did not call it within "
                f"{waited:.0f} s of rank {me}: call it on every rank, not under `if rank == 0`, and let rank 0 write "
                "the result. If the other ranks are merely late, pass a longer timeout"
            )
        if not told and waited >= _REPORT_AFTER:
            told = True
            logger.warning("%s still waits for ranks %s", what, missing())
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    store.add(number, 1)


class _Member:
    """This process in the default process group: tells meetings that no monitor watches when it leaves.

    Where a launcher's agent hosts the store. Elsewhere the store may be gone with the rank that hosts it.
    """

    def __init__(self) -> None:
        self._departures = 0

    def leave(self, what: str, *, raised: bool) -> bool:
        if dist.is_initialized():
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                with contextlib.suppress(RuntimeError):
                    store = dist.distributed_c10d._get_default_store()
                    store.set(self._key(dist.get_rank()), what)
                    store.add(self._key("any"), 1)
            # A process that makes its group anew, in the same store, is back.
            self._departures += 1
        return False

    def explain(self, error: BaseException) -> str:
        return ""

    def look_for(self, what: str, missing: Callable[[], list[int]]) -> None:
        """Raise if one of the ``missing`` ranks has left the group that this process is in."""
        store = dist.distributed_c10d._get_default_store()
        if store.add(self._key("any"), 0) == 0:
            return
        for rank in missing():
            if store.check([self._key(rank)]):
                raise LockstepError(
                    f"{what} is collective, but rank {rank} {store.get(self._key(rank)).decode()}: all ranks have to "
                    "call it before any of them leaves"
                )

    def _key(self, rank: int | str) -> str:
        return f"dmuon_hf/left/{self._departures}/{rank}"


_member = _Member()
guard_exit(_member)
