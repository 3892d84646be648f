"""The command line of every study."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import neighbours
import plots
from engine import execute, finished, line_of
from report import machine, print_header
from study import Outcome, Study
from tables import markdown, put_between_marks

__all__ = ["main", "write"]

DOCS = neighbours.ROOT / "docs"


def main(make: Callable[[bool], Study], description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Train what is missing and write table and plot; `make` builds the study, in its full form or not."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the long form: hours, in pieces of any length")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="train these alone now")
    parser.add_argument("--report", action="store_true", help="train nothing: write what is finished")
    parser.add_argument("--docs", action="store_true", help="put table, plot and runs into docs/ as well")
    parser.add_argument(
        "--output",
        type=Path,
        default=neighbours.ROOT / "outputs" / "results",
        help="folder of the finished runs, the table and the plot (default: outputs/results)",
    )
    options = parser.parse_args(arguments)
    # Read by the processes of the runs when they import tqdm.
    os.environ["TQDM_DISABLE"] = "1"
    study = make(options.full)
    unknown = set(options.methods or ()) - set(study.rates)
    if unknown:
        parser.error(f"no method {', '.join(sorted(unknown))}; there are {', '.join(study.rates)}")
    print_header(machine())
    print(f"{study.name}: {study.said}", flush=True)
    if options.report:
        outcomes = finished(study, options.output)
    else:
        outcomes = execute(study, options.output, jobs=1 if study.alone else options.jobs, methods=options.methods)
    command = f"python benchmarks/results/{study.name}.py{' --full' if options.full else ''}"
    write(study, outcomes, command, options.output, docs=DOCS if options.docs else None)
    return 0


def write(study: Study, outcomes: Sequence[Outcome], command: str, output: Path, *, docs: Path | None) -> None:
    """Write table and plot into `output`, and, with the runs behind them, into the documentation's folder `docs`."""
    output.mkdir(parents=True, exist_ok=True)
    picture = f"{study.name}.svg"
    text = markdown(study, outcomes, command, picture)
    (output / f"{study.name}.md").write_text(text)
    plots.save(study, outcomes, output / picture)
    print(f"\n{text}\nwritten to {output}")
    if docs is not None:
        (docs / "results").mkdir(exist_ok=True)
        text = markdown(study, outcomes, command, f"results/{picture}")
        put_between_marks(docs / "results.md", study.name, f"\n{text}\n")
        plots.save(study, outcomes, docs / "results" / picture)
        if outcomes:
            lines = [line_of(study, outcome) for outcome in outcomes]
            (docs / "results" / f"{study.name}.jsonl").write_text("".join(lines))
