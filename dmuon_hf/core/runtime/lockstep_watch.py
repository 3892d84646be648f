"""The daemon thread of :mod:`.lockstep`: looks at the main thread, compares positions in the store, acts on a proof."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.runtime.lockstep_exit import guard_exit, unguard_exit
from dmuon_hf.core.runtime.lockstep_positions import (
    MIXED_PATIENCE,
    ON_HOST,
    UNNAMED,
    Position,
    State,
    find_divergence,
    summary,
)
from dmuon_hf.core.runtime.lockstep_stack import Sample, sample_thread

if TYPE_CHECKING:
    from .lockstep import LockstepMonitor

__all__ = ["LockstepWatch"]

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "DMUON_HANG_SECONDS"
GRACE_VARIABLE = "DMUON_HANG_ABORT_SECONDS"
_DEFAULT_LIMIT = 10.0
_DEFAULT_GRACE = 10.0
_STORE_TIMEOUT = timedelta(seconds=5)
# Ranks that compare everybody's positions; the others only read the verdict, so the store's load stays linear.
_JUDGES = 4
_STORE_FAILURES = 3
# Looks after which a verdict is acted on although some rank has not read it.
_TELLING = 3
# Multiple of the limit after which a wait that proves nothing is reported.
_REPORT = 3.0

# How many runtimes were watched on each set of ranks: names the keys of one runtime in the store.
_watched: dict[tuple[int, ...], int] = {}


class LockstepWatch:
    """Peers, store and thread of one monitor. Built by :meth:`start`."""

    def __init__(self, monitor: LockstepMonitor, topology: Topology, store: Any, *, limit: float) -> None:
        self._monitor = weakref.ref(monitor)
        self._rank = topology.flat_rank(topology.slot)
        self._size = topology.size
        self._follow_host = topology.device.type != "cpu"
        self._store = store
        self._world = weakref.ref(dist.group.WORLD)
        self._pid = os.getpid()
        self._limit = limit
        self._tick = min(max(limit / 4, 1.0), 2.0)
        self._grace = _seconds(GRACE_VARIABLE, _DEFAULT_GRACE)
        self._stopped = threading.Event()
        self._events = -1
        self._quiet_since = self._still_since = self._told_at = time.monotonic()
        self._sample: Sample | None = None
        self._issued: dict[str, int] = {}
        self._published: tuple[str, str] | None = None
        self._reported = False
        self._verdict: str | None = None
        self._named_at: float | None = None

    @classmethod
    def start(cls, monitor: LockstepMonitor, topology: Topology) -> LockstepWatch | None:
        """Publish a first position and start the thread; ``None`` where that is turned off or not possible."""
        assert topology.grid is not None
        limit = _seconds(LIMIT_VARIABLE, _DEFAULT_LIMIT)
        if limit == 0 or topology.grid.is_fake:
            return None
        store = _own_store(topology.grid.ranks)
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

    def arrive(self, meeting: int) -> Callable[[], bool]:
        """Count this rank in at a meeting; the result says whether everybody has come."""
        store, key = self._store, f"meeting/{meeting}"
        if store.add(key, 1) == self._size:
            store.set(f"{key}/complete", "1")
        return lambda: bool(store.check([f"{key}/complete"]))

    def leave(self, what: str, *, raised: bool) -> bool:
        """Tell the others that this process ends; whether its exit may block in collectives that are stuck.

        A clean exit is told where a launcher's agent hosts the store. Elsewhere the store may be gone with the rank
        that hosts it, and torch prints a page about every attempt to reach it.
        """
        monitor, was_open = self._monitor(), self.is_open
        self._stopped.set()
        if monitor is None or not was_open or os.getpid() != self._pid:
            return False
        if raised or dist.is_torchelastic_launched():
            with contextlib.suppress(RuntimeError):
                self._publish(self._position("ended", what, raised=raised))
        return raised or monitor.verdict is not None

    def known_verdict(self) -> str | None:
        """What some rank has proven, if the store still answers."""
        with contextlib.suppress(RuntimeError):
            return self._read_verdict(judge=False)
        return None

    def ended(self) -> list[Position]:
        """The ranks that have said that they ended."""
        try:
            return [position for position in self._positions() if position.state == "ended"]
        except RuntimeError:
            return []

    def difference(self) -> str | None:
        """How the ranks' records differ. Every rank calls it; waits a few seconds for late ones."""
        with contextlib.suppress(RuntimeError):
            position = self._position("waits", "the comparison of what was issued", own=True)
            self._store.set(f"compared/{self._rank}", position.to_json())
            keys = [f"compared/{rank}" for rank in range(self._size)]
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
                # The store went with the process that hosts it, which is often the first to end.
                break
            except RuntimeError as error:
                failures += 1
                if failures == _STORE_FAILURES:
                    logger.warning("the lockstep monitor ends, the store does not answer: %s", error)
                    break
            del monitor

    def _look(self, monitor: LockstepMonitor) -> None:
        waiting = self._waiting_for(monitor) if self._is_still(monitor) else None
        if waiting is None:
            self._named_at = None
            self._reported = False
            self._publish_busy()
            return
        what, own = waiting
        still = time.monotonic() - self._still_since
        overdue = still >= self._limit
        if self._verdict is None:
            if overdue:
                self._publish_wait(what, own, still)
            self._verdict = self._read_verdict(judge=overdue and self._rank < _JUDGES)
        if self._verdict is not None:
            self._act(monitor, self._verdict, own=own)
        elif still >= _REPORT * self._limit and self._rank < _JUDGES:
            self._report(still)

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
            self._store.set("verdict", verdict)
        return verdict

    def _is_still(self, monitor: LockstepMonitor) -> bool:
        """Whether the rank has issued nothing, and its thread stands where it stood, since the last look."""
        now = time.monotonic()
        issued, events = _issued(), monitor.events
        sample = None if monitor.waiting_for else _sample(monitor.thread)
        same = events == self._events and issued == self._issued and _unmoved(sample, self._sample)
        if events != self._events:
            self._quiet_since = now
        if not same:
            self._still_since = now
        self._events, self._issued, self._sample = events, issued, sample
        return same

    def _waiting_for(self, monitor: LockstepMonitor) -> tuple[str, bool] | None:
        """What collective this rank stands in and whether it is the runtime's own; ``None`` if it is busy."""
        if monitor.waiting_for:
            return monitor.waiting_for, True
        sample = self._sample
        if sample is None:
            return None
        if sample.operation is not None:
            return sample.operation + (f" of {sample.subject}" if sample.subject else ""), False
        # An accelerator's host waits for collectives in calls that look like any other.
        return (UNNAMED, False) if self._follow_host else None

    def _act(self, monitor: LockstepMonitor, verdict: str, *, own: bool) -> None:
        """Let the main thread raise; end the process if it still stands there after a grace period.

        In a wait of the runtime the main thread raises the verdict by itself, but only after every rank has had time to
        read it: a rank that ends closes its connections, and the others shall have said the reason before that error.
        """
        now = time.monotonic()
        if self._named_at is None:
            self._named_at = now
            if not own:
                logger.error("rank %d: %s", self._rank, verdict)
        all_told = True
        with contextlib.suppress(RuntimeError):  # no store, nobody to wait for
            self._store.set(f"told/{self._rank}", "1")
            all_told = self._store.check([f"told/{rank}" for rank in range(self._size)])
        if all_told or now - self._named_at >= _TELLING * self._tick:
            monitor.verdict = verdict
        if self._grace > 0 and now - self._named_at >= self._grace:
            sys.stderr.write(
                f"dmuon_hf LockstepError on rank {self._rank}: {verdict}. The main thread stands in a collective that "
                f"cannot be woken, so this process ends now ({GRACE_VARIABLE}=0 leaves it).\n"
            )
            sys.stderr.flush()
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
            issued={
                **{f"on group {group}": count for group, count in _issued(mark_host=self._follow_host).items()},
                # Without FSDP2's, which the counts of its process groups contain.
                **{f"on channel {channel}": count for channel, count in monitor.counts().items()},
            },
            record=monitor.record(),
            trail=self._sample.trail if self._sample is not None else (),
        )

    def _publish(self, position: Position) -> None:
        self._store.set(f"position/{self._rank}", position.to_json())

    def _positions(self) -> list[Position]:
        """The last position of every rank; empty while some rank has not begun to watch."""
        keys = [f"position/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):
            return []
        return [Position.from_json(text) for text in self._store.multi_get(keys)]


def _own_store(ranks: tuple[int, ...]) -> Any | None:
    """A connection of its own to the job's store, under keys that only this runtime on these ranks uses."""
    number = _watched[ranks] = _watched.get(ranks, 0) + 1
    store = dist.distributed_c10d._get_default_store()
    try:
        own = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(_STORE_TIMEOUT)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        logger.warning("the lockstep monitor is off: no second connection to the store (%s)", error)
        return None
    prefix = f"dmuon_lockstep/{ranks[0]}-{ranks[-1]}-{len(ranks)}/{number}/"
    return dist.PrefixStore(prefix, own)  # type: ignore[attr-defined]


def _sample(thread: int) -> Sample | None:
    """Where ``thread`` stands, or the main thread if it runs no Python: autograd's threads do only inside of hooks."""
    sample = sample_thread(thread)
    main = threading.main_thread().ident
    return sample_thread(main) if sample is None and main is not None else sample


def _unmoved(sample: Sample | None, before: Sample | None) -> bool:
    if sample is None or before is None:
        return sample is before
    return sample.signature == before.signature


def _issued(*, mark_host: bool = False) -> dict[str, int]:
    """Collectives issued so far by this rank, by process group, of every group it is in."""
    counts: dict[str, int] = {}
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        with contextlib.suppress(RuntimeError):
            label = _label(group, name) + (ON_HOST if mark_host and _is_of_host(group) else "")
            counts[label] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return counts


def _is_of_host(group: ProcessGroup) -> bool:
    config = dist.get_backend_config(group)
    return {part.rpartition(":")[2] for part in config.split(",")} <= {"gloo", "mpi"}


def _label(group: ProcessGroup, name: str) -> str:
    return f"{group.group_desc} {name[:6]}"


def _seconds(variable: str, default: float) -> float:
    """A number of seconds from the environment; 0 turns off what it limits."""
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigurationError(f"{variable} must be a number of seconds, 0 to turn it off, got {text!r}")
    return seconds
