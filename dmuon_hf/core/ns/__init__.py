"""Newton-Schulz orthogonalisation: pure functions of one tensor, without state.

No collectives, but for the two functions of ``distributed``.
"""

from __future__ import annotations

from dmuon_hf.core.ns.backend import NewtonSchulz
from dmuon_hf.core.ns.coefficients import DEFAULT_COEFFICIENTS, POLAR_EXPRESS_COEFFICIENTS, YOU_COEFFICIENTS
from dmuon_hf.core.ns.direct import direct_newton_schulz
from dmuon_hf.core.ns.distributed import (
    gram_newton_schulz_distributed_local,
    gram_newton_schulz_distributed_local_batched,
)
from dmuon_hf.core.ns.gram import (
    gram_newton_schulz,
    gram_newton_schulz_factors,
    gram_newton_schulz_q,
    newton_schulz,
)
from dmuon_hf.core.ns.kernels import get_backend_status, get_ns_backend

__all__ = [
    "DEFAULT_COEFFICIENTS",
    "POLAR_EXPRESS_COEFFICIENTS",
    "YOU_COEFFICIENTS",
    "NewtonSchulz",
    "direct_newton_schulz",
    "get_backend_status",
    "get_ns_backend",
    "gram_newton_schulz",
    "gram_newton_schulz_distributed_local",
    "gram_newton_schulz_distributed_local_batched",
    "gram_newton_schulz_factors",
    "gram_newton_schulz_q",
    "newton_schulz",
]
