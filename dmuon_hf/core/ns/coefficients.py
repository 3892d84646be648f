"""Coefficients of the quintic iteration ``X <- a X + b (X X^T) X + c (X X^T)^2 X``, one ``(a, b, c)`` row per step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from dmuon_hf.core.errors import ConfigurationError

__all__ = [
    "DEFAULT_COEFFICIENTS",
    "NAMED_COEFFICIENTS",
    "POLAR_EXPRESS_COEFFICIENTS",
    "QUINTIC_COEFFICIENTS",
    "YOU_COEFFICIENTS",
    "Coefficients",
    "Row",
    "rows_of_call",
    "schedule",
]

Row: TypeAlias = tuple[float, float, float]
Coefficients: TypeAlias = Sequence[Sequence[float]] | str

_POLAR_EXPRESS_EXACT: tuple[Row, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
_SAFETY_FACTOR = 1.05

POLAR_EXPRESS_COEFFICIENTS: list[Row] = [
    (a / _SAFETY_FACTOR, b / _SAFETY_FACTOR**3, c / _SAFETY_FACTOR**5) for a, b, c in _POLAR_EXPRESS_EXACT
]
"""Polar Express (arXiv:2505.16932), damped by 1.05 so that rounding cannot push a singular value out of its range."""

YOU_COEFFICIENTS: list[list[float]] = [
    [4.0848, -6.8946, 2.927],
    [3.9505, -6.3029, 2.6377],
    [3.7418, -5.5913, 2.3037],
    [2.8769, -3.1427, 1.2046],
    [2.8366, -3.0525, 1.2012],
]
"""Five steps by @YouJiacheng."""

QUINTIC_COEFFICIENTS: list[Row] = [(3.4445, -4.7750, 2.0315)]
"""One row for every step, by Keller Jordan (https://kellerjordan.github.io/posts/muon): singular values end between
about 0.7 and 1.2 instead of converging to one."""

DEFAULT_COEFFICIENTS: list[Row] = POLAR_EXPRESS_COEFFICIENTS

NAMED_COEFFICIENTS: Final[Mapping[str, Sequence[Sequence[float]]]] = MappingProxyType(
    {"polar_express": POLAR_EXPRESS_COEFFICIENTS, "you": YOU_COEFFICIENTS, "quintic": QUINTIC_COEFFICIENTS}
)
"""The tables by the names that ``NewtonSchulz(coefficients=...)`` takes."""


def schedule(coefficients: Coefficients | None = None, steps: int | None = None) -> tuple[Row, ...]:
    """The rows that ``steps`` iterations run: the first ``steps`` of the table, its last row repeated beyond the end.

    ``None`` for the table means ``DEFAULT_COEFFICIENTS``, a name one of ``NAMED_COEFFICIENTS``; ``None`` for ``steps``
    means every row of the table once.

    Raises:
        ConfigurationError: an unknown name, an empty table, a row that is not three finite numbers, or ``steps`` below
            1.
    """
    table = _rows(DEFAULT_COEFFICIENTS if coefficients is None else coefficients)
    if steps is None:
        return table
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigurationError(f"Newton-Schulz needs a whole number of steps, at least 1; got steps={steps!r}.")
    return table[:steps] + table[-1:] * (steps - len(table))


def rows_of_call(coefficients: Coefficients | None, steps: int) -> tuple[Row, ...]:
    """The rows that a Newton-Schulz function runs: a table that was given, once; else ``steps`` of the default one.

    Raises:
        ConfigurationError: as :func:`schedule`.
    """
    rows = schedule(coefficients, steps)
    return rows if coefficients is None else schedule(coefficients)


def _rows(coefficients: Coefficients) -> tuple[Row, ...]:
    if isinstance(coefficients, str):
        if coefficients not in NAMED_COEFFICIENTS:
            names = ", ".join(map(repr, NAMED_COEFFICIENTS))
            raise ConfigurationError(
                f"coefficients={coefficients!r} is no table of Newton-Schulz: choose from {names}."
            )
        coefficients = NAMED_COEFFICIENTS[coefficients]
    rows: list[Row] = []
    for index, row in enumerate(coefficients):
        values = tuple(float(value) for value in row)
        if len(values) != 3 or not all(math.isfinite(value) for value in values):
            raise ConfigurationError(
                f"Each row of Newton-Schulz coefficients is three finite numbers (a, b, c); row {index} is {row!r}."
            )
        rows.append((values[0], values[1], values[2]))
    if not rows:
        raise ConfigurationError("The table of Newton-Schulz coefficients is empty; give at least one (a, b, c) row.")
    return tuple(rows)
