"""Never hang: notice that ranks run different collectives, and say so on every rank.

A rank that leaves the common order of collectives (a layer dropped on one rank, a save under ``if rank == 0``) makes
the others wait for ever. The monitor keeps a cheap record of what this rank issues and waits for. A daemon thread
(:mod:`.watch`) compares it with the other ranks' once this rank has not moved for a while, and only a proof
ends the run ([Note: what proves that ranks diverged] in :mod:`.positions`).

The host's own waits on the CPU are made in slices, so the error is raised in the main thread where the rank waits. A
main thread inside somebody else's collective cannot be woken: its process prints the same message and, on the CPU and
after a grace period, runs its exit handlers and ends. On an accelerator the backend's own timeout ends it, with the
backend's record of what was in flight.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh

from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.grid_group import GridGroup
from dmuon_hf.core.lockstep.backend import is_backend_failure
from dmuon_hf.core.lockstep.meeting import await_all
from dmuon_hf.core.lockstep.order import GroupOrder
from dmuon_hf.core.lockstep.positions import ON_CHANNEL, disagreement
from dmuon_hf.core.lockstep.stack import fsdp_module_here
from dmuon_hf.core.lockstep.watch import LockstepWatch, group_label
from dmuon_hf.core.mesh import Topology

__all__ = ["Channel", "LockstepMonitor", "monitor_in", "monitor_of", "monitor_on", "note_foreign"]

_SLICE = timedelta(seconds=1)
_PAUSE = 0.05
_TAIL = 64
_DIGEST_BITS = 48
# fp32 holds integers of this many bits exactly.
_WORD_BITS = 24
_WORD_MASK = (1 << _WORD_BITS) - 1
# Below every word and its negative.
_ABSENT = -float(1 << (_WORD_BITS + 1))


# In the order of dedication, which is the same on all ranks.
_started: list[weakref.ref[LockstepMonitor]] = []


class Channel(enum.IntEnum):
    """Where the runtime issues collectives; each has one order on all ranks that take part in it.

    SHARD: gathers and the first stage of reductions, inside one replica. REPLICATE: publishes, inside one column of
    replicas. CONTROL: agreements and meetings of all data-parallel ranks.
    """

    SHARD = 0
    REPLICATE = 1
    CONTROL = 2


class _Record:
    """What was issued on one channel: how many, a digest of all, the last ones."""

    __slots__ = ("count", "digest", "tail")

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self.tail: deque[str] = deque(maxlen=_TAIL)

    def add(self, what: str) -> None:
        self.count += 1
        self.digest = (self.digest * 1000003 + zlib.crc32(what.encode())) & ((1 << _DIGEST_BITS) - 1)
        self.tail.append(what)


class _LatePeerError(Exception):
    """A peer has not come to a meeting that the ranks can do without."""


class _Waiting:
    """Context of one wait; what an outer one says counts again when it ends."""

    __slots__ = ("_monitor", "_outer", "_what")

    def __init__(self, monitor: LockstepMonitor, what: str) -> None:
        self._monitor = monitor
        self._what = what
        self._outer = ""

    def __enter__(self) -> None:
        monitor = self._monitor
        self._outer = monitor.waiting_for
        monitor.waiting_for = self._what
        monitor.events += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        monitor = self._monitor
        monitor.waiting_for = self._outer
        monitor.events += 1
        if error is not None and is_backend_failure(error):
            raise monitor.lost_peer(error, self._what) from error


class LockstepMonitor:
    """The lockstep of one runtime, as its rank sees it.

    Inert until :meth:`start`. The main thread writes plain attributes and the daemon thread reads them; nothing is
    locked, since a torn read only delays what the daemon sees by one look.

    Attributes:
        events: Changes whenever the runtime issues, enters or leaves a collective.
        waiting_for: What the host waits for; empty outside of the runtime's own waits.
        thread: Identifier of the thread that issued last (autograd runs hooks in threads of its own on an accelerator).
        step: Optimizer steps agreed on.
        verdict: How the ranks diverged, once that is proven.
    """

    def __init__(self) -> None:
        self.events = 0
        self.waiting_for = ""
        self.thread = threading.get_ident()
        self.step = 0
        self.verdict: str | None = None
        self._records = [_Record() for _ in Channel]
        self._foreign: dict[str, _Record] = {}
        self._meetings: dict[str, _Record] = {}
        self._groups: dict[Channel, tuple[ProcessGroup, ...]] = {}
        self._orders: dict[ProcessGroup, GroupOrder] = {}
        self._scopes = [channel.name.lower() for channel in Channel]
        self._topology: Topology | None = None
        self._watch: LockstepWatch | None = None
        # Of the same process: one of more ranks, and one of fewer.
        self._outer: weakref.ref[LockstepMonitor] | None = None
        self._inner: weakref.ref[LockstepMonitor] | None = None

    def start(self, topology: Topology) -> None:
        """Begin to watch. Every data-parallel rank calls it, in the order in which models are dedicated.

        ``DMUON_HANG_SECONDS`` (10 by default) is how long a rank may stand still before positions are compared; 0 turns
        the thread off and leaves the comparison of records in every optimizer step. ``DMUON_HANG_ABORT_SECONDS`` (10 on
        the CPU, 0 on an accelerator) is how long a main thread that cannot be woken may stay after the ranks are known
        to have diverged; 0: for ever.

        Raises:
            ConfigurationError: One of them is no number of seconds.
        """
        if topology.grid is None or topology.grid.size == 1:
            return
        self._topology = topology
        if topology.is_hsdp:
            self._scopes[Channel.SHARD] += f" of replica {topology.replicate_rank}"
            self._scopes[Channel.REPLICATE] += f" of column {topology.shard_rank}"
        if topology.tensor is not None:
            for channel in (Channel.SHARD, Channel.REPLICATE):
                self._scopes[channel] += f" of tensor-parallel rank {topology.tensor.rank}"
        self._watch = LockstepWatch.start(self, topology)
        if self._watch is not None and topology.device.type == "cpu":
            groups = {
                Channel.SHARD: (topology.shard_group,),
                Channel.REPLICATE: (topology.replicate_group,),
                Channel.CONTROL: topology.grid.groups,
            }
            for channel, found in groups.items():
                self._groups[channel] = tuple(g for g in found if g is not None and dist.get_world_size(g) > 1)
        _started.append(weakref.ref(self))

    def follow(self, outer: LockstepMonitor) -> None:
        """End waits here by what ``outer``, of more ranks, proves, which sees these waits as its own."""
        self._outer, outer._inner = weakref.ref(outer), weakref.ref(self)

    @property
    def stands_in(self) -> str:
        """What the host waits for, in a collective noted here or by a monitor of fewer ranks."""
        inner = self._inner and self._inner()
        return self.waiting_for or (inner.waiting_for if inner else "")

    @property
    def activity(self) -> int:
        """Changes with :attr:`events`, also of a monitor of fewer ranks."""
        inner = self._inner and self._inner()
        return self.events + (inner.events if inner else 0)

    def covers(self, mesh: DeviceMesh) -> bool:
        """Whether owned tensors of this runtime lie on ``mesh``; not before :meth:`start` nor with one rank."""
        if self._topology is None:
            return False
        tensor = self._topology.tensor
        return mesh == self._topology.mesh or (tensor is not None and mesh == tensor.whole)

    def spans(self, group: ProcessGroup) -> bool:
        """Whether the host waits for collectives, and all ranks of ``group`` are watched by this monitor."""
        topology = self._topology
        if topology is None or topology.grid is None or topology.device.type != "cpu":
            return False
        return set(get_process_group_ranks(group)) <= set(topology.grid.ranks)

    @property
    def group(self) -> GridGroup | None:
        """All ranks of the model; ``None`` before :meth:`start` and with one rank."""
        return None if self._topology is None else self._topology.grid

    @property
    def is_open(self) -> bool:
        """Whether this rank can meet its peers."""
        return self._watch is not None and self._watch.is_open

    def __deepcopy__(self, memo: dict[int, Any]) -> LockstepMonitor:
        """The same one, for copies of parts of a model; a copy has no ranks of its own."""
        return self

    def __reduce__(self) -> tuple[type[LockstepMonitor], tuple[()]]:
        """One that watches nothing, for a part of a model that is pickled."""
        return LockstepMonitor, ()

    def close(self) -> None:
        """Stop the daemon thread. Safe to call twice; also happens when the monitor or the process group is gone."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    # -- the main thread's notes --------------------------------------------------------------------------------------

    def issue(self, channel: Channel, what: str) -> None:
        """Note that the collective called ``what`` is about to be issued. About 1 us.

        Raises:
            LockstepError: The ranks are known to have diverged ([Note: a rank asks before it leaves the order]).
        """
        for group in self._groups.get(channel, ()):
            self.before(group, what)
        self._records[channel].add(what)
        self.thread = threading.get_ident()
        self.events += 1

    def before(self, group: ProcessGroup, what: str) -> None:
        """Ask before leaving the order of ``group``: see [Note: a rank asks before it leaves the order].

        Raises:
            LockstepError: The ranks are known to have diverged.
        """
        if self._groups and self.is_open:
            order = self._orders.get(group) or self._orders.setdefault(group, self._order_on(group))
            order.before(what)

    def _order_on(self, group: ProcessGroup) -> GroupOrder:
        watch, label, ranks = self._watch, group_label(group), get_process_group_ranks(group)
        assert watch is not None
        # There from the start: what one rank has and another lacks, they do not take part in together.
        self._meetings[f"order of {label}"] = _Record()

        def meet(what: str, expected: str) -> None:
            if module := fsdp_module_here():
                what = f"{what.partition(' of ')[0]} of {module}"
            what = f"{what} in place of {expected}"
            started = time.monotonic()

            def check(missing: Callable[[], list[int]]) -> None:
                self.check()
                if time.monotonic() - started >= watch.patience:
                    raise _LatePeerError

            with self.meeting(what, f"order of {label}") as store:
                try:
                    await_all(what, store, ranks, check=check, timeout=None)
                except _LatePeerError:
                    # Nothing was proven: the peer is busy, or was killed, of which its closed connection tells.
                    store.add(f"{what}/number/{dist.get_rank()}", 1)

        def refuse(number: int, mine: str, rank: int, theirs: str) -> NoReturn:
            self._refuse(disagreement(number, label, {rank: theirs, watch.rank: mine}))

        store = watch.store(f"order/{label}")
        return GroupOrder(store, rank=watch.rank, first=ranks[0] == dist.get_rank(), meet=meet, refuse=refuse)

    def _refuse(self, verdict: str) -> NoReturn:
        """Raise on every rank, here when they have had time to read why."""
        assert self._watch is not None
        self._watch.declare(verdict)
        with self.at("all ranks to read why they end"):
            while self.is_open:
                self.check()
                time.sleep(_PAUSE)
        raise LockstepError(verdict)

    def note(self, group: str, what: str) -> None:
        """Note a collective of somebody else's on a process group, named alike on all its ranks. About 1 us.

        All ranks of a group issue its collectives in one order, so these records are compared like the runtime's own.
        """
        self._foreign.setdefault(group, _Record()).add(what)
        self.events += 1

    def at(self, what: str) -> _Waiting:
        """Context in which this rank waits for other ranks: ``with monitor.at("gather of unit x"): ...``."""
        return _Waiting(self, what)

    def wait(self, work: Any, what: str = "") -> None:
        """Wait for a work handle, as long as it takes or until the ranks are known to have diverged.

        On the CPU the host waits; on an accelerator the current stream does, and nothing is raised here.

        Args:
            work: The handle.
            what: Its name for the error, by default what :meth:`at` says.

        Raises:
            LockstepError: The ranks diverged, or a peer is gone.
        """
        if self._topology is None or self._topology.device.type != "cpu":
            work.wait()
            return
        while (failure := _wait_a_slice(work)) is not None:
            # Some handles of gloo (of a reduce-scatter) never count as completed: what they raise tells.
            if is_backend_failure(failure) or (work.is_completed() and (failure := _wait_a_slice(work)) is not None):
                raise self.lost_peer(failure, what or self.waiting_for) from failure
            self.check()

    def check(self) -> None:
        """Raise if the ranks are known to have diverged."""
        outer = self._outer and self._outer()
        verdict = self.verdict or (outer.verdict if outer else None)
        if verdict is not None:
            raise LockstepError(verdict)

    @contextlib.contextmanager
    def meeting(self, what: str, among: str = "") -> Iterator[Any]:
        """Context in which this rank waits for all others to come to ``what``; gives the store to meet in.

        What an exception leaves unfinished counts as never issued, so that the ranks can meet again. ``among`` names
        other ranks than all of the model, whose meetings are counted for themselves.

        Raises:
            LockstepError: The ranks cannot meet any more.
        """
        assert self._watch is not None
        store = self._watch.meeting_place(what)
        record = self._meetings[among] if among else self._records[Channel.CONTROL]
        count, digest, tail = record.count, record.digest, record.tail.copy()
        record.add(what)
        try:
            with self.at(what):
                yield store
        except BaseException:
            record.count, record.digest, record.tail = count, digest, tail
            raise

    # -- agreement in every optimizer step ----------------------------------------------------------------------------

    def digests(self) -> Tensor:
        """Digest of what was issued inside this replica, for :meth:`compare`; each replica has its place.

        Returns:
            fp32 words, to be maximised over all data-parallel ranks; empty where there is one rank.
        """
        if self._topology is None:
            return torch.empty(0)
        digest = self._records[Channel.SHARD].digest
        words = torch.full((2, self._topology.replicate_size, 2), _ABSENT)
        mine = torch.tensor([digest >> _WORD_BITS, digest & _WORD_MASK], dtype=torch.float32)
        words[:, self._topology.replicate_rank] = torch.stack([mine, -mine])
        return words.flatten()

    def compare(self, agreed: Tensor) -> None:
        """Check that every rank of a replica has issued the same, and count a step.

        Args:
            agreed: Elementwise maximum of all ranks' :meth:`digests`.

        Raises:
            LockstepError: On every rank, if some have gathered or reduced other units since the model was dedicated.
        """
        self.step += 1
        for order in self._orders.values():
            order.end_step()
        if agreed.numel() == 0:
            return
        most, least_negated = agreed.cpu().view(2, -1)
        # A replica without a word has no process: one rank plans for a large world on a fake group.
        spoken = most != _ABSENT
        if torch.equal(most[spoken], -least_negated[spoken]):
            return
        difference = self._watch.difference() if self._watch is not None else None
        raise LockstepError(
            difference
            or "the ranks have gathered or reduced different units since the last step, so weights or gradients were "
            "mixed up: a layer ran on some ranks only, or in another order. Every data-parallel rank must run the same "
            "layers"
        )

    # -- what the daemon reads ----------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """How many collectives the program has issued, by channel of the runtime and by FSDP2 on its groups."""
        own = {ON_CHANNEL + scope: record.count for scope, record in zip(self._scopes, self._records, strict=True)}
        others = {f"of FSDP2 on {group}": record for group, record in self._foreign.copy().items()}
        others |= {f"in meetings about the {among}": record for among, record in self._meetings.copy().items()}
        return own | {where: record.count for where, record in others.items()}

    def record(self) -> dict[str, tuple[int, Sequence[str]]]:
        """By channel and by group of others, how many collectives were issued and the last of them."""
        # A copy in one call: the main thread may add a group meanwhile.
        own = dict(zip(self._scopes, self._records, strict=True))
        records = {**own, **self._foreign.copy(), **self._meetings.copy()}
        return {scope: (record.count, tuple(record.tail)) for scope, record in records.items()}

    def lost_peer(self, failure: BaseException, what: str) -> LockstepError:
        """The error for a failure of the backend: with the reason why, if some rank has said it."""
        reason = self._watch.known_reason() if self._watch is not None else None
        if reason is not None and reason.is_verdict:
            return LockstepError(reason.text)
        said = reason.text if reason else "no rank has said why it ended, so it was killed or crashed; look at its log"
        return LockstepError(
            f"a peer was lost while this rank waited for {what or 'a collective'} (step {self.step}): {said}. "
            f"The backend says: {failure}"
        )


