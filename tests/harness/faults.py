"""Faults on purpose, for tests of what the other ranks do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal


def die() -> None:
    """Kill this process at once (SIGKILL): no handler, no flush, sockets closed by the kernel."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hang(seconds: float = 3600.0) -> None:
    """Stop making progress."""
    time.sleep(seconds)


def fail(message: str = "failed on purpose") -> None:
    """Raise RuntimeError."""
    raise RuntimeError(message)


@contextmanager
def on_call(
    target: Any, name: str, action: Callable[[], None], *, nth: int = 1, when: Literal["before", "after"] = "before"
) -> Iterator[None]:
    """Run `action` before or after the `nth` call of `target.name` (a module's or a class's function), inside the
    block."""
    original = getattr(target, name)
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        due = calls == nth
        if due and when == "before":
            action()
        result = original(*args, **kwargs)
        if due and when == "after":
            action()
        return result

    setattr(target, name, wrapper)
    try:
        yield
    finally:
        setattr(target, name, original)
