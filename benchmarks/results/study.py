"""What a study is: ways to train, each with a grid of learning rates, at one budget and with several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Column", "Outcome", "Run", "Study"]


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One training run: how, at which learning rate, with which seed."""

    method: str
    rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run, what was measured, and where it ran."""

    run: Run
    result: Mapping[str, Any]
    machine: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: the number `key` of a result, as mean and spread over the seeds in the format `spec`."""

    title: str
    key: str
    spec: str = ".3f"


@dataclass(frozen=True, slots=True)
class Study:
    """A question that runs can answer.

    Attributes:
        name: of its files.
        budget: a frozen dataclass of plain values: with a run it determines the result, and it is recorded beside it.
        rates: the grid of learning rates of each method.
        seeds: the first one goes through the whole grid; the others follow at the best rate of each method.
        whole_grid: all seeds go through the whole grid.
        train: `(budget, run) -> result`, a module-level function. The result is a flat mapping of numbers and lists.
        score: key of the number by which a rate is best, the lowest.
        said: the budget in words.
        columns: of the table.
        draw: draws the finished runs into a matplotlib figure.
        derive: `(study, outcomes) -> outcomes` adds numbers that need several runs.
        alone: runs share the machine with no other one, since wall time is measured.
    """

    name: str
    budget: Any
    rates: Mapping[str, Sequence[float]]
    seeds: Sequence[int]
    train: Callable[[Any, Run], dict[str, Any]]
    score: str
    said: str
    columns: Sequence[Column]
    draw: Callable[[Study, Sequence[Outcome], Any], None]
    derive: Callable[[Study, Sequence[Outcome]], list[Outcome]] = lambda study, outcomes: list(outcomes)
    whole_grid: bool = False
    alone: bool = False

    def pending(self, outcomes: Iterable[Outcome]) -> list[Run]:
        """The runs that can start now. Those at the best rate of a method wait for its grid."""
        done = {outcome.run: outcome.result[self.score] for outcome in outcomes}
        wanted: list[Run] = []
        for seed in self.seeds:
            for method, rates in self.rates.items():
                grid = {Run(method, rate, self.seeds[0]) for rate in rates}
                if self.whole_grid or seed == self.seeds[0]:
                    wanted += [Run(method, rate, seed) for rate in rates]
                elif grid <= done.keys():
                    wanted.append(Run(method, min(grid, key=lambda run: _or_worst(done[run])).rate, seed))
        return [run for run in wanted if run not in done]

    def best(self, outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
        """By method, the outcomes at its best rate: that with the lowest mean score of those with the most seeds."""
        found: dict[str, list[Outcome]] = {}
        for method in self.rates:
            by_rate: dict[float, list[Outcome]] = {}
            for outcome in outcomes:
                if outcome.run.method == method:
                    by_rate.setdefault(outcome.run.rate, []).append(outcome)
            if by_rate:
                found[method] = min(by_rate.values(), key=lambda group: (-len(group), self.mean_score(group)))
        return found

    def grid(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes by which rates are compared: those of the seeds that go through the whole grid."""
        seeds = self.seeds if self.whole_grid else self.seeds[:1]
        return [outcome for outcome in outcomes if outcome.run.seed in seeds]

    def mean_score(self, group: Sequence[Outcome]) -> float:
        """Mean over outcomes; a run that diverged makes it infinite."""
        return statistics.fmean(_or_worst(outcome.result[self.score]) for outcome in group)


def _or_worst(score: float) -> float:
    return score if math.isfinite(score) else math.inf
