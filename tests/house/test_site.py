"""The site that `make docs` builds has every page and every public name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import dmuon_hf
import dmuon_hf.core as dmuon

ROOT = Path(__file__).resolve().parents[2]


def pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(entry)


def documented(page: str) -> set[str]:
    text = (ROOT / "docs" / "api" / page).read_text(encoding="utf-8")
    return {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}


def test_navigation_has_every_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages(nav)) == sorted(written)


def test_reference_has_every_public_name_of_the_core() -> None:
    assert documented("core.md") == set(dmuon.__all__)


def test_reference_has_every_public_name_of_the_package() -> None:
    elsewhere = {"__version__", "ConfigurationError", "DMuonError", "LockstepError"}
    assert documented("dmuon_hf.md") == set(dmuon_hf.__all__) - elsewhere
