"""A distributed Muon for plain PyTorch: dedicated ownership on FSDP2 and HSDP. Knows torch only.

    import dmuon_hf.core as dmuon

    dmuon.dedicate_params(model, mesh, predicate=lambda name, param: "proj" in name and param.ndim == 2)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)
"""

from __future__ import annotations

from .errors import ConfigurationError, DMuonError, LockstepError
from .ns import (
    DEFAULT_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    YOU_COEFFICIENTS,
    NewtonSchulz,
    direct_newton_schulz,
    get_backend_status,
    get_ns_backend,
    gram_newton_schulz,
    gram_newton_schulz_factors,
    gram_newton_schulz_q,
    newton_schulz,
)
from .optim import Muon, convert_lr
from .plan import MatrixSpec, Plan
from .runtime import DedicatedCommContext, DedicatedParam, OwnedTensor, install_patch, runtime_of, uninstall_patch
from .setup import dedicate_params
from .utilities import (
    broadcast_all_updates,
    broadcast_all_updates_async,
    get_comm_ctx,
    get_dedicated_params,
    get_owned_params,
    no_sync,
    prepare_muon_grads,
    wait_all_post_step_broadcasts,
    wait_all_reduces,
    wait_all_replicate_broadcasts,
)

__all__ = [
    "DEFAULT_COEFFICIENTS",
    "POLAR_EXPRESS_COEFFICIENTS",
    "YOU_COEFFICIENTS",
    "ConfigurationError",
    "DMuonError",
    "DedicatedCommContext",
    "DedicatedParam",
    "LockstepError",
    "MatrixSpec",
    "Muon",
    "NewtonSchulz",
    "OwnedTensor",
    "Plan",
    "broadcast_all_updates",
    "broadcast_all_updates_async",
    "convert_lr",
    "dedicate_params",
    "direct_newton_schulz",
    "get_backend_status",
    "get_comm_ctx",
    "get_dedicated_params",
    "get_ns_backend",
    "get_owned_params",
    "gram_newton_schulz",
    "gram_newton_schulz_factors",
    "gram_newton_schulz_q",
    "install_patch",
    "newton_schulz",
    "no_sync",
    "prepare_muon_grads",
    "runtime_of",
    "uninstall_patch",
    "wait_all_post_step_broadcasts",
    "wait_all_reduces",
    "wait_all_replicate_broadcasts",
]

install_patch()
