"""Where ranks stand, and the proof that they can never meet again. Pure: values in, a sentence out.

[Note: what proves that ranks diverged]
On every rank the main thread issues the collectives of a program in one order. Two ranks that run the same program may
stand at different places of that order, so that one has issued more on some groups and never less on others. Therefore
each of these is a proof, however slow or busy a rank may be:

1. the same entry of a record (the n-th collective of one of the runtime's channels, or of FSDP2 on one process group)
   differs on two ranks;
2. two ranks each wait for a collective, and each has issued one, on a group they share, that the other has not;
3. a rank has ended, by an exception, or with collectives missing that a waiting rank has issued.

Waiting alone proves nothing, nor does being far behind: a rank that saves, evaluates, loads data or compiles for an
hour is behind the others and will arrive. One more rule covers collectives that were mixed up inside one group, where
counting cannot tell them apart:

4. every rank waits inside a collective that is known by name and of these ranks alone, none has issued more than
   another on the runtime's channels or on a group that some rank stands in, none has moved for one and a half times the
   limit, and two of them stand in different kinds of collective.

What other threads issue (an asynchronous checkpoint, a logger with a process group of its own) keeps no order with the
main thread, and torch's counts of a group do not tell threads apart. So a count proves something only where the main
thread is known to have issued it: on the runtime's channels, in what FSDP2 was seen to issue, and on the group whose
collective the main thread stands in. The host of an accelerator waits in calls that look like any other, such as
``loss.item()``: it counts as waiting (``UNNAMED``) for the first three rules, and not for the fourth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = [
    "MIXED_PATIENCE",
    "ON_CHANNEL",
    "ON_GROUP",
    "UNNAMED",
    "Position",
    "State",
    "disagreement",
    "find_divergence",
    "summary",
]

State = Literal["waits", "busy", "ended"]

UNNAMED = "a call that has not returned"
"""What a rank waits in that stands still, on an accelerator, outside of any known collective: perhaps no collective."""

ON_CHANNEL = "on channel "
"""How the count of one of the runtime's channels begins in `Position.issued`."""

ON_GROUP = "on group "
"""How torch's count of a process group begins in `Position.issued`; the collectives of all threads are in it."""

MIXED_PATIENCE = 1.5
"""Multiple of the limit after which rule 4 applies."""

_ADVICE = (
    "The ranks no longer issue the same collectives in the same order: look for a layer, a batch, a save, an "
    "evaluation or an exception handler that runs on some ranks only. What all ranks have to call must not stand under "
    "`if rank == 0`"
)


@dataclass(frozen=True, slots=True)
class Position:
    """Where one rank stands.

    Attributes:
        rank: Rank in the job.
        state: ``"waits"`` inside a collective for longer than the limit, ``"busy"`` with anything else, or ``"ended"``.
        what: What it waits for, does, or ended with.
        step: Optimizer steps it has agreed on.
        seconds: How long it has not moved.
        own: Whether ``what`` is a collective of the runtime.
        raised: Whether an ended rank left through an exception.
        hosts_store: Whether the job's rendezvous store ends with this rank.
        issued: Collectives issued so far, by channel of the runtime, by FSDP2 per process group, and by process group
            (``"on group ..."``). What two ranks both list they take part in together.
        stands_on: Of the last kind, those whose collective the main thread stands in.
        beyond: Whether it waits, or may wait, for ranks whose positions are not compared, as other pipeline stages.
        record: By channel of the runtime and by process group of FSDP2, how many collectives were issued and the last
            of them.
        trail: Where in the caller's code that is, innermost first.
    """

    rank: int
    state: State
    what: str
    step: int
    seconds: float = 0.0
    own: bool = False
    raised: bool = False
    hosts_store: bool = False
    issued: Mapping[str, int] = field(default_factory=dict)
    stands_on: Sequence[str] = ()
    beyond: bool = False
    record: Mapping[str, tuple[int, Sequence[str]]] = field(default_factory=dict)
    trail: Sequence[str] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        values = json.loads(text)
        values["record"] = {channel: (count, tuple(tail)) for channel, (count, tail) in values["record"].items()}
        values["trail"] = tuple(values["trail"])
        values["stands_on"] = tuple(values["stands_on"])
        return cls(**values)

    def describe(self) -> str:
        """As a clause that follows the rank's number."""
        at = f" (step {self.step})"
        place = f" at {self.trail[0]}" if self.trail and not self.own else ""
        if self.state == "waits":
            return f"waits in {self.what}{at}{place}"
        if self.state == "ended":
            return f"{self.what}{at}"
        return f"is busy with {self.what}{at}{place}"

    def ahead_of(self, other: Position) -> dict[str, int]:
        """Of what both ranks take part in, how many collectives this one's main thread has issued beyond ``other``."""
        return {
            where: count - other.issued[where]
            for where, count in self.issued.items()
            if self._is_evidence(where) and count > other.issued.get(where, count)
        }

    @property
    def channels(self) -> list[str]:
        """The runtime's channels among ``issued``."""
        return [where for where in self.issued if where.startswith(ON_CHANNEL)]

    def _is_evidence(self, where: str) -> bool:
        return not where.startswith(ON_GROUP) or where in self.stands_on


