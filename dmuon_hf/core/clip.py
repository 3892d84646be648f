"""Public gradient clipping: the gradients of Muon's matrices, and independent buckets.

Ordinary parameters are clipped with ``torch.nn.utils.clip_grad_norm_``, which over *all* parameters of a model,
dedicated ones included, gives the true global norm too, as long as all lie on one mesh; ``clip_total_grad_norm_`` gives
it over several.
"""

from __future__ import annotations

from dmuon_hf.core.optim.clip_buckets import (
    GradClipBucket,
    GradClipBucketStats,
    SegmentedGradClipResult,
    clip_grad_norm_buckets_,
    try_clip_optimizer_grad_norm_buckets_,
)
from dmuon_hf.core.optim.clip_global import (
    MuonGradClipRequest,
    MuonGradClipStats,
    MuonGradClipStrategy,
    clip_grad_norm_,
    register_muon_grad_clip_strategy,
)
from dmuon_hf.core.optim.clip_total import clip_total_grad_norm_

__all__ = [
    "GradClipBucket",
    "GradClipBucketStats",
    "MuonGradClipRequest",
    "MuonGradClipStats",
    "MuonGradClipStrategy",
    "SegmentedGradClipResult",
    "clip_grad_norm_",
    "clip_grad_norm_buckets_",
    "clip_total_grad_norm_",
    "register_muon_grad_clip_strategy",
    "try_clip_optimizer_grad_norm_buckets_",
]
