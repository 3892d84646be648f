"""What became of each rank of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["returned", "raised", "died", "hung"]


@dataclass(frozen=True)
class RaisedException:
    """An exception that left the rank's function, without the object itself, which may not pickle."""

    type_name: str
    message: str
    traceback: str
    bases: tuple[str, ...]

    def is_a(self, kind: type[BaseException]) -> bool:
        """Whether it is an instance of `kind`."""
        return qualified_name(kind) in self.bases


@dataclass(frozen=True)
class RankOutcome:
    """One rank: `returned` a result, `raised`, `died` without a word (a signal, `os._exit`), or `hung` and was killed.

    `seconds` is the time from the start of the rank to its end (for `hung`: to the kill).
    """

    rank: int
    status: Status
    seconds: float
    result: Any = None
    exception: RaisedException | None = None
    exit_code: int | None = None
    log: str = ""
    stacks: str = ""

    def report(self) -> str:
        """Human-readable account with traceback or stacks and the end of what the rank printed."""
        head = f"--- rank {self.rank} {self.status} after {self.seconds:.1f} s"
        if self.status == "died":
            head += f" (exit code {self.exit_code})"
        parts = [head + " ---"]
        if self.exception is not None:
            parts.append(self.exception.traceback.rstrip())
        if self.status in ("hung", "died") and self.stacks:
            parts.append(self.stacks.rstrip())
        if self.log.strip():
            parts.append("printed:\n" + "\n".join(self.log.rstrip().splitlines()[-40:]))
        return "\n".join(parts)


class RanksFailedError(AssertionError):
    """At least one rank did not return. The message holds the account of every rank, the first failure first."""

    def __init__(self, what: str, outcomes: list[RankOutcome]) -> None:
        self.outcomes = outcomes
        order = {"raised": 0, "died": 0, "hung": 1, "returned": 2}
        ranked = sorted(outcomes, key=lambda o: (order[o.status], o.seconds))
        super().__init__("\n".join([what, *(o.report() for o in ranked)]))


def qualified_name(kind: type) -> str:
    """`module.Class`, which identifies a class across processes."""
    return f"{kind.__module__}.{kind.__qualname__}"
