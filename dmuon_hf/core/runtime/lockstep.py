"""Never hang: notice that ranks run different collectives, and say so on every rank.

A rank that leaves the common order of collectives (a layer dropped on one rank, a save under ``if rank == 0``) makes
the others wait for ever. The monitor keeps a cheap record of what this rank issues and waits for. A daemon thread
(:mod:`.lockstep_watch`) compares it with the other ranks' once this rank has not moved for a while, and only a proof
ends the run ([Note: what proves that ranks diverged] in :mod:`.lockstep_positions`).

The host's own waits on the CPU are made in slices, so the error is raised in the main thread where the rank waits. A
main thread inside somebody else's collective cannot be woken: its process prints the same message and, after a grace
period, ends, as NCCL's watchdog does.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError, LockstepError
from dmuon_hf.core.mesh import Topology
from dmuon_hf.core.runtime.lockstep_positions import Position
from dmuon_hf.core.runtime.lockstep_watch import LockstepWatch

__all__ = ["Collective", "LockstepMonitor"]

_LIMIT_VARIABLE = "DMUON_HANG_SECONDS"
_DEFAULT_LIMIT = 10.0
_SLICE = timedelta(seconds=1)
_TAIL = 64
_DIGEST_BITS = 48
# fp32 holds integers of this many bits exactly.
_WORD_BITS = 24
_WORD_MASK = (1 << _WORD_BITS) - 1
# Below every word and its negative.
_ABSENT = -float(1 << (_WORD_BITS + 1))


class Collective(enum.IntEnum):
    """Kinds of collective that the runtime issues, each in one order on all ranks that take part."""

    GATHER = 0
    REDUCE = 1
    PUBLISH = 2
    CONTROL = 3


class _Record:
    """What was issued of one kind: how many, a digest of all, the last ones."""

    __slots__ = ("count", "digest", "tail")

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self.tail: deque[str] = deque(maxlen=_TAIL)


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
        self._records = [_Record() for _ in Collective]
        self._scopes = [kind.name.lower() for kind in Collective]
        self._meetings = 0
        self._topology: Topology | None = None
        self._watch: LockstepWatch | None = None

    def start(self, topology: Topology) -> None:
        """Begin to watch. Every data-parallel rank calls it, in the order in which models are dedicated.

        ``DMUON_HANG_SECONDS`` (10 by default) is how long a rank may stand still before positions are compared; 0 turns
        the thread off and leaves the comparison of records in every optimizer step.

        Raises:
            ConfigurationError: ``DMUON_HANG_SECONDS`` is no number of seconds.
        """
        limit = _limit()
        if topology.flat_group is None or topology.size == 1:
            return
        self._topology = topology
        replica = f" in replica {topology.replicate_rank}" if topology.is_hsdp else ""
        column = f" in column {topology.shard_rank}" if topology.is_hsdp else ""
        self._scopes[Collective.GATHER] += replica
        self._scopes[Collective.PUBLISH] += column
        if limit > 0:
            self._watch = LockstepWatch.start(self, topology, limit=limit)

    def close(self) -> None:
        """Stop the daemon thread. Safe to call twice; also happens when the monitor or the process group is gone."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    # -- the main thread's notes --------------------------------------------------------------------------------------

    def issue(self, kind: Collective, what: str, code: int) -> None:
        """Note that a collective is issued; ``what`` names it for people, ``code`` for the digest. Under 1 us."""
        record = self._records[kind]
        record.count += 1
        record.digest = (record.digest * 1000003 + code + 1) & ((1 << _DIGEST_BITS) - 1)
        record.tail.append(what)
        self.thread = threading.get_ident()
        self.events += 1

    def at(self, what: str) -> _Waiting:
        """Context in which this rank waits for other ranks: ``with monitor.at("gather of unit x"): ...``."""
        return _Waiting(self, what)

    def wait(self, work: Any) -> None:
        """Wait on the host for a gloo work handle, as long as it takes or until the ranks are known to have diverged.

        Raises:
            LockstepError: The ranks diverged, or a peer is gone.
        """
        if self._topology is None:
            work.wait()
            return
        while not _arrived(work):
            if work.is_completed():
                # It failed, or ended together with the slice: another wait tells.
                failure = _failure(work)
                if failure is None:
                    return
                raise LockstepError(self._lost_peer(failure)) from failure
            self.check()

    def check(self) -> None:
        """Raise if the ranks are known to have diverged."""
        if self.verdict is not None:
            raise LockstepError(self.verdict)

    def meet(self, what: str) -> bool:
        """Return when every data-parallel rank has called this for ``what``, however late.

        Costs round trips to the rendezvous store and touches no process group. For calls that user code may have put
        behind ``if rank == 0``.

        Returns:
            Whether the ranks met: false where the monitor is off, or there is one rank.

        Raises:
            LockstepError: Some rank is waiting for another collective, so that it will never come; or it came for
                another call.
        """
        if self._watch is None or not self._watch.is_running:
            return False
        self._meetings += 1
        self.issue(Collective.CONTROL, what, 0)
        with self.at(what):
            arrived = self._watch.arrive(self._meetings)
            pause = 0.001
            while not arrived():
                self.check()
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
        return True

    # -- agreement in every optimizer step ----------------------------------------------------------------------------

    def digests(self) -> Tensor:
        """Digest of the gathers issued so far, for :meth:`compare`. Each replica gathers on its own and has its place.

        Returns:
            fp32 words, to be maximised over all data-parallel ranks; empty where there is one rank.
        """
        if self._topology is None:
            return torch.empty(0)
        digest = self._records[Collective.GATHER].digest
        words = torch.full((2, self._topology.replicate_size, 2), _ABSENT)
        mine = torch.tensor([digest >> _WORD_BITS, digest & _WORD_MASK], dtype=torch.float32)
        words[:, self._topology.replicate_rank] = torch.stack([mine, -mine])
        return words.flatten()

    def compare(self, agreed: Tensor) -> None:
        """Check that every rank of a replica has gathered the same, and count a step.

        Args:
            agreed: Elementwise maximum of all ranks' :meth:`digests`.

        Raises:
            LockstepError: On every rank, if some have gathered different units since the model was dedicated.
        """
        self.step += 1
        if agreed.numel() == 0:
            return
        most, least_negated = agreed.cpu().view(2, -1)
        if torch.equal(most, -least_negated):
            return
        difference = self._watch.difference() if self._watch is not None else None
        raise LockstepError(
            difference
            or "the ranks have gathered different weights since the last step, so some computed with the wrong ones: a "
            "layer ran on some ranks only, or in another order. Every data-parallel rank must run the same layers"
        )

    # -- what the daemon reads ----------------------------------------------------------------------------------------

    def record(self) -> dict[str, tuple[int, Sequence[str]]]:
        """By kind of collective, how many were issued and the last of them."""
        return {
            scope: (record.count, tuple(record.tail)) for scope, record in zip(self._scopes, self._records, strict=True)
        }

    @property
    def meetings(self) -> int:
        """How often this rank has come to :meth:`meet`."""
        return self._meetings

    def _lost_peer(self, failure: RuntimeError) -> str:
        ended: list[Position] = self._watch.ended() if self._watch is not None else []
        reasons = "; ".join(f"rank {p.rank} {p.describe()}" for p in ended)
        return (
            f"a peer was lost while this rank waited for {self.waiting_for or 'a collective'} (step {self.step}): "
            f"{reasons or 'no rank has said why it ended, so it was killed or crashed; look at its log'}. "
            f"The backend says: {failure}"
        )


def _arrived(work: Any) -> bool:
    """Wait one slice; whether the operation succeeded. Running out of time leaves the operation alone."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        return False
    return True


def _failure(work: Any) -> RuntimeError | None:
    """The error of an operation that has ended, ``None`` if it succeeded."""
    try:
        work.wait(_SLICE)
    except RuntimeError as error:
        return error
    return None


def _limit() -> float:
    text = os.environ.get(_LIMIT_VARIABLE, "")
    try:
        limit = float(text) if text.strip() else _DEFAULT_LIMIT
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ConfigurationError(f"{_LIMIT_VARIABLE} must be a number of seconds, 0 to turn it off, got {text!r}")
    return limit
