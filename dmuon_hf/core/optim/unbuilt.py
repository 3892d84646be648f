"""Arguments whose mode does not exist, or that would change nothing: the default is accepted, the rest is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim.interfaces import Layout

__all__ = ["require_defaults", "require_effect"]

DEFAULT_PREFETCH_DEPTH: Final = 1
DEFAULT_PROGRESS_LIMIT: Final = 8

_UNBUILT: Final[Mapping[str, tuple[object, str]]] = {
    "record_step_profile": (False, "step timings; profile step() with torch.profiler"),
    "group_prepare_ahead": (True, "preparing gradients late; they are complete when backward() returns"),
    "tp_distributed_gram": (False, "tensor parallelism"),
    "tp_distributed_gram_policy": ("beneficial", "tensor parallelism"),
    "tp_distributed_gram_max_factor_to_scatter_ratio": (0.5, "tensor parallelism"),
    "post_step_prefetch_groups": (0, "prefetch after the step; see forward_prefetch_depth"),
    "post_step_prefetch_sharded_adamw": (False, "the sharded_adamw route"),
    "sharded_adamw_unshard_separate_stream": (False, "the sharded_adamw route"),
}


def require_defaults(**arguments: object) -> None:
    """Raise ``NotImplementedError`` naming the first of ``arguments`` that is not at its default."""
    for name, value in arguments.items():
        default, mode = _UNBUILT[name]
        if value != default:
            raise NotImplementedError(f"Muon({name}={value!r}) is not built ({mode}): leave it at {default!r}")


def require_effect(
    topology: Layout,
    *,
    replicate_async: bool,
    forward_prefetch_depth: int,
    first_step_progress_log: bool,
    first_step_progress_log_limit: int,
) -> None:
    """Raise ``ConfigurationError`` for a choice that changes nothing on this topology or beside the others."""
    idle = {
        f"replicate_async={replicate_async}": (
            not replicate_async and not topology.is_hsdp,
            "with one replica, where no update is published",
        ),
        f"forward_prefetch_depth={forward_prefetch_depth}": (
            forward_prefetch_depth != DEFAULT_PREFETCH_DEPTH and not topology.is_distributed,
            "in one process without a mesh, where nothing is gathered",
        ),
        f"first_step_progress_log_limit={first_step_progress_log_limit}": (
            first_step_progress_log_limit != DEFAULT_PROGRESS_LIMIT and not first_step_progress_log,
            "with first_step_progress_log=False",
        ),
    }
    for choice, (is_idle, circumstance) in idle.items():
        if is_idle:
            raise ConfigurationError(f"Muon({choice}) has no effect {circumstance}: leave it out")
