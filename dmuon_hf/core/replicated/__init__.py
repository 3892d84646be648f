"""Weights that every rank keeps whole (DDP, or no wrapper at all): owners share out the updates alone.

``bucket`` and ``averaging`` make gradients their mean over all ranks during backward; ``publish`` brings updated
matrices from their owners to everybody; ``params`` and ``runtime`` are what the optimizer asks of them; ``setup`` is
``dedicate_params_ddp``, ``replicate`` averages what has no owner, and ``ddp_patch`` tells ``DistributedDataParallel``
what it must not. Later modules know earlier ones.
"""

from __future__ import annotations

from dmuon_hf.core.replicated.ddp_patch import install_ddp_patch, uninstall_ddp_patch
from dmuon_hf.core.replicated.replicate import ReplicatedGroup, get_replicated_group, replicate
from dmuon_hf.core.replicated.setup import dedicate_params_ddp

__all__ = [
    "ReplicatedGroup",
    "dedicate_params_ddp",
    "get_replicated_group",
    "install_ddp_patch",
    "replicate",
    "uninstall_ddp_patch",
]
