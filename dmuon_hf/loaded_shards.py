"""Models that transformers sharded while it loaded them: `from_pretrained(..., distributed_config=...)`.

Their parameters are DTensors (under tensor parallelism alone some are plain copies), and transformers reduces their
gradients. So nothing is dedicated, hooked or prepared: Muon updates the matrices where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import MatrixSpec, canonical_name

__all__ = ["check_loaded_shards", "check_prepared", "is_loaded_in_shards", "selection_of"]


def is_loaded_in_shards(model: nn.Module) -> bool:
    """Whether transformers sharded the model while it loaded it."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def check_loaded_shards(model: nn.Module) -> None:
    """Refuse the settings of `DistributedConfig` that Muon does not know. Local; the same on every rank.

    Raises:
        NotImplementedError: pipeline parallelism or CPU offload.
    """
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if (getattr(config, "pp_size", None) or 1) > 1:
        raise NotImplementedError(
            "DistributedConfig(pp_size > 1) is not built yet: its ranks have different layers. Use fsdp_size, "
            "dp_replicate_size, tp_size and ep_size"
        )
    if getattr(config, "fsdp_cpu_offload", False):
        raise NotImplementedError("DistributedConfig(fsdp_cpu_offload=True) is not built yet; leave it out")


def selection_of(model: nn.Module, specs: Mapping[str, MatrixSpec]) -> dict[str, Any]:
    """The arguments of `Muon` that select the parameters named in `specs` (canonical names)."""
    return {
        "predicate": lambda name, parameter: canonical_name(name, model) in specs,
        "matrix_spec_fn": lambda name, parameter: specs[canonical_name(name, model)],
    }


def check_prepared(state: Any, args: tuple[Any, ...]) -> None:
    """Refuse to let accelerate shard or wrap a model whose matrices are updated where they lie. Local.

    Raises:
        ConfigurationError: accelerate is to shard it again, or to wrap it.
    """
    if state.distributed_type.value == "FSDP":
        raise ConfigurationError(
            "the model of this optimizer is sharded already (DistributedConfig), and accelerate is configured to shard "
            "it again with FSDP: launch with torchrun, or load the model without distributed_config"
        )
    if any(isinstance(arg, nn.Module) for arg in args):
        raise ConfigurationError(
            "the model of this optimizer is sharded already (DistributedConfig), and accelerator.prepare would "
            "place or wrap it anew: leave the model out, accelerator.prepare(optimizer), or use no Accelerator"
        )
