"""Where Gram Newton-Schulz folds its factor into the matrix and starts again from a fresh Gram matrix.

Between two restarts only powers of the Gram matrix ``R`` are formed. An eigenvalue of ``R`` below its rounding error
``u`` is noise and may be negative. Step ``j`` multiplies it by about ``a_j**2``, and step ``i`` sees it through its
own coefficients as a relative error of ``|b_i / a_i|`` times its size. A segment that starts at step ``s`` is
therefore safe as long as

    u * a_s**2 * ... * a_{i-1}**2 * |b_i / a_i|  <=  1 / 6      for every later step i of the segment,

and beyond it the noise grows without bound: five more steps turn it into infinities.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.coefficients import Row

__all__ = ["check_restarts", "default_restarts", "segments"]

_TOLERATED_NOISE = 1 / 6


def default_restarts(rows: Sequence[Row], dtype: torch.dtype) -> tuple[int, ...]:
    """The latest restarts that keep the noise of every segment within the bound of this module.

    They give ``(2,)`` for both five-row tables in float16. Wider types use float16's restarts: at their own they would
    save no more than a tenth of the work and cost a hundredfold in accuracy. bfloat16 needs ``(2, 4)``.
    """
    roundoff = max(torch.finfo(dtype).eps, torch.finfo(torch.float16).eps) / 2
    restarts: list[int] = []
    growth = 1.0
    for index, (a, b, _) in enumerate(rows):
        if index and roundoff * growth * abs(b) > _TOLERATED_NOISE * abs(a):
            restarts.append(index)
            growth = 1.0
        growth *= a * a
    return tuple(restarts)


def check_restarts(restarts: Sequence[int]) -> tuple[int, ...]:
    """``restarts`` in order and without repetition.

    Raises:
        ConfigurationError: an index that is not a whole number of at least 1.
    """
    for index in restarts:
        if isinstance(index, bool) or not isinstance(index, int) or index < 1:
            raise ConfigurationError(
                f"restart_iterations counts iterations from 0 and iteration 0 always starts fresh: give whole numbers "
                f"from 1 on; got {index!r}."
            )
    return tuple(sorted(set(restarts)))


def segments(
    rows: tuple[Row, ...], restart_iterations: Sequence[int] | None, dtype: torch.dtype
) -> tuple[tuple[Row, ...], ...]:
    """The rows of each stretch between two restarts; ``None`` means ``default_restarts``.

    Raises:
        ConfigurationError: a restart after the last iteration, which could have no effect.
    """
    if restart_iterations is None:
        restarts = default_restarts(rows, dtype)
    else:
        restarts = check_restarts(restart_iterations)
    if restarts and restarts[-1] >= len(rows):
        raise ConfigurationError(
            f"restart_iterations={list(restarts)} names an iteration that {len(rows)} step(s) never reach; "
            f"give indices from 1 to {len(rows) - 1}, [] for no restart, or None to have them chosen."
        )
    bounds = (0, *restarts, len(rows))
    return tuple(rows[start:stop] for start, stop in pairwise(bounds))
