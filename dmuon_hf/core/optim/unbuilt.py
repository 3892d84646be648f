"""Arguments whose mode does not exist: the default is accepted, the rest is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["require_defaults"]

_UNBUILT: Final[Mapping[str, tuple[object, str]]] = {
    "post_step_prefetch_sharded_adamw": (False, "the sharded_adamw route"),
    "sharded_adamw_unshard_separate_stream": (False, "the sharded_adamw route"),
}


def require_defaults(**arguments: object) -> None:
    """Raise ``NotImplementedError`` naming the first of ``arguments`` that is not at its default."""
    for name, value in arguments.items():
        default, mode = _UNBUILT[name]
        if value != default:
            raise NotImplementedError(f"Muon({name}={value!r}) is not built ({mode}): leave it at {default!r}")
