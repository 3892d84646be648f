"""Multi-process test harness: `run_ranks`, fault injection, tiny models, a reference optimizer, a counter of
collectives."""

from __future__ import annotations

from tests.harness.child import init_gloo
from tests.harness.launcher import run_ranks, run_ranks_outcomes
from tests.harness.outcome import RankOutcome, RanksFailedError

__all__ = ["RankOutcome", "RanksFailedError", "init_gloo", "run_ranks", "run_ranks_outcomes"]
