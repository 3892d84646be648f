"""Plots of a study as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from study import Outcome, Study

__all__ = ["bars", "over_rates", "over_steps", "save", "scatter"]

_MARKS = ("o", "s", "^", "D", "v")


def save(study: Study, outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw the study into an SVG file, the same for the same outcomes; nothing without a finished run."""
    if not outcomes:
        return
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Without pyplot: no window, whatever the machine has. Text stays text.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": study.name}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        study.draw(study, study.derive(study, outcomes), figure)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def over_rates(axes: Any, study: Study, outcomes: Sequence[Outcome], label: str) -> None:
    """The score of every rate, as mean over the seeds that go through the whole grid, with their range as bars."""
    outcomes = study.grid(outcomes)
    for mark, (method, rates) in zip(_MARKS, study.rates.items(), strict=False):
        by_rate = {
            r: [o.result[study.score] for o in outcomes if o.run.method == method and o.run.rate == r] for r in rates
        }
        found = {rate: scores for rate, scores in by_rate.items() if scores}
        if found:
            means = [statistics.fmean(scores) for scores in found.values()]
            below = [mean - min(scores) for mean, scores in zip(means, found.values(), strict=True)]
            above = [max(scores) - mean for mean, scores in zip(means, found.values(), strict=True)]
            axes.errorbar(list(found), means, yerr=[below, above], marker=mark, capsize=3, label=method)
    axes.set(xscale="log", xlabel="learning rate", ylabel=label)
    rates = sorted({rate for own in study.rates.values() for rate in own})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=90)
    axes.minorticks_off()
    # Room for the legend.
    axes.margins(y=0.25)
    axes.legend(fontsize="x-small", framealpha=0.5)


def over_steps(axes: Any, study: Study, outcomes: Sequence[Outcome], label: str) -> None:
    """The curve of every method at its best rate, as mean over the seeds."""
    for method, group in study.best(outcomes).items():
        curves = [outcome.result["curve"] for outcome in group]
        means = [statistics.fmean(losses) for losses in zip(*curves, strict=True)]
        axes.plot(group[0].result["measured_at"], means, label=f"{method}, {group[0].run.rate:g}")
    axes.set(xlabel="step", ylabel=label)
    axes.legend(fontsize="small")


def scatter(axes: Any, study: Study, outcomes: Sequence[Outcome], x: tuple[str, str], y: tuple[str, str]) -> None:
    """Every run as a point; `x` and `y` are key and label."""
    for mark, method in zip(_MARKS, study.rates, strict=False):
        mine = [outcome.result for outcome in outcomes if outcome.run.method == method]
        if mine:
            points = [result[x[0]] for result in mine], [result[y[0]] for result in mine]
            axes.plot(*points, linestyle="", marker=mark, label=method)
    axes.set(xlabel=x[1], ylabel=y[1])


def bars(axes: Any, study: Study, outcomes: Sequence[Outcome], parts: Mapping[str, str], label: str) -> None:
    """Bars of each method, one for every part (key -> label), as mean over the seeds with their range."""
    best = study.best(outcomes)
    width = 0.8 / len(parts)
    for i, (key, name) in enumerate(parts.items()):
        values = [[outcome.result[key] for outcome in group] for group in best.values()]
        means = [statistics.fmean(group) for group in values]
        errors = [
            [m - min(v) for m, v in zip(means, values, strict=True)],
            [max(v) - m for m, v in zip(means, values, strict=True)],
        ]
        axes.bar([j + i * width for j in range(len(best))], means, width, yerr=errors, capsize=3, label=name)
    axes.set_xticks([j + width * (len(parts) - 1) / 2 for j in range(len(best))], list(best))
    axes.set(ylabel=label)
    axes.legend()
