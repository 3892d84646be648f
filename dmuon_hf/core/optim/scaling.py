"""Learning-rate rules: how the step on an orthogonalised matrix depends on its shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["LR_SCALES", "LrScale", "convert_lr", "lr_scale_factor"]

LrScale: TypeAlias = Literal["match_rms_adamw", "original", "spectral", "none"]

_RULES: Final[Mapping[str, Callable[[int, int], float]]] = {
    # Moonlight (arXiv 2502.16982): the RMS of the update equals that of AdamW, so AdamW's learning rate carries over.
    "match_rms_adamw": lambda out, inner: 0.2 * math.sqrt(max(out, inner)),
    # Keller Jordan's Muon.
    "original": lambda out, inner: math.sqrt(max(1.0, out / inner)),
    # Spectral condition (arXiv 2310.17813): the update's operator norm follows sqrt(out / in).
    "spectral": lambda out, inner: math.sqrt(out / inner),
    "none": lambda out, inner: 1.0,
}
LR_SCALES: Final[tuple[str, ...]] = tuple(_RULES)


def lr_scale_factor(shape: tuple[int, int], rule: str) -> float:
    """Factor that ``rule`` puts on the learning rate of a logical matrix of ``shape`` ``(out, in)``.

    Raises:
        ConfigurationError: ``rule`` is not one of ``LR_SCALES`` or the matrix has no elements.
    """
    if rule not in _RULES:
        raise ConfigurationError(f"lr_scale must be one of {LR_SCALES}, got {rule!r}")
    out, inner = shape
    if out < 1 or inner < 1:
        raise ConfigurationError(f"a matrix of shape {(out, inner)} has no learning-rate scale")
    return _RULES[rule](out, inner)


def convert_lr(lr: float, shape: tuple[int, int], source: LrScale, target: LrScale) -> float:
    """Learning rate that under rule ``target`` takes the step that ``lr`` takes under rule ``source``.

    Args:
        lr: Learning rate under ``source``.
        shape: ``(out, in)`` of the matrix; the conversion is exact for this shape only.
        source: Rule that ``lr`` was chosen for, one of ``LR_SCALES``.
        target: Rule the result is meant for, one of ``LR_SCALES``.
    """
    return lr * lr_scale_factor(shape, source) / lr_scale_factor(shape, target)
