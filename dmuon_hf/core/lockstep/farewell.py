"""A process that leaves tells the other ranks, and does end.

It leaves when it ends, however it does (the end of the program, ``sys.exit``, an exception, the end of a
`multiprocessing` child), and when it destroys its process group. ``os._exit`` and signals cannot be seen from inside;
the launcher sees them, and gloo its closed connections.

Ending with a collective in flight blocks in the destructor of its process group until the peers go on, and they wait
for this very rank. So one that leaves through an exception, or after the ranks diverged, is ended by an alarm, a few
seconds after the last Python code of its exit has run.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import weakref
from types import TracebackType
from typing import Any, Protocol

import torch.distributed.distributed_c10d as _c10d_module

__all__ = ["guard_exit", "run_exit_handlers", "unguard_exit"]

logger = logging.getLogger(__name__)

_EXIT_GRACE = 30
# Longer than a call of the store may take.
_JOIN_SECONDS = 6.0
_HEARTBEAT = 0.5

# The function that is replaced is no declared part of it.
_c10d: Any = _c10d_module
_failure = ""
_may_block = threading.Event()
_alarm_is_set = threading.Event()
_installed = False
_finalized_in = 0


class Guarded(Protocol):
    """What :func:`guard_exit` takes."""

    def leave(self, what: str, *, raised: bool) -> bool:
        """Tell the peers; whether the exit may block."""
        ...

    def explain(self, error: BaseException) -> str:
        """What is known of why this process ends with ``error``."""
        ...


_guarded: weakref.WeakSet[Guarded] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def guard_exit(watch: Guarded, thread: threading.Thread | None = None) -> None:
    """Call ``watch.leave`` when the process leaves, then wait for its thread, if it has one.

    A thread that is inside a call of the store while the interpreter is torn down would abort the process. Installs an
    excepthook, an exit handler and a listener for the end of the default process group the first time.
    """
    global _finalized_in, _installed
    _guarded.add(watch)
    if thread is not None:
        if not _threads:
            threading.Thread(target=_postpone_alarm, name="dmuon-exit", daemon=True).start()
        _threads.add(thread)
    if not _installed:
        _installed = True
        _listen()
    if multiprocessing.parent_process() is not None and _finalized_in != os.getpid():
        # Children of multiprocessing leave without atexit, and one that was forked inherits the rest.
        _finalized_in = os.getpid()
        multiprocessing.util.Finalize(None, _at_exit, exitpriority=100)


def unguard_exit(watch: Guarded) -> None:
    """Forget a watch."""
    _guarded.discard(watch)


def run_exit_handlers() -> None:
    """Run what ``atexit`` has, to its end, in a thread of a process whose main thread will not come back."""
    atexit._run_exitfuncs()


def _listen() -> None:
    atexit.register(_at_exit)
    excepthook, update_default = sys.excepthook, _c10d._update_default_pg

    def at_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        _at_exception(kind, error)
        excepthook(kind, error, traceback)

    def at_update_default(group: Any) -> None:
        # Called in destroy_process_group, before torch forgets the groups and what was issued on them.
        if group is None:
            _leave("has destroyed its process group")
        update_default(group)

    sys.excepthook = at_exception
    _c10d._update_default_pg = at_update_default


def _at_exception(kind: type[BaseException], error: BaseException) -> None:
    """Nothing in an interactive interpreter, which goes on after an exception."""
    global _failure
    if hasattr(sys, "ps1") or threading.current_thread() is not threading.main_thread():
        return
    _failure = _named(kind, error)
    for reason in filter(None, [watch.explain(error) for watch in list(_guarded)]):
        logger.error(reason)
    _leave("")


def _at_exit() -> None:
    _leave("has ended")
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in set(_threads) - {threading.current_thread()}:
        thread.join(max(0.0, deadline - time.monotonic()))
    if _may_block.is_set():
        _set_alarm()


def _leave(what: str) -> None:
    kind, error, _ = sys.exc_info()
    # On its way out: from a `finally` that destroys the process group, or in a child of multiprocessing.
    on_its_way = _named(kind, error) if kind is not None and not issubclass(kind, SystemExit) else ""
    failure = _failure or on_its_way
    for watch in list(_guarded):
        if watch.leave(f"ended with {failure}" if failure else what, raised=bool(failure)):
            _may_block.set()


def _named(kind: type[BaseException], error: BaseException | None) -> str:
    return f"{kind.__name__}: {error}".partition("\n")[0][:500]


def _set_alarm() -> None:
    """Let the kernel end this process should its exit block: at that point no Python thread can."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and hasattr(signal, "SIGALRM") and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        signal.alarm(_EXIT_GRACE)
        _alarm_is_set.set()


def _postpone_alarm() -> None:
    """Set the alarm anew as long as Python runs, which it does while other exit handlers do, however long they take."""
    _alarm_is_set.wait()
    while True:
        time.sleep(_HEARTBEAT)
        signal.alarm(_EXIT_GRACE)
