"""A process that ends tells the other ranks, and does end.

Leaving with a collective in flight blocks in the destructor of its process group until the peers go on, and they wait
for this very rank. So one that leaves through an exception, or after the ranks diverged, gets a few seconds and an
alarm.
"""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
import weakref
from types import TracebackType
from typing import Protocol

__all__ = ["guard_exit", "unguard_exit"]

_EXIT_GRACE = 5
# Longer than a call of the store may take.
_JOIN_SECONDS = 6.0

_failure = ""
_may_block = False
_installed = False


class Guarded(Protocol):
    """What :func:`guard_exit` takes."""

    def leave(self, what: str, *, raised: bool) -> bool:
        """Tell the peers; whether the exit may block."""
        ...


_guarded: weakref.WeakSet[Guarded] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def guard_exit(watch: Guarded, thread: threading.Thread) -> None:
    """Call ``watch.leave`` when the process ends, then wait for its thread.

    A thread that is inside a call of the store while the interpreter is torn down would abort the process. Installs an
    excepthook and an exit handler the first time.
    """
    global _installed
    _guarded.add(watch)
    _threads.add(thread)
    if not _installed:
        _installed = True
        atexit.register(_at_exit)
        previous = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            _at_exception(kind, error)
            previous(kind, error, traceback)

        sys.excepthook = excepthook


def unguard_exit(watch: Guarded) -> None:
    """Forget a watch."""
    _guarded.discard(watch)


def _at_exception(kind: type[BaseException], error: BaseException) -> None:
    """Nothing in an interactive interpreter, which goes on after an exception."""
    global _failure
    if hasattr(sys, "ps1") or threading.current_thread() is not threading.main_thread():
        return
    _failure = f"{kind.__name__}: {error}".partition("\n")[0][:500]
    _leave()


def _at_exit() -> None:
    _leave()
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    if _may_block:
        _set_alarm()


def _leave() -> None:
    global _may_block
    what = f"ended with {_failure}" if _failure else "has ended"
    for watch in list(_guarded):
        _may_block |= watch.leave(what, raised=bool(_failure))


def _set_alarm() -> None:
    """Let the kernel end this process should its exit block: at that point no Python thread can."""
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_EXIT_GRACE)
