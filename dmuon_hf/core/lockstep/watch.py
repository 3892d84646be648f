"""The daemon thread of :mod:`.monitor`: looks at the main thread, compares positions in the store, acts on a proof."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dmuon_hf.core.errors import ConfigurationError, LockstepError
from dmuon_hf.core.grid_group import GridGroup
from dmuon_hf.core.lockstep.backend import is_backend_failure
from dmuon_hf.core.lockstep.farewell import guard_exit, run_exit_handlers, unguard_exit
from dmuon_hf.core.lockstep.positions import (
    MIXED_PATIENCE,
    ON_GROUP,
    UNNAMED,
    Position,
    State,
    find_divergence,
    summary,
)
from dmuon_hf.core.lockstep.stack import Sample, sample_thread
from dmuon_hf.core.mesh import Topology

if TYPE_CHECKING:
    from .monitor import LockstepMonitor

__all__ = ["LockstepWatch", "group_label"]

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "DMUON_HANG_SECONDS"
GRACE_VARIABLE = "DMUON_HANG_ABORT_SECONDS"
_DEFAULT_LIMIT = 10.0
_GRACE_ON_CPU = 10.0
_STORE_TIMEOUT = timedelta(seconds=5)
# Ranks that compare everybody's positions; the others only read the verdict, so the store's load stays linear.
_JUDGES = 4
_STORE_FAILURES = 3
# Looks after which a verdict is acted on although some rank has not read it.
_TELLING = 3
# Multiple of the limit after which a wait that proves nothing is reported.
_REPORT = 3.0
_MARGIN = 10.0

_END = "has come to the end of its main thread"

# How many runtimes were watched on each set of ranks: names the keys of one runtime in the store.
_watched: dict[tuple[int, ...], int] = {}


class Reason(NamedTuple):
    """Why a peer is gone."""

    text: str
    is_verdict: bool
    """Whether it is a proof that the ranks diverged, rather than what a rank ended with."""


class LockstepWatch:
    """Peers, store and thread of one monitor. Built by :meth:`start`."""

    def __init__(self, monitor: LockstepMonitor, topology: Topology, store: Any, *, limit: float) -> None:
        self._monitor = weakref.ref(monitor)
        assert topology.grid is not None
        self._ranks = topology.grid.ranks
        self._rank = self._ranks[topology.grid.rank]
        self._judges = topology.grid.rank < _JUDGES
        self._follow_host = topology.device.type != "cpu"
        self._store = store
        self._world = weakref.ref(dist.group.WORLD)
        self._pid = os.getpid()
        self._limit = limit
        self._tick = min(max(limit / 4, 1.0), 2.0)
        self._asked_grace = _seconds(GRACE_VARIABLE, -1.0)
        self._store_may_go = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._hosts_store = self._store_may_go and dist.get_rank() == 0
        self._stopped = threading.Event()
        self._host_left: Position | None = None
        self._events = -1
        self._quiet_since = self._still_since = self._told_at = time.monotonic()
        self._sample: Sample | None = None
        self._seen: dict[str, int] = {}
        self._published: tuple[str, str] | None = None
        self._reported = False
        self._verdict: str | None = None
        self._named_at: float | None = None
        self._raised_at = 0.0

    @classmethod
    def start(cls, monitor: LockstepMonitor, topology: Topology) -> LockstepWatch | None:
        """Publish a first position and start the thread; ``None`` where that is turned off or not possible."""
        assert topology.grid is not None
        limit = _seconds(LIMIT_VARIABLE, _DEFAULT_LIMIT)
        if limit == 0 or topology.grid.is_fake:
            return None
        store = _own_store(topology.grid)
        if store is None:
            return None
        watch = cls(monitor, topology, store, limit=limit)
        watch._publish(watch._position("busy", "setting up"))
        # Threads of the runtime hold it weakly: a model that is dropped ends its watch at once.
        weakref.finalize(monitor, watch.stop).atexit = False
        thread = threading.Thread(target=watch._run, name=f"dmuon-lockstep-{watch._rank}", daemon=True)
        thread.start()
        guard_exit(watch, thread)
        return watch

    def stop(self) -> None:
        """End the thread at its next wake-up, which is now. From any thread, also while the interpreter ends."""
        self._stopped.set()
        unguard_exit(self)

    @property
    def is_open(self) -> bool:
        """Whether the peers can be reached: the watch was not stopped and its process group lives."""
        return not self._stopped.is_set() and self._world() is dist.group.WORLD

    # -- called by the main thread ------------------------------------------------------------------------------------

    def meeting_place(self, what: str) -> Any:
        """The store in which all ranks meet.

        Raises:
            LockstepError: The rank that hosts it has left.
        """
        if self._host_left is not None:
            raise LockstepError(
                f"rank {self._host_left.rank} {self._host_left.describe()}, so {what} cannot be called any more: all "
                "ranks have to call it before any of them leaves"
            )
        return self.store("meeting")

    @property
    def rank(self) -> int:
        """What messages call this process: its global rank."""
        return self._rank

    @property
    def patience(self) -> float:
        """Seconds within which ranks that have stopped are known to have diverged, with a margin."""
        return _REPORT * self._limit + _MARGIN

    def store(self, prefix: str) -> Any:
        """A part of the job's store that is this model's alone."""
        return dist.PrefixStore(prefix, self._store)  # type: ignore[attr-defined]

    def declare(self, verdict: str) -> None:
        """Tell all ranks, which raise it, that the ranks are known to have diverged, unless some rank has said how."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("verdict", "", verdict)

    def leave(self, what: str, *, raised: bool) -> bool:
        """Tell the others that this process leaves; whether its exit may block in collectives that are stuck.

        A rank that hosts the store stays for at most a few looks, until the others have read this.
        """
        monitor, was_open = self._monitor(), self.is_open
        self._stopped.set()
        if monitor is None or not was_open or os.getpid() != self._pid:
            return False
        if self._host_left is None:
            with contextlib.suppress(RuntimeError):
                self._publish(self._position("ended", what, raised=raised))
                if self._hosts_store:
                    self._wait_for_readers()
        return (raised or monitor.verdict is not None) and not self._follow_host

    def _wait_for_readers(self) -> None:
        self._store.set("farewell", "1")
        deadline = time.monotonic() + 2 * self._tick
        while time.monotonic() < deadline:
            others = sum(position.state != "ended" for position in self._positions())
            if self._store.add("farewell/read", 0) >= others:
                return
            time.sleep(0.01)

    def known_reason(self) -> Reason | None:
        """What some rank has proven, or what those that ended have said, if the store still answers."""
        with contextlib.suppress(RuntimeError):
            verdict = self._read_verdict(judge=False)
            if verdict is not None:
                return Reason(verdict, is_verdict=True)
        ended = [self._host_left] if self._host_left is not None else []
        with contextlib.suppress(RuntimeError):
            ended = [position for position in self._positions() if position.state == "ended"] or ended
        return Reason("; ".join(f"rank {p.rank} {p.describe()}" for p in ended), is_verdict=False) if ended else None

    def explain(self, error: BaseException) -> str:
        """Why a backend failed, for the log of a process that ends with that; empty if it did not or nobody knows."""
        reason = self.known_reason() if is_backend_failure(error) and self.is_open else None
        return f"rank {self._rank}: {reason.text}" if reason else ""

    def difference(self) -> str | None:
        """How the ranks' records differ. Every rank calls it; waits a few seconds for late ones."""
        with contextlib.suppress(RuntimeError):
            position = self._position("waits", "the comparison of what was issued", own=True)
            self._store.set(f"compared/{self._rank}", position.to_json())
            keys = [f"compared/{rank}" for rank in self._ranks]
            return find_divergence([Position.from_json(t) for t in self._store.multi_get(keys)], limit=self._limit)
        return None

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while not self._stopped.wait(self._tick):
            monitor = self._monitor()
            if monitor is None or self._world() is not dist.group.WORLD:
                break
            try:
                self._look(monitor)
                failures = 0
            except dist.DistNetworkError:
                # The store went with a process that could not say so; the backend tells those that wait for it.
                break
            except RuntimeError as error:
                failures += 1
                if failures == _STORE_FAILURES:
                    logger.warning("the lockstep monitor ends, the store does not answer: %s", error)
                    break
            del monitor

    def _look(self, monitor: LockstepMonitor) -> None:
        still = self._is_still(monitor)
        waiting = self._waiting_for(monitor) if still else None
        if self._host_left is None:
            self._read_farewell()
        if self._host_left is not None:
            if waiting is not None and self._verdict is None:
                positions = [self._position("waits", waiting[0], own=waiting[1]), self._host_left]
                self._verdict = find_divergence(positions, limit=self._limit) if self._is_overdue else None
        elif waiting is not None:
            self._compare(*waiting)
        elif still and _program_has_ended(monitor.thread):
            if self._published != (_END, ""):
                self._publish(self._position("ended", _END))
                self._published = (_END, "")
        else:
            self._reported = False
            self._publish_busy()
        if self._verdict is None and self._host_left is None:
            self._verdict = self._read_verdict(judge=False)
        if self._verdict is not None:
            self._act(monitor, self._verdict, waiting)

    def _compare(self, what: str, own: bool) -> None:
        """Say where this rank waits, and see whether the positions of all prove that it waits in vain."""
        still = time.monotonic() - self._still_since
        if self._verdict is None and self._is_overdue:
            self._publish_wait(what, own, still)
            self._verdict = self._read_verdict(judge=self._judges)
        if self._verdict is None and still >= _REPORT * self._limit and self._judges:
            self._report(still)

    @property
    def _is_overdue(self) -> bool:
        return time.monotonic() - self._still_since >= self._limit

    def _read_farewell(self) -> None:
        """Read what the rank that hosts the store says before it takes the store with it."""
        if not self._store_may_go or not self._store.check(["farewell"]):
            return
        host = next((p for p in self._positions() if p.state == "ended" and p.hosts_store), None)
        self._store.add("farewell/read", 1)
        self._host_left = host

    def _publish_busy(self) -> None:
        """Take back what was published about a wait; say now and then what this rank does instead of communicating."""
        now = time.monotonic()
        overdue = now - max(self._quiet_since, self._told_at) >= self._limit
        if self._published is not None or overdue:
            self._publish(self._position("busy", "work of its own"))
            self._published = None
            self._told_at = now

    def _publish_wait(self, what: str, own: bool, still: float) -> None:
        position = self._position("waits", what, own=own, seconds=still)
        key = (what, str(position.issued))
        if self._published != key or still >= MIXED_PATIENCE * self._limit:
            self._publish(position)
            self._published = key

    def _report(self, still: float) -> None:
        """Once per wait, and from one rank, say who is waited for. Not an error."""
        positions = self._positions()
        if self._reported or min((p.rank for p in positions if p.state == "waits"), default=-1) != self._rank:
            return
        self._reported = True
        logger.warning("no progress for %.0f s, still waiting: %s", still, summary(positions))

    def _read_verdict(self, *, judge: bool) -> str | None:
        """What some rank has proven, or what the positions prove now."""
        if self._store.check(["verdict"]):
            return str(self._store.get("verdict").decode())
        verdict = find_divergence(self._positions(), limit=self._limit) if judge else None
        if verdict is not None:
            self.declare(verdict)
        return verdict

    def _is_still(self, monitor: LockstepMonitor) -> bool:
        """Whether the rank has issued nothing, and its thread stands where it stood, since the last look.

        Where it stands in a known collective only the counts of that collective's groups are looked at: other threads
        may issue some of their own meanwhile.
        """
        now = time.monotonic()
        events, waits = monitor.activity, bool(monitor.stands_in)
        sample = None if waits else _sample(monitor.thread)
        counts = {} if waits else _counts(sample.groups if sample and sample.operation else None)
        same = events == self._events and counts == self._seen and _unmoved(sample, self._sample)
        if events != self._events:
            self._quiet_since = now
        if not same:
            self._still_since = now
        self._events, self._seen, self._sample = events, counts, sample
        return same

    def _waiting_for(self, monitor: LockstepMonitor) -> tuple[str, bool] | None:
        """What collective this rank stands in and whether it is the runtime's own; ``None`` if it is busy."""
        if monitor.stands_in:
            return monitor.stands_in, True
        sample = self._sample
        if sample is None:
            return None
        if sample.operation is not None:
            return sample.operation + (f" of {sample.subject}" if sample.subject else ""), False
        # An accelerator's host waits for collectives in calls that look like any other.
        return (UNNAMED, False) if self._follow_host else None

    def _act(self, monitor: LockstepMonitor, verdict: str, waiting: tuple[str, bool] | None) -> None:
        """Say the verdict and let the main thread raise it; end a process on the CPU that stands elsewhere for long.

        In a wait of the runtime the main thread raises the verdict by itself, but only after every rank has had time to
        read it: a rank that ends closes its connections, and the others shall have said the reason before that error.
        """
        now = time.monotonic()
        own = waiting is not None and waiting[1]
        if self._named_at is None:
            self._named_at = now
            if not own:
                logger.error("rank %d: %s", self._rank, verdict)
        if monitor.verdict is None and (self._all_know() or now - self._named_at >= _TELLING * self._tick):
            monitor.verdict = verdict
            self._raised_at = now
        stands_for = now - max(self._raised_at, self._still_since) if monitor.verdict and waiting else 0.0
        if 0 < self._grace <= stands_for:
            self._end(verdict)

    def _all_know(self) -> bool:
        """Whether every rank that is still there has read the verdict."""
        if self._host_left is not None:
            return True
        try:
            self._store.set(f"told/{self._rank}", "1")
            staying = [position.rank for position in self._positions() if position.state != "ended"]
            return bool(self._store.check([f"told/{rank}" for rank in staying]))
        except RuntimeError:  # no store, nobody to wait for
            return True

    @property
    def _grace(self) -> float:
        """Seconds until a process that stands elsewhere is ended.

        0 leaves it to its backend's own timeout, which on an accelerator also records what was in flight.
        """
        if self._asked_grace >= 0:
            return self._asked_grace
        return 0.0 if self._follow_host else _GRACE_ON_CPU

    def _end(self, verdict: str) -> NoReturn:
        sys.stderr.write(
            f"dmuon_hf LockstepError on rank {self._rank}: {verdict}. The main thread stands in a collective that "
            f"cannot be woken, so this process runs its exit handlers and ends ({GRACE_VARIABLE}=0 leaves it).\n"
        )
        sys.stderr.flush()
        run_exit_handlers()
        os._exit(1)

    # -- positions ----------------------------------------------------------------------------------------------------

    def _position(
        self, state: State, what: str, *, own: bool = False, seconds: float = 0.0, raised: bool = False
    ) -> Position:
        monitor = self._monitor()
        assert monitor is not None
        return Position(
            rank=self._rank,
            state=state,
            what=what,
            step=monitor.step,
            seconds=round(seconds, 1),
            own=own,
            raised=raised,
            issued={**_counts(), **monitor.counts()},
            stands_on=tuple(_counts(self._sample.groups)) if self._sample is not None and not own else (),
            beyond=state == "waits" and (not monitor.waiting_for if own else self._may_wait_beyond()),
            hosts_store=self._hosts_store,
            record=monitor.record(),
            trail=self._sample.trail if self._sample is not None else (),
        )

    def _may_wait_beyond(self) -> bool:
        """Whether the main thread may stand in a collective with ranks that are not of this model."""
        groups = self._sample.groups if self._sample is not None else ()
        known = [rank for group in groups for rank in dist.get_process_group_ranks(group)]
        return not set(known or range(dist.get_world_size())) <= set(self._ranks)

    def _publish(self, position: Position) -> None:
        self._store.set(f"position/{self._rank}", position.to_json())

    def _positions(self) -> list[Position]:
        """The last position of every rank; empty while some rank has not begun to watch."""
        keys = [f"position/{rank}" for rank in self._ranks]
        if not self._store.check(keys):
            return []
        return [Position.from_json(text) for text in self._store.multi_get(keys)]


