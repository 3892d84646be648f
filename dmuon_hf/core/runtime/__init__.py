"""Stateful half of the core: storage, hooks, collectives. The only code that moves parameter storage.

Dependencies go one way: ``states``, ``layout``, ``collectives`` know nothing of the rest; ``placement``, ``publish``
and ``reduction`` are strategies over them; ``weights`` and ``gradients``, the two halves of a ``Unit``, are given their
strategies; ``schedule`` orders units; ``hooks`` call the schedule; ``Runtime`` holds one model's units together.
"""

from __future__ import annotations

from dmuon_hf.core.runtime.comm_context import DedicatedCommContext
from dmuon_hf.core.runtime.dedicated import DedicatedParam
from dmuon_hf.core.runtime.fsdp_patch import install_patch, uninstall_patch
from dmuon_hf.core.runtime.owned_tensor import Content, OwnedTensor
from dmuon_hf.core.runtime.runtime import Runtime, hidden, require_runtime, runtime_of

__all__ = [
    "Content",
    "DedicatedCommContext",
    "DedicatedParam",
    "OwnedTensor",
    "Runtime",
    "hidden",
    "install_patch",
    "require_runtime",
    "runtime_of",
    "uninstall_patch",
]
