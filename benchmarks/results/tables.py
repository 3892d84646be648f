"""Markdown of a study: a caption that says how the figures were made, the table, and the grid behind it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from study import Column, Outcome, Study

__all__ = ["markdown", "put_between_marks"]


def markdown(study: Study, outcomes: Sequence[Outcome], command: str, picture: str) -> str:
    """The study in words and tables, with a link to its `picture`; what has no finished run is there as not run."""
    outcomes = study.derive(study, outcomes)
    parts = [_caption(study, outcomes, command), _best_table(study, outcomes)]
    if any(len(rates) > 1 for rates in study.rates.values()):
        seeds = "the mean of all seeds" if study.whole_grid else f"with seed {study.seeds[0]}"
        parts += [f"`{study.score}` at every rate, {seeds}:", _grid_table(study, study.grid(outcomes))]
    if outcomes:
        parts.append(f"![{study.name}]({picture})")
    return "\n\n".join(parts) + "\n"


def put_between_marks(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- end of NAME -->`.

    Raises:
        SystemExit: the page has no such marks.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{page} has no place for the results: {begin} ... {end}")
    page.write_text(f"{before}{begin}\n{text}{end}{after}")


def _caption(study: Study, outcomes: Sequence[Outcome], command: str) -> str:
    missing = len(study.pending(outcomes))
    machines = sorted({_machine(outcome) for outcome in outcomes})
    loads = sorted(outcome.machine["load"] for outcome in outcomes if outcome.machine["load"] is not None)
    under = f", at a load of {loads[0]:.0f} to {loads[-1]:.0f}" if loads else ""
    seeds = ", ".join(map(str, study.seeds))
    if all(len(rates) == 1 for rates in study.rates.values()):
        which = "each for every row"
    elif study.whole_grid:
        which = "each at every rate"
    else:
        which = "the first at every rate, the others at the best rate of each method"
    lines = [
        f"Budget: {study.said}.",
        f"Seeds: {seeds}, {which}.",
        f"Run on: {'; '.join(machines) or 'nothing yet'}{under}.",
        f"Not finished: at least {missing} runs." if missing else "All runs are finished.",
        f"Command: `{command}`.",
    ]
    return "\n".join(lines)


def _machine(outcome: Outcome) -> str:
    where = outcome.machine
    return f"{where['cpu']}, {where['cores']} cores, Python {where['python']}, torch {where['torch']}"


def _best_table(study: Study, outcomes: Sequence[Outcome]) -> str:
    best = study.best(outcomes)
    first = next(iter(study.rates))
    with_rate = any(len(rates) > 1 for rates in study.rates.values())
    titles = [column.title.format(first=first) for column in study.columns]
    rows = [["", *(["best rate"] if with_rate else []), *titles, "seeds"]]
    for method in study.rates:
        group = best.get(method, [])
        rate = f"{group[0].run.rate:g}" if group else "not run"
        cells = [_cell(group, column) for column in study.columns]
        rows.append([method, *([rate] if with_rate else []), *cells, str(len(group))])
    return _table(rows)


def _grid_table(study: Study, outcomes: Sequence[Outcome]) -> str:
    rates = sorted({rate for rates in study.rates.values() for rate in rates})
    column = Column("", study.score, ".3f")
    rows = [["", *(f"{rate:g}" for rate in rates)]]
    for method, own in study.rates.items():
        groups = [[o for o in outcomes if (o.run.method, o.run.rate) == (method, rate)] for rate in rates]
        cells = [_cell(group, column) if rate in own else "" for rate, group in zip(rates, groups, strict=True)]
        rows.append([method, *cells])
    return _table(rows)


def _cell(group: Sequence[Outcome], column: Column) -> str:
    """Mean and standard deviation over seeds; how many had the number, if not all."""
    if not group:
        return "not run"
    values = [value for outcome in group if (value := outcome.result[column.key]) is not None]
    if not values:
        return "not reached"
    if not all(map(math.isfinite, values)):
        return "diverged"
    text = format(statistics.fmean(values), column.spec)
    if len(set(values)) > 1:
        text += f" ± {format(statistics.stdev(values), column.spec.lstrip('+'))}"
    return text if len(values) == len(group) else f"{text} ({len(values)} of {len(group)})"


def _table(rows: Iterable[Sequence[str]]) -> str:
    head, *body = rows
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *body])
