"""Local search on a placement: the busiest place gives work away, or swaps it for less, until it cannot.

Deterministic: integers, and a count of what was tried instead of the time that it took.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = ["Job", "LocalSearch", "Place"]

Place: TypeAlias = tuple[int, ...]
"""The slots that a job keeps busy: one, or several that all do the same work."""

Bundle: TypeAlias = tuple[int, tuple[int, ...]]
"""Jobs that change places together, at most two: their cost and their numbers."""

# Pairs of bundles that are looked at in all. A pair takes about a microsecond.
_MOST_TRIALS: Final = 2_000_000
# A place with more different jobs than this is fine-grained enough without pairs of them.
_MOST_PAIRED: Final = 24


@dataclass(frozen=True, slots=True)
class Job:
    """Work that is done at one of several places; jobs with the same object as ``options`` may swap.

    Jobs of one ``group`` are interchangeable where they cost the same.
    """

    cost: int
    options: tuple[Place, ...]
    group: str = ""


class LocalSearch:
    """Jobs at their places, improved in place.

    Args:
        jobs: All jobs.
        placed: The place of each, which is one of its options; changed by :meth:`run`.
        loads: Load of each slot, also from elsewhere; changed by :meth:`run`.
        room: ``(from, to)`` places to how much more work ``to`` may get from there; by default any.
        may: The new places of jobs, by number, to whether they may have them; by default always. Costs more: pairs of
            jobs are not tried then, but every job of another group is.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        placed: list[Place],
        loads: list[int],
        *,
        room: Callable[[Place, Place], int] | None = None,
        may: Callable[[Mapping[int, Place]], bool] | None = None,
    ) -> None:
        self._jobs = jobs
        self._placed = placed
        self._loads = loads
        self._room = room
        self._may = may
        self._at: dict[Place, list[int]] = {}
        self._of_slot: list[list[Place]] = [[] for _ in loads]
        for options in {id(job.options): job.options for job in jobs}.values():
            for place in options:
                if place not in self._at:
                    self._at[place] = []
                    for slot in place:
                        self._of_slot[slot].append(place)
        for number, place in enumerate(placed):
            self._at[place].append(number)
        self._bundles: dict[tuple[Place, int], list[Bundle]] = {}
        self._trials = 0

    def run(self, enough: int = 0) -> None:
        """Improve until the busiest slot has at most ``enough``, or nothing makes it less busy."""
        while self._trials < _MOST_TRIALS:
            busiest = max(range(len(self._loads)), key=self._loads.__getitem__)
            if self._loads[busiest] <= enough or not self._relieve(busiest):
                return

    def _relieve(self, slot: int) -> bool:
        """Make a slot less busy, and no other one as busy as it was."""
        for here in self._of_slot[slot]:
            options = {id(self._jobs[number].options): self._jobs[number].options for number in self._at[here]}
            for places in options.values():
                for there in sorted(places, key=self._load):
                    if self._load(there) >= self._loads[slot]:
                        break
                    if slot not in there and self._exchange(here, there, id(places)):
                        return True
        return False

    def _load(self, place: Place) -> int:
        return max(self._loads[slot] for slot in place)

    def _exchange(self, here: Place, there: Place, options: int) -> bool:
        """The exchange between two places after which the busier one of them is least busy, if one helps."""
        gap = self._load(here) - max(self._loads[slot] for slot in there if slot not in here)
        most = gap - 1 if self._room is None else min(gap - 1, self._room(here, there))
        if most <= 0:
            return False
        given, taken = self._all_bundles(here, options), [(0, ()), *self._all_bundles(there, options)]
        best: tuple[int, Bundle, Bundle] | None = None
        for mine in given:
            for theirs in self._near(taken, mine[0] - gap // 2):
                self._trials += 1
                difference = mine[0] - theirs[0]
                left = max(-difference, difference - gap)
                better = 0 < difference <= most and (best is None or left < best[0])
                if better and self._allowed(mine, theirs, here, there):
                    best = (left, mine, theirs)
        if best is None:
            return False
        self._change(best[1], here, there)
        self._change(best[2], there, here)
        return True

    def _near(self, bundles: Sequence[Bundle], cost: int) -> Sequence[Bundle]:
        """The bundles next to a cost; all where not every exchange is allowed."""
        if self._may is not None:
            return bundles
        index = bisect_left(bundles, cost, key=lambda bundle: bundle[0])
        return bundles[max(index - 1, 0) : index + 2]

    def _allowed(self, mine: Bundle, theirs: Bundle, here: Place, there: Place) -> bool:
        if self._may is None:
            return True
        return self._may({**dict.fromkeys(mine[1], there), **dict.fromkeys(theirs[1], here)})

    def _all_bundles(self, place: Place, options: int) -> list[Bundle]:
        """One bundle of each cost, by cost."""
        key = (place, options)
        if key not in self._bundles:
            self._bundles[key] = sorted(self._make_bundles(place, options))
        return self._bundles[key]

    def _make_bundles(self, place: Place, options: int) -> Iterator[Bundle]:
        kinds: dict[tuple[int, str], list[int]] = {}
        for number in self._at[place]:
            job = self._jobs[number]
            if id(job.options) == options:
                kinds.setdefault((job.cost, job.group if self._may is not None else ""), []).append(number)
        singles = [(cost, numbers) for (cost, _), numbers in kinds.items()]
        yield from ((cost, (numbers[0],)) for cost, numbers in singles)
        if self._may is not None or len(singles) > _MOST_PAIRED:
            return
        for i, (cost, numbers) in enumerate(singles):
            if len(numbers) > 1:
                yield 2 * cost, (numbers[0], numbers[1])
            yield from ((cost + other, (numbers[0], others[0])) for other, others in singles[i + 1 :])

    def _change(self, bundle: Bundle, here: Place, there: Place) -> None:
        for number in bundle[1]:
            cost = self._jobs[number].cost
            self._placed[number] = there
            self._at[here].remove(number)
            self._at[there].append(number)
            for slot in here:
                self._loads[slot] -= cost
            for slot in there:
                self._loads[slot] += cost
            options = id(self._jobs[number].options)
            self._bundles.pop((here, options), None)
            self._bundles.pop((there, options), None)
