"""The benchmarks' plumbing, without running them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from profile_step import SECTIONS, owner_of


def test_profiled_functions_exist_where_they_are_looked_up() -> None:
    missing = [path for path, _ in SECTIONS if not callable(getattr(*owner_of(path), None))]
    assert missing == []