def monitor_on(mesh: DeviceMesh) -> LockstepMonitor | None:
    """The first living monitor of a model whose owned tensors lie on ``mesh``; the same one on every rank."""
    _started[:] = [reference for reference in _started if reference() is not None]
    for reference in _started:
        monitor = reference()
        if monitor is not None and monitor.is_open and monitor.covers(mesh):
            return monitor
    return None


def monitor_of(ranks: Sequence[int]) -> LockstepMonitor | None:
    """The first living monitor of a model on exactly these global ranks, in whatever order; the same one on each."""
    wanted = sorted(ranks)
    for reference in _started:
        monitor = reference()
        if monitor is not None and monitor.is_open and monitor.group and sorted(monitor.group.ranks) == wanted:
            return monitor
    return None


def monitor_in(group: ProcessGroup) -> LockstepMonitor | None:
    """A living monitor of a model on the ranks of ``group`` among others, on the CPU; ``None`` without one."""
    for reference in _started:
        monitor = reference()
        if monitor is not None and monitor.is_open and monitor.spans(group):
            return monitor
    return None


def note_foreign(group: ProcessGroup, what: str) -> None:
    """Have every monitor of this process note a collective that the runtime does not issue itself."""
    for reference in _started:
        monitor = reference()
        if monitor is not None:
            monitor.note(group_label(group), what)


def _wait_a_slice(work: Any) -> RuntimeError | None:
    """Why the operation has not succeeded, ``None`` if it has. Running out of time leaves the operation alone."""
    try:
        work.wait(_SLICE)
    except RuntimeError as error:
        return error
    return None
