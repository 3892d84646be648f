"""Models that transformers sharded while it loaded them: `from_pretrained(..., distributed_config=...)`.

Their parameters are DTensors (under tensor parallelism alone some are plain copies), and transformers reduces their
gradients. So nothing is dedicated, hooked or prepared: Muon updates the matrices where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

import dmuon_hf.core as dmuon
from dmuon_hf.core.covering import grid_of
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.grid_group import GridGroup, world_group
from dmuon_hf.core.plan import MatrixSpec, canonical_name

__all__ = [
    "check_loaded_shards",
    "check_prepared",
    "check_saved_by_accelerate",
    "check_synchronised_at_first_step",
    "is_loaded_in_shards",
    "ranks_of",
    "resumable",
    "save_optimizer",
    "selection_of",
]


def is_loaded_in_shards(model: nn.Module) -> bool:
    """Whether transformers sharded the model while it loaded it."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def ranks_of(model: nn.Module) -> GridGroup | None:
    """The ranks that a model was sharded over; None for a single process."""
    return grid_of(list(model.parameters())) or world_group()


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


def check_synchronised_at_first_step(model: nn.Module, optimizer: dmuon.Muon) -> None:
    """Let the first step of `optimizer` refuse parameters that each data-parallel rank would train for itself.

    What is added to a sharded model, such as adapters, is plain, and nobody reduces its gradients but a Trainer, which
    puts a hook on each. Local; the same on every rank.
    """
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if (getattr(config, "dp_size", None) or 1) == 1:
        return

    checked = False

    def check(*_: Any) -> None:
        nonlocal checked
        apart = [
            name
            for name, parameter in (() if checked else model.named_parameters())
            if parameter.requires_grad
            and not isinstance(parameter.data, DTensor)
            and not parameter._post_accumulate_grad_hooks
        ]
        if apart:
            raise ConfigurationError(
                f"{apart[0]} and {len(apart) - 1} more parameters were added to a model that is sharded already "
                "(DistributedConfig), and nobody reduces their gradients, so every rank would train its own. Use a "
                "Trainer, which does, or average them in hooks (parameter.register_post_accumulate_grad_hook)"
            )
        checked = True

    optimizer.register_step_pre_hook(check)


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


def check_saved_by_accelerate(muon: dmuon.Muon) -> None:
    """Refuse to let accelerate write or read the state of an optimizer whose momentum is spread over ranks. Local.

    Raises:
        ConfigurationError: the first rank would write its own part as if it were the whole.
    """
    if any(isinstance(value, DTensor) for entry in muon.state.values() for value in entry.values()):
        raise ConfigurationError(
            "accelerator.save_state and load_state do not know a model that is sharded already (DistributedConfig): "
            "each rank would take its own part for the whole. Use torch.distributed.checkpoint with get_state_dict and "
            "set_state_dict, or a Trainer"
        )


@contextmanager
def resumable(model: Any, args: Any) -> Iterator[None]:
    """Inside the block, in which a Trainer is made, it takes arguments that ask for checkpoints to resume from.

    The Trainer refuses them for models that were sharded while they were loaded, as it has no way to write the
    optimizer's state. With Muon it has one: `save_optimizer`.
    """
    if args is None or args.save_only_model or not is_loaded_in_shards(model):
        yield
        return
    args.save_only_model = True
    try:
        yield
    finally:
        args.save_only_model = False


def save_optimizer(model: nn.Module, optimizer: dmuon.Muon, directory: Path) -> None:
    """Write the state of an optimizer as FSDP2 does with `SHARDED_STATE_DICT`, each rank its own part. Collective."""
    state = get_optimizer_state_dict(model, optimizer)
    save({"optimizer": state}, checkpoint_id=directory / "optimizer_0")
