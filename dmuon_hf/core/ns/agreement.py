"""Ranks that orthogonalise alike: same settings, same kernel."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.ns.backend import NewtonSchulz

__all__ = ["require_same_on_all_ranks"]


def require_same_on_all_ranks(
    ns: NewtonSchulz, agree: Callable[[Tensor], Tensor], *, device: torch.device | None = None
) -> None:
    """Raise on every rank if the fingerprints of their ``NewtonSchulz`` differ anywhere.

    Otherwise an update would depend on which rank owns a matrix, by the rounding of one kernel or another.

    Args:
        ns: This rank's object.
        agree: Elementwise maximum of a small float32 vector over all data-parallel ranks: the collective.
        device: Where that vector has to be; the CPU by default.

    Raises:
        LockstepError: settings or kernels differ.
    """
    # Two numbers that float32 holds exactly; the maximum of each and of its negative meet only if all are equal.
    digest = divmod(zlib.crc32(ns.fingerprint.encode()), 1 << 16)
    agreed = agree(torch.tensor([*digest, *(-part for part in digest)], dtype=torch.float32, device=device))
    if not torch.equal(agreed[:2], -agreed[2:]):
        raise LockstepError(
            f"the ranks would run Newton-Schulz differently; this one has {ns.fingerprint}. Pass the same ns_backend "
            f"on every rank, and kernel='cublas' where GPUs or installed packages differ."
        )