def _own_store(grid: GridGroup) -> Any | None:
    """A connection of its own to the job's store, under keys that only this runtime on these ranks uses."""
    number = _watched[grid.ranks] = _watched.get(grid.ranks, 0) + 1
    store = dist.distributed_c10d._get_default_store()
    try:
        own = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(_STORE_TIMEOUT)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        logger.warning("the lockstep monitor is off: no second connection to the store (%s)", error)
        return None
    return dist.PrefixStore(f"dmuon_lockstep/{grid.name}/{number}/", own)  # type: ignore[attr-defined]


def _sample(thread: int) -> Sample | None:
    """Where ``thread`` stands, or the main thread if it runs no Python: autograd's threads do only inside of hooks."""
    sample = sample_thread(thread)
    main = threading.main_thread().ident
    return sample_thread(main) if sample is None and main is not None else sample


def _program_has_ended(thread: int) -> bool:
    """Whether only other threads keep this process, where ``thread`` is the last that issued a collective."""
    main = threading.main_thread()
    return not main.is_alive() and (thread == main.ident or sample_thread(thread) is None)


def _unmoved(sample: Sample | None, before: Sample | None) -> bool:
    if sample is None or before is None:
        return sample is before
    return sample.signature == before.signature


def _counts(groups: Iterable[ProcessGroup] | None = None) -> dict[str, int]:
    """Collectives that all threads of this process have issued on ``groups``; by default all that it is in."""
    counts: dict[str, int] = {}
    for group in list(dist.distributed_c10d._world.pg_names) if groups is None else groups:
        with contextlib.suppress(RuntimeError):
            label = ON_GROUP + group_label(group)
            counts[label] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return counts


def group_label(group: ProcessGroup) -> str:
    """A name of a process group that is the same on all its ranks."""
    return f"{group.group_desc} {group.group_name[:6]}"


def _seconds(variable: str, default: float) -> float:
    """A number of seconds from the environment; 0 turns off what it limits."""
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if text and not 0 <= seconds < float("inf"):
        raise ConfigurationError(f"{variable} must be a number of seconds, 0 to turn it off, got {text!r}")
    return seconds
