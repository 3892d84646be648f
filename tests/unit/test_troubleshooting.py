"""The troubleshooting page quotes messages and variables that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# One long string of the code, in which a message that is split over lines is whole.
CODE = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in sorted((ROOT / "dmuon_hf").rglob("*.py"))))


def quoted_messages() -> list[str]:
    headings = re.findall(r"^### (`.+`)$", PAGE, re.MULTILINE)
    return [message for heading in headings for message in re.findall(r"`([^`]+)`", heading)]


def test_headings_quote_messages() -> None:
    assert len(quoted_messages()) > 10


@pytest.mark.parametrize("heading", quoted_messages())
def test_quoted_message_exists(heading: str) -> None:
    for part in filter(None, (part.strip(" ,:") for part in re.split(r"\.\.\.|\b\d+\b|ValueError|\[|\]", heading))):
        assert re.sub(r"\s+", " ", part) in CODE, part


def variables(text: str) -> set[str]:
    """Variables of the environment; the options of `create` as one, by their prefix."""
    return {re.sub("^DMUON_HF_(?!CONFIG$).*", "DMUON_HF_", name) for name in re.findall(r"\bDMUON_[A-Z_]+", text)}


def test_every_variable_is_listed() -> None:
    assert variables(CODE)
    assert variables(CODE) == variables(PAGE)
