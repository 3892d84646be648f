"""Errors of a communication backend: which they are."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["is_backend_failure"]

# gloo raises plain RuntimeErrors that begin with the place in its sources.
_GLOO = "/gloo/"


def is_backend_failure(error: BaseException) -> bool:
    """Whether a collective failed below Python: a closed connection, a timeout, a peer that is gone."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _GLOO in str(error)
