"""Tables and notes on stdout, as rich draws them; in a pipe plain text of at most 120 columns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["console", "print_json", "print_table", "size"]

_WIDEST = 120


def console() -> Console:
    """Where results go."""
    width = None if sys.stdout.isatty() else _WIDEST
    return Console(width=width, highlight=False, markup=False)


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """A table; the first `left` columns are text, the others figures."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    out = console()
    out.print(title, style="bold")
    out.print(table)


def print_json(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def size(count: float) -> str:
    """Bytes in the unit that suits them: `3.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
