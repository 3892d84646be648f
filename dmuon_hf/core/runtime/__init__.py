"""Stateful half of the core: storage, hooks, collectives. The only code that moves parameter storage.

Dependencies go one way: ``states``, ``layout``, ``collectives`` know nothing of the rest; ``placement``, ``publish``
    and
``reduction`` are strategies over them; a ``Unit`` is given its strategies; ``schedule`` orders units; ``hooks`` call
the schedule; ``Runtime`` holds one model's units together.
"""

from __future__ import annotations

from .comm_context import DedicatedCommContext
from .dedicated import DedicatedParam
from .fsdp_patch import install_patch, uninstall_patch
from .owned_tensor import Content, OwnedTensor
from .runtime import Runtime, detach, hidden, require_runtime, runtime_of

__all__ = [
    "Content",
    "DedicatedCommContext",
    "DedicatedParam",
    "OwnedTensor",
    "Runtime",
    "detach",
    "hidden",
    "install_patch",
    "require_runtime",
    "runtime_of",
    "uninstall_patch",
]
