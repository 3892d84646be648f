"""Imported for its effect: the scripts of `benchmarks/` and `recipes/` can be imported from this folder."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["ROOT"]

ROOT = Path(__file__).resolve().parents[2]

for folder in ("benchmarks", "recipes"):
    if str(ROOT / folder) not in sys.path:
        sys.path.append(str(ROOT / folder))
