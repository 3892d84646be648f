"""Canonical parameter names: the model's own, whatever wraps it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["canonical_name"]

_WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def canonical_name(name: str, root: nn.Module | None = None) -> str:
    """Drop the segments that wrappers insert into a parameter name.

    These are ``_orig_mod`` and ``_checkpoint_wrapped_module`` anywhere, and ``module`` in front. A model may have a
    submodule of its own that is called ``module``. With ``root``, the module that ``name`` was read from, a leading
    ``module`` is dropped only where ``root`` really is a ``DistributedDataParallel``.
    """
    segments = [segment for segment in name.split(".") if segment not in _WRAPPER_SEGMENTS]
    wrapped = root is None or isinstance(getattr(root, "_orig_mod", root), DistributedDataParallel)
    if wrapped and len(segments) > 1 and segments[0] == "module":
        segments = segments[1:]
    return ".".join(segments)
