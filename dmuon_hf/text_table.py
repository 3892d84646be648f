"""Tables as text, no wider than a page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

__all__ = ["WIDTH", "joined", "text_table"]

WIDTH = 120
_GAP = "  "
_NARROW_LAST, _NARROW = 14, 9


def text_table(rows: Sequence[Sequence[str]], width: int = WIDTH) -> list[str]:
    """The lines of a table whose first row is its header, without the columns that are empty below it.

    Where it would be too wide, cells are wrapped inside their column, in the fewest lines. A first cell is never cut:
    one that is wider than its column, as those with braces may be, has a line to itself above the others of its row.
    """
    used = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    cells = [[row[column] for column in used] for row in rows]
    natural = [max(map(len, column)) for column in zip(*cells, strict=True)]
    natural[0] = max(len(row[0]) for row in cells if "{" not in row[0])
    if sum(natural) + len(_GAP) * (len(natural) - 1) <= width:
        return _lines(cells, natural, width)
    tried = range(min(_NARROW_LAST, natural[-1]), natural[-1] + 1)
    return min((_lines(cells, _fitting([*natural[:-1], last], width), width) for last in tried), key=len)


def _fitting(natural: Sequence[int], width: int) -> list[int]:
    """Widths of columns whose sum fits: whichever is widest gives, the last one alone keeps what it has."""
    widths = list(natural)
    for _ in range(sum(widths) + len(_GAP) * (len(widths) - 1) - width):
        widest = widths.index(max(widths[:-1]))
        widths[widest] = max(_NARROW, widths[widest] - 1)
    return widths


def _lines(rows: Iterable[Sequence[str]], widths: Sequence[int], width: int) -> list[str]:
    lines = []
    for first, *others in rows:
        alone = len(first) > widths[0]
        if alone:
            lines += textwrap.wrap(first, width)
        wrapped = [textwrap.wrap(cell, size) or [""] for cell, size in zip(others, widths[1:], strict=True)]
        for parts in zip_longest([] if alone else [first], *wrapped, fillvalue=""):
            lines.append(_GAP.join(part.ljust(size) for part, size in zip(parts, widths, strict=True)).rstrip())
    return lines


def joined(head: str, items: Iterable[str], width: int = WIDTH) -> list[str]:
    """`head` and `items` with commas between them, in lines that break between items."""
    lines, line = [], head
    for index, item in enumerate(items):
        added = f"{line}{', ' if index else ''}{item}"
        if line and index and len(added) >= width:
            lines.append(line + ",")
            added = item
        line = added
    return [*lines, line]
