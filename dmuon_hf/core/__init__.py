"""A distributed Muon for plain PyTorch: dedicated ownership on FSDP2 and HSDP. Knows torch only.

import dmuon_hf.core as dmuon

dmuon.dedicate_params(model, mesh, predicate=lambda name, param: "proj" in name and param.ndim == 2)
fully_shard(model, mesh=mesh)
optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)
"""

from __future__ import annotations

from dmuon_hf.core.checkpoint import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from dmuon_hf.core.clip import (
    GradClipBucket,
    GradClipBucketStats,
    MuonGradClipStats,
    SegmentedGradClipResult,
    clip_grad_norm_,
    clip_grad_norm_buckets_,
    clip_total_grad_norm_,
    register_muon_grad_clip_strategy,
    try_clip_optimizer_grad_norm_buckets_,
)
from dmuon_hf.core.diagnostics import collect_forward_unshard_profile, summarize_comm_plan, summarize_param_groups
from dmuon_hf.core.errors import ConfigurationError, DMuonError, LockstepError
from dmuon_hf.core.ns import (
    DEFAULT_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    YOU_COEFFICIENTS,
    NewtonSchulz,
    direct_newton_schulz,
    get_backend_status,
    get_ns_backend,
    gram_newton_schulz,
    gram_newton_schulz_distributed_local,
    gram_newton_schulz_distributed_local_batched,
    gram_newton_schulz_factors,
    gram_newton_schulz_q,
    newton_schulz,
)
from dmuon_hf.core.optim import Muon, convert_lr
from dmuon_hf.core.plan import MatrixSpec, Plan
from dmuon_hf.core.replicated import (
    ReplicatedGroup,
    dedicate_params_ddp,
    dedicate_params_ddp_tp,
    get_replicated_group,
    install_ddp_patch,
    replicate,
    replicate_tp,
)
from dmuon_hf.core.runtime import (
    DedicatedCommContext,
    DedicatedParam,
    OwnedTensor,
    install_patch,
    runtime_of,
    uninstall_patch,
)
from dmuon_hf.core.runtime.state_dict_shim import install_state_dict_shim
from dmuon_hf.core.setup import dedicate_params
from dmuon_hf.core.utilities import (
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
    "GradClipBucket",
    "GradClipBucketStats",
    "LockstepError",
    "MatrixSpec",
    "Muon",
    "MuonGradClipStats",
    "NewtonSchulz",
    "OwnedTensor",
    "Plan",
    "ReplicatedGroup",
    "SegmentedGradClipResult",
    "broadcast_all_updates",
    "broadcast_all_updates_async",
    "clip_grad_norm_",
    "clip_grad_norm_buckets_",
    "clip_total_grad_norm_",
    "collect_forward_unshard_profile",
    "convert_lr",
    "dedicate_params",
    "dedicate_params_ddp",
    "dedicate_params_ddp_tp",
    "direct_newton_schulz",
    "get_backend_status",
    "get_comm_ctx",
    "get_dedicated_params",
    "get_model_state_dict",
    "get_ns_backend",
    "get_optimizer_state_dict",
    "get_owned_params",
    "get_replicated_group",
    "gram_newton_schulz",
    "gram_newton_schulz_distributed_local",
    "gram_newton_schulz_distributed_local_batched",
    "gram_newton_schulz_factors",
    "gram_newton_schulz_q",
    "install_patch",
    "newton_schulz",
    "no_sync",
    "prepare_muon_grads",
    "register_muon_grad_clip_strategy",
    "replicate",
    "replicate_tp",
    "runtime_of",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "summarize_comm_plan",
    "summarize_param_groups",
    "try_clip_optimizer_grad_norm_buckets_",
    "uninstall_patch",
    "wait_all_post_step_broadcasts",
    "wait_all_reduces",
    "wait_all_replicate_broadcasts",
]

install_ddp_patch()
install_patch()
install_state_dict_shim()
