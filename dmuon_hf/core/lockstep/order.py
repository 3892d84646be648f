"""The order of the collectives on one process group: a rank that is about to leave it asks its peers first.

gloo does not survive two collectives of different sizes that meet: it ends the process, where no Python runs any more
that could say why. So on the CPU no rank issues what its peers may not issue.

[Note: a rank asks before it leaves the order]
A training program repeats itself. What a rank issues is compared with what it issued at the same place of an earlier
optimizer step; while nothing differs, the case of every ordinary step, nothing is done. Where it differs, the rank
meets the others of the group in the rendezvous store, some round trips. If all differ alike (an evaluation, a layer
dropped by a common seed) they go on; if some do, these wait in a meeting to which the others never come, which the
others' waits prove, and nothing was mixed up. A peer that neither comes nor proves anything is long at work or was
killed: after a while the rank goes on, and waits for it in the collective. Where there is nothing to compare with (the
first step, and what follows a difference) each rank compares what it is about to issue with what the first one to come
there wrote into the store, one round trip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

__all__ = ["GroupOrder"]

_KNOWN = 8
_LONGEST = 1 << 14


class GroupOrder:
    """What this rank has issued on one process group since the last optimizer step, and in earlier ones.

    Args:
        store: Of this group of this model alone.
        rank: What this rank is called.
        first: Whether it is the first of the group, which clears what nobody needs any more.
        meet: ``meet(what, expected)`` returns when all ranks of the group have called it with the same, or after long.
        refuse: ``refuse(number, mine, rank, theirs)`` raises on every rank, as ``rank`` is about to issue ``theirs`` as
            the collective of that number.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        first: bool,
        meet: Callable[[str, str], None],
        refuse: Callable[[int, str, int, str], NoReturn],
    ) -> None:
        self._store, self._rank, self._first, self._meet, self._refuse = store, rank, first, meet, refuse
        self._steps: deque[Sequence[str]] = deque(maxlen=_KNOWN)
        self._step: list[str] = []
        self._expected: Sequence[str] | None = None
        self._issued = 0
        self._written: list[str] = []

    def before(self, what: str) -> None:
        """Call this before the collective called ``what`` is issued. Well below 1 us where it is the expected one.

        Raises:
            LockstepError: The ranks are known to have diverged.
        """
        place = len(self._step)
        if self._expected is None:
            self._compare(what)
        elif place >= len(self._expected) or self._expected[place] != what:
            self._ask(what, self._expected[place] if place < len(self._expected) else "the end of the step")
        self._step.append(what)
        self._issued += 1
        if place == _LONGEST:
            self.end_step()

    def end_step(self) -> None:
        """What was issued since the last call is what the next steps are expected to issue."""
        self._expected, self._step = self._step, []
        if self._expected in self._steps:
            self._steps.remove(self._expected)
        self._steps.append(self._expected)

    def _compare(self, what: str) -> None:
        key = str(self._issued)
        try:
            found = self._store.compare_set(key, "", f"{self._rank} {what}").decode()
        except RuntimeError:  # no store, nobody to ask
            return
        self._written.append(key)
        rank, _, theirs = found.partition(" ")
        if theirs != what:
            self._refuse(self._issued + 1, what, int(rank), theirs)

    def _ask(self, what: str, expected: str) -> None:
        self._meet(what, expected)
        if self._first:
            for key in self._written:
                self._store.delete_key(key)
        self._written.clear()
        begun = [*self._step, what]
        self._expected = next((known for known in reversed(self._steps) if known[: len(begun)] == begun), None)