def find_divergence(positions: Sequence[Position], *, limit: float) -> str | None:
    """The sentence that says how the ranks diverged, or ``None`` when the positions do not prove it.

    Args:
        positions: The newest known position of every rank of a model. One that has become stale proves what it
            proved when it was taken.
        limit: Seconds after which a rank counts as waiting.
    """
    waiting = [position for position in positions if position.state == "waits"]
    if not waiting:
        return None
    return (
        _different_records(positions)
        or _rank_ended(waiting, positions)
        or _crossed(waiting)
        or _mixed_up(waiting, positions, limit)
    )


def _different_records(positions: Sequence[Position]) -> str | None:
    first_with: dict[str, Position] = {}
    for other in positions:
        for channel in sorted(other.record):
            first = first_with.setdefault(channel, other)
            difference = _first_difference(first.record[channel], other.record[channel])
            if difference is not None:
                number, here, there = difference
                return disagreement(number, channel, {first.rank: here, other.rank: there}, _places(positions))
    return None


def disagreement(number: int, channel: str, issued: Mapping[int, str], places: str = "") -> str:
    """The sentence that says what two ranks issued, or were about to, as the same collective of ``channel``."""
    (rank, what), (other, differs) = issued.items()
    return (
        f"ranks disagree about collective number {number} on channel {channel}: rank {rank} issued the {what}, rank "
        f"{other} the {differs}{places}. {_ADVICE}"
    )


def _first_difference(
    mine: tuple[int, Sequence[str]], theirs: tuple[int, Sequence[str]]
) -> tuple[int, str, str] | None:
    """First entry, counted from 1, that both tails hold and that differs."""
    (count_a, tail_a), (count_b, tail_b) = mine, theirs
    start_a, start_b = count_a - len(tail_a), count_b - len(tail_b)
    for number in range(max(start_a, start_b), min(count_a, count_b)):
        a, b = tail_a[number - start_a], tail_b[number - start_b]
        if a != b:
            return number + 1, a, b
    return None


def _rank_ended(waiting: Sequence[Position], positions: Sequence[Position]) -> str | None:
    for ended in (position for position in positions if position.state == "ended"):
        for waiter in waiting:
            if ended.raised or waiter.ahead_of(ended):
                advice = f"Look at the traceback of rank {ended.rank}" if ended.raised else _ADVICE
                return (
                    f"rank {ended.rank} {ended.describe()}, so what the others wait for never comes"
                    f"{_places(positions)}. {advice}"
                )
    return None


def _crossed(waiting: Sequence[Position]) -> str | None:
    distinct: dict[tuple[Any, ...], Position] = {}
    for position in waiting:
        distinct.setdefault((*sorted(position.issued.items()), *position.stands_on), position)
    candidates = list(distinct.values())
    for i, a in enumerate(candidates):
        for b in candidates[i + 1 :]:
            ahead_a, ahead_b = a.ahead_of(b), b.ahead_of(a)
            if ahead_a and ahead_b:
                return (
                    f"ranks disagree: {summary(waiting)}. Rank {a.rank} has issued {_counted(ahead_a)} that rank "
                    f"{b.rank} has not, and rank {b.rank} {_counted(ahead_b)} that rank {a.rank} has not. {_ADVICE}"
                )
    return None


def _counted(missing: Mapping[str, int]) -> str:
    return " and ".join(
        f"{count} collective{'s' if count > 1 else ''} {where}" for where, count in sorted(missing.items())
    )


def _mixed_up(waiting: Sequence[Position], positions: Sequence[Position], limit: float) -> str | None:
    if len(waiting) < len(positions) or any(p.seconds < MIXED_PATIENCE * limit for p in waiting):
        return None
    if any(p.what == UNNAMED or p.beyond for p in waiting) or len({_kind(p) for p in waiting}) == 1:
        return None
    # FSDP2's own counts are left out: its collective may have met another kind on the same group.
    places = {where for p in waiting for where in (*p.channels, *p.stands_on)}
    if any(len({p.issued[where] for p in waiting if where in p.issued}) > 1 for where in places):
        return None
    seconds = min(position.seconds for position in waiting)
    return f"ranks disagree: {summary(waiting)}, and none has moved for {seconds:.0f} s. {_ADVICE}"


def _kind(position: Position) -> str:
    return position.what.partition(" of ")[0] if not position.own else position.what


def _places(positions: Sequence[Position]) -> str:
    """The summary in brackets, where it tells the ranks apart."""
    return f" ({summary(positions)})" if len({position.describe() for position in positions}) > 1 else ""


def summary(positions: Sequence[Position]) -> str:
    """``rank 0 waits in ..., ranks 1-3 wait in ...``, in rank order of the first of each."""
    by_text: dict[str, list[int]] = {}
    for position in positions:
        by_text.setdefault(position.describe(), []).append(position.rank)
    return ", ".join(f"{_ranks(ranks)} {text}" for text, ranks in by_text.items())


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return "each of ranks " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
