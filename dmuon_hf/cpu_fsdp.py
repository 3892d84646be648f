"""FSDP2 on CPU under accelerate.

accelerate turns only GPU-like launches into FSDP. On a CPU machine the same configuration becomes replicated data
parallel, or, under the FSDP launcher, processes that never talk to each other; both run to the end without a word.
These two hooks make it FSDP2 over gloo. They act when FSDP was requested (`ACCELERATE_USE_FSDP`, or an `fsdp_plugin`)
and the processes run on CPU, and in no other case.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["accelerator_state_init", "fsdp_requested", "partial_state_init"]


def fsdp_requested() -> bool:
    """Whether the environment of this process asks accelerate for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def partial_state_init(original: Callable[..., None], state: Any, cpu: bool = False, **kwargs: Any) -> None:
    """`PartialState.__init__`: use the CPU backend where FSDP processes find no accelerator."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and int(os.environ.get("LOCAL_RANK", "-1")) >= 0
    if not PartialState._shared_state and fsdp_requested() and launched and not torch.accelerator.is_available():
        cpu = True
    original(state, cpu, **kwargs)


def accelerator_state_init(original: Callable[..., None], state: Any, *args: Any, **kwargs: Any) -> None:
    """`AcceleratorState.__init__`: let a CPU launch that asked for FSDP2 take the FSDP path."""
    given = inspect.signature(original).bind(state, *args, **kwargs).arguments
    plugin = given.get("fsdp_plugin")
    if plugin is None or state._shared_state.get("_mixed_precision") is not None:
        original(state, *args, **kwargs)
        return
    shared = PartialState._shared_state
    if not shared:
        cpu = given.get("cpu", False) or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")
        PartialState(cpu, **given.get("kwargs", {}))
    if shared.get("distributed_type") != DistributedType.MULTI_CPU:
        original(state, *args, **kwargs)
        return
    if plugin.fsdp_version != 2:
        raise ConfigurationError(
            "FSDP1 on CPU would quietly run as replicated data parallel: set fsdp_version: 2 in the accelerate config"
        )
    # The original reads the type from here and writes FSDP back; only GPU-like types enter its FSDP branch.
    shared["distributed_type"] = DistributedType.MULTI_GPU
    try:
        original(state, *args, **kwargs)
    finally:
        if shared.get("distributed_type") == DistributedType.MULTI_GPU:
            shared["distributed_type"] = DistributedType.MULTI_CPU
