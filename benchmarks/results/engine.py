"""Executes the runs of a study, several at a time, and keeps every finished one, so that a rerun goes on from there."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import neighbours  # noqa: F401
import torch
from report import machine
from study import Outcome, Run, Study

__all__ = ["execute", "finished", "line_of"]


def finished(study: Study, directory: Path) -> list[Outcome]:
    """The runs in the study's file that have its budget, and that its grid and seeds still hold.

    A line that an interruption cut off is passed over.
    """
    path = _file(study, directory)
    outcomes: dict[Run, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        run = Run(**record["run"])
        known = run.rate in study.rates.get(run.method, ()) and run.seed in study.seeds
        if record["budget"] == _budget(study) and known:
            outcomes[run] = Outcome(run, record["result"], record["machine"])
    return list(outcomes.values())


def execute(study: Study, directory: Path, *, jobs: int, methods: Sequence[str] | None = None) -> list[Outcome]:
    """Train what is not finished yet, `jobs` runs at a time with one compute thread each; returns all outcomes.

    Every finished run is one line of JSON in the study's file, written at once. A run that raises ends the execution
    with its error, after those that run beside it; what is finished stays. One job runs in this process.
    """
    directory.mkdir(parents=True, exist_ok=True)
    outcomes = finished(study, directory)
    started = time.monotonic()
    running: dict[Future[dict[str, Any]], Run] = {}
    with _executor(jobs) as executor:
        while True:
            for run in study.pending(outcomes):
                if len(running) < jobs and run not in running.values() and (methods is None or run.method in methods):
                    running[executor.submit(study.train, study.budget, run)] = run
            if not running:
                return outcomes
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                outcomes.append(_record(study, directory, run, future.result()))
                print(
                    f"{run.method} at {run.rate:g}, seed {run.seed}: {study.score} "
                    f"{outcomes[-1].result[study.score]:.4f}; {len(outcomes)} done, "
                    f"{(time.monotonic() - started) / 60:.1f} min",
                    flush=True,
                )


def _executor(jobs: int) -> Executor:
    if jobs == 1:
        return _ThisProcess()
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=jobs, mp_context=context, initializer=_prepare_worker)


class _ThisProcess(Executor):
    """Runs what is submitted at once, with one compute thread; errors are raised where it was submitted."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        torch.set_num_threads(self._threads)


def _record(study: Study, directory: Path, run: Run, result: dict[str, Any]) -> Outcome:
    outcome = Outcome(run, result, machine())
    with _file(study, directory).open("a+") as file:
        # Behind a line that was cut off, a new one begins.
        file.seek(max(0, file.tell() - 1))
        newline = "" if file.read(1) in ("", "\n") else "\n"
        file.write(newline + line_of(study, outcome))
    return outcome


def line_of(study: Study, outcome: Outcome) -> str:
    """A finished run as its line in the study's file."""
    return json.dumps({"study": study.name, "budget": _budget(study), **asdict(outcome)}) + "\n"


def _budget(study: Study) -> dict[str, Any]:
    # As it comes back from a file: tuples are lists there.
    budget: dict[str, Any] = json.loads(json.dumps(asdict(study.budget)))
    return budget


def _file(study: Study, directory: Path) -> Path:
    return directory / f"{study.name}.jsonl"


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End this process when the one that started it was ended, which would not tell it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
