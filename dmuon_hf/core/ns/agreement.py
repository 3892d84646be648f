"""Ranks that orthogonalise alike: same settings, same kernels."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmuon_hf.core.errors import ConfigurationError, DMuonError, LockstepError
from dmuon_hf.core.ns.autotune.cache import machine
from dmuon_hf.core.ns.backend import NewtonSchulz

__all__ = ["Call", "RankGroup", "autotune_on_first_rank", "require_same_on_all_ranks"]


_CPU = torch.device("cpu")


class Call(NamedTuple):
    """What one call of a ``NewtonSchulz`` will be given."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The data-parallel ranks, as this module uses them.

    Attributes:
        maximum: Elementwise maximum of a small float32 vector over all of them: a collective.
        from_first: What the first of them passes, on all; it has to be picklable: a collective.
        device: Where that vector has to be, and what Newton-Schulz runs on.
        is_first: Whether this is the first of them.
    """

    maximum: Callable[[Tensor], Tensor]
    from_first: Callable[[Any], Any]
    device: torch.device = _CPU
    is_first: bool = True

    def any(self, condition: bool) -> bool:
        """Whether ``condition`` holds on any rank. Collective."""
        return bool(self._agreed([float(condition)])[0])

    def equal(self, text: str) -> bool:
        """Whether all ranks pass the same text. Collective."""
        # Two numbers that float32 holds exactly; the maximum of each and of its negative meet only if all are equal.
        digest = divmod(zlib.crc32(text.encode()), 1 << 16)
        agreed = self._agreed([*digest, *(-part for part in digest)])
        return torch.equal(agreed[:2], -agreed[2:])

    def _agreed(self, values: list[float]) -> Tensor:
        return self.maximum(torch.tensor(values, dtype=torch.float32, device=self.device))


def require_same_on_all_ranks(ns: NewtonSchulz, ranks: RankGroup) -> None:
    """Raise on every rank if their ``NewtonSchulz`` differ anywhere, apart from what they found by timing. Collective.

    Otherwise an update would depend on which rank owns a matrix, by the rounding of one kernel or another.

    Raises:
        LockstepError: settings or kernels differ.
    """
    _require_equal(ns.settings, ranks)


def autotune_on_first_rank(ns: NewtonSchulz, calls: Iterable[Call], ranks: RankGroup) -> None:
    """Give all ranks the kernels that the first of them finds fastest for ``calls``. Collective.

    The first rank tunes what it and the cache do not know yet, while the others wait for it; ``ns`` tunes nothing
    afterwards. The settings of all ranks are the same already.

    Args:
        ns: This rank's object, with ``autotune``.
        calls: What any rank will call it with; used on the first rank.
        ranks: Who takes part.

    Raises:
        ConfigurationError: the ranks run on different GPUs or CPUs, or with other packages.
        DMuonError: on every rank, if tuning failed on the first one.
    """
    _require_same_machine(ranks)
    found: Any = None
    failure: Exception | None = None
    if ranks.is_first:
        try:
            found = _tuned(ns, calls, ranks.device)
        except Exception as error:
            # Whatever it is: the others wait.
            failure = error
            found = f"{type(error).__name__}: {error}"
    found = ranks.from_first(found)
    if failure is not None:
        raise failure
    if isinstance(found, str):
        raise DMuonError(f"autotuning Newton-Schulz failed on the first data-parallel rank: {found}")
    ns.adopt(found)
    _require_equal(ns.fingerprint, ranks)


def _tuned(ns: NewtonSchulz, calls: Iterable[Call], device: torch.device) -> Any:
    if ns.tuner is None:
        raise ConfigurationError("this NewtonSchulz does not tune: give it autotune=True.")
    products = {
        product
        for call in calls
        for product in ns.products(call.shape, dtype=call.dtype, device=device, steps=call.steps)
    }
    ns.tuner.tune(products, device)
    return ns.tuner.choices


def _require_same_machine(ranks: RankGroup) -> None:
    mine = machine(ranks.device)
    first = ranks.from_first(mine)
    if ranks.any(mine != first):
        here = "the same" if mine == first else json.dumps(mine)
        raise ConfigurationError(
            f"autotune needs equal machines on all data-parallel ranks, since one of them tunes for all. The first one "
            f"has {json.dumps(first)}, this one has {here}. Leave autotune out."
        )


def _require_equal(fingerprint: str, ranks: RankGroup) -> None:
    if not ranks.equal(fingerprint):
        raise LockstepError(
            f"the ranks would run Newton-Schulz differently; this one has {fingerprint}. Pass the same ns_backend "
            f"on every rank, and kernel='cublas' where GPUs or installed packages differ."
        )
