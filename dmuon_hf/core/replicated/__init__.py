"""Weights that every rank keeps whole (DDP, or no wrapper at all): owners share out the updates alone.

``bucket`` and ``averaging`` make gradients their mean over all ranks during backward; ``publish`` brings updated
matrices from their owners to everybody; ``params`` and ``runtime`` are what the optimizer asks of them; ``parts`` is
what a rank has of a parameter that tensor parallelism has cut. ``build`` and ``setup`` are ``dedicate_params_ddp`` and
``dedicate_params_ddp_tp``, ``replicate`` averages what has no owner, and ``ddp_patch`` tells
``DistributedDataParallel`` what it must not. Later modules know earlier ones.
"""

from __future__ import annotations

from dmuon_hf.core.replicated.ddp_patch import install_ddp_patch, uninstall_ddp_patch
from dmuon_hf.core.replicated.replicate import ReplicatedGroup, get_replicated_group, replicate, replicate_tp
from dmuon_hf.core.replicated.setup import dedicate_params_ddp, dedicate_params_ddp_tp

__all__ = [
    "ReplicatedGroup",
    "dedicate_params_ddp",
    "dedicate_params_ddp_tp",
    "get_replicated_group",
    "install_ddp_patch",
    "replicate",
    "replicate_tp",
    "uninstall_ddp_patch",
]
