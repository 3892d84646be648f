"""The list of known faults is complete, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES = [line for line in (ROOT / "docs/known_faults.md").read_text().splitlines() if re.match(r"\| \d+ \|", line)]


def _tests_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_list_has_forty_numbered_lines_each_with_a_test() -> None:
    assert [int(line.split("|")[1]) for line in LINES] == list(range(1, 41))
    assert all("::" in line.split("|")[4] for line in LINES)


def test_every_named_test_exists() -> None:
    named = [tuple(found.split("::")) for line in LINES for found in re.findall(r"`(tests/\S+::\S+)`", line)]
    missing = [f"{path}::{name}" for path, name in named if name not in _tests_of(path)]
    assert missing == []
