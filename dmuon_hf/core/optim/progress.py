"""Log lines of the first step, which can take long where kernels are tuned or compiled for each shape."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

from dmuon_hf.core.optim.update import OwnedMatrix

__all__ = ["FirstStepProgress"]

logger = logging.getLogger(__name__)


class FirstStepProgress:
    """Logs up to ``limit`` matrices before they are orthogonalised in the first step, and its end."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._seen = 0
        self._started = 0.0
        self.active = limit > 0

    def on_batch(self, batch: Sequence[OwnedMatrix]) -> None:
        """Log the matrices of a batch that is about to be orthogonalised."""
        if self._seen == 0:
            self._started = perf_counter()
        self._seen += len(batch)
        for matrix in batch[: self._left]:
            logger.info("first step: Newton-Schulz on %s %s", matrix.name, tuple(matrix.weight.shape))
        self._left = max(0, self._left - len(batch))

    def finish(self) -> None:
        """The first step is over: log how much this rank did, and go quiet."""
        if self.active and self._seen > 0:
            logger.info("first step: %d owned parameters updated in %.2f s", self._seen, perf_counter() - self._started)
        self.active = False
