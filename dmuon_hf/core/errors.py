"""Exceptions of the package. Every message says what is wrong and what to change."""

from __future__ import annotations

__all__ = ["ConfigurationError", "DMuonError", "LockstepError"]


class DMuonError(RuntimeError):
    """Base class of every error that this package raises on purpose."""


class ConfigurationError(DMuonError, ValueError):
    """An argument, model or launch mode that cannot be honoured."""


class LockstepError(DMuonError):
    """The ranks no longer do the same thing: different plans, or a rank missing from a collective."""
