"""How environment variables of this package are read: the one place that says what a switch may be set to."""

from __future__ import annotations

import os

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["setting", "switch"]

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def setting(given: str | None, variable: str, default: str) -> str:
    """An argument, or the environment's value where it was left out, or the default."""
    return given if given is not None else os.environ.get(variable, default)


def switch(variable: str, *, given: bool | None = None, default: bool = False) -> bool:
    """As :func:`setting`, of two values; a variable that is empty is not set.

    Raises:
        ConfigurationError: The variable counts, and its value is none of ``1``, ``true``, ``yes``, ``on``, ``0``,
            ``false``, ``no`` and ``off``, in letters of any case.
    """
    if given is not None:
        return given
    text = os.environ.get(variable, "").strip().lower()
    if text in _ON:
        return True
    if text in _OFF:
        return False
    if text:
        raise ConfigurationError(f"{variable} must be 0 or 1, got {text!r}")
    return default
