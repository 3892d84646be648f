"""What `dmuon_hf` refuses, and what to do instead.

Every launch mode or model that would train wrongly, or not with Muon, is an error here. Nothing falls back to another
optimizer or to another mode.
"""

from __future__ import annotations

import os
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from dmuon_hf.adapters import has_adapters
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.runtime import runtime_of
from dmuon_hf.loaded_shards import check_loaded_shards, is_loaded_in_shards

if TYPE_CHECKING:
    from accelerate.state import AcceleratorState

__all__ = [
    "check_any_muon",
    "check_launch",
    "check_model",
    "check_same_batches",
    "check_shardable",
    "check_training_arguments",
    "is_replicated",
]

_USE_FSDP2 = "use FSDP2: `fsdp_version: 2` in the accelerate config, or DMuonPlugin"


def check_model(model: nn.Module) -> None:
    """Refuse models that are quantised without adapters, wrapped, or that others than transformers have sharded."""
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        _check_quantized(model)
    if type(model).__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
        raise ConfigurationError(f"pass the model itself, not its {type(model).__name__} wrapper; {_USE_FSDP2}")
    if is_loaded_in_shards(model):
        check_loaded_shards(model)
    elif runtime_of(model) is None:
        sharded = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
        if sharded is not None:
            raise ConfigurationError(
                f"parameter {sharded!r} is already distributed. Build the optimizer before the model is sharded; "
                "accelerate.prepare shards it. A model that is sharded already trains with dmuon_hf.core.Muon(model, "
                "predicate=...)"
            )


def _check_quantized(model: nn.Module) -> None:
    if not has_adapters(model):
        raise ConfigurationError(
            "this model is quantised: its weights cannot take Muon updates. Add adapters (peft) and train these, load "
            "it without quantization_config, or call dequantize() first and then drop config.quantization_config and "
            "hf_quantizer"
        )
    trained = (name for name, p in model.named_parameters() if p.requires_grad and not p.is_floating_point())
    name = next(trained, None)
    if name is not None:
        raise ConfigurationError(
            f"{name!r} is quantised and trainable: freeze the quantised base, so that the adapters train alone"
        )


def check_any_muon(model: nn.Module, specs: Sized) -> None:
    """Refuse to train without a single Muon matrix."""
    if len(specs) > 0:
        return
    advice = (
        "Print dmuon_hf.routes(model) to see why, and pass routes={pattern: 'muon'} or predicate= to choose matrices"
    )
    if _is_convolutional(model):
        advice = (
            "It consists of convolutions, which Muon does not update: train it with AdamW, without dmuon_hf, or choose "
            "what matrices it has with routes={pattern: 'muon'}"
        )
    raise ConfigurationError(
        f"no trainable parameter of {type(model).__name__} is routed to Muon, so this would be plain AdamW. {advice}"
    )


def _is_convolutional(model: nn.Module) -> bool:
    """Whether most of a model is kernels of convolutions."""
    convolutions = [module for module in model.modules() if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    kernels = sum(convolution.weight.numel() for convolution in convolutions)
    return 2 * kernels > sum(parameter.numel() for parameter in model.parameters())


def check_shardable(model: nn.Module) -> None:
    """Refuse what FSDP2 does not shard: scalars."""
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise ConfigurationError(
            f"{', '.join(scalars[:4])} of {type(model).__name__} is a scalar, which FSDP2 does not shard, whatever the "
            "optimizer: make it a parameter of one element (module.name = nn.Parameter(module.name.detach().reshape(1))"
            "), or launch without FSDP, which replicates the model"
        )


def check_training_arguments(args: Any) -> None:
    """Refuse TrainingArguments that ask for another optimizer, which would have no effect, or cast sharded weights."""
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if args.world_size > 1 and getattr(args, name):
            raise ConfigurationError(
                f"{name} casts the model that is trained, which FSDP2 cannot follow: remove it and use bf16=True, "
                "which computes in bf16 when it evaluates as well"
            )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer not in ("adamw_torch", "adamw_torch_fused"):
        raise ConfigurationError(
            f"optim={optimizer!r} has no effect beside dmuon_hf.create(); leave optim at its default (AdamW updates "
            "the weights that Muon does not)"
        )
    for name in ("optim_args", "optim_target_modules"):
        if getattr(args, name, None):
            raise ConfigurationError(f"{name} has no effect beside dmuon_hf.create(); remove it")


def check_same_batches(trainer: Any) -> None:
    """Refuse a trainer that draws its batches at random where ranks share them. Local; the same on every rank.

    Raises:
        NotImplementedError: GRPO of TRL with tensor parallelism.
    """
    config = getattr(trainer.accelerator, "parallelism_config", None)
    loaded = getattr(getattr(trainer.model, "config", None), "distributed_config", None)
    tp_size = max(getattr(config, "tp_size", 1), getattr(loaded, "tp_size", None) or 1)
    if tp_size > 1 and any(cls.__name__ == "GRPOTrainer" for cls in type(trainer).__mro__):
        raise NotImplementedError(
            f"{type(trainer).__name__} with tp_size={tp_size} is not built: ranks of one tensor-parallel group draw "
            "other completions each, but have to train on the same. Set tp_size: 1 and raise dp_shard_size"
        )


def check_launch(state: AcceleratorState) -> None:
    """Refuse launch modes that this release does not train correctly. Local; raises the same on every rank."""
    kind = state.distributed_type.value
    if state.mixed_precision == "fp8":
        raise NotImplementedError(
            "mixed_precision='fp8' is not built: it replaces linear layers after their weights have got owners. Use "
            "mixed_precision='bf16'"
        )
    if kind == "NO":
        _check_alone()
        return
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise ConfigurationError(f"{kind} keeps its own optimizer and sharding, which Muon cannot use; {_USE_FSDP2}")
    if is_replicated(state):
        _check_parallelism(state)
        return
    if kind != "FSDP":
        raise NotImplementedError(f"this launch is {kind}, which is not built yet; {_USE_FSDP2}")
    plugin = state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ConfigurationError(f"FSDP1 flattens matrices, so Muon cannot work there; {_USE_FSDP2}")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise NotImplementedError("FSDP with CPU offload is not built yet; set fsdp_offload_params: false")
    if plugin.ignored_modules is not None:
        raise NotImplementedError("ignored_modules is not built yet; leave it out of the FSDP config")
    _check_parallelism(state)
    _check_compile(state.dynamo_plugin)


def _check_compile(plugin: Any) -> None:
    """Refuse CUDA graphs: they replay fixed addresses, while whole weights are freed and allocated anew."""
    if plugin.backend.value == "CUDAGRAPHS" or plugin.mode in ("reduce-overhead", "max-autotune"):
        raise ConfigurationError(
            f"torch.compile with backend {plugin.backend.value.lower()!r} and mode {plugin.mode!r} uses CUDA graphs, "
            "which cannot follow weights that move; take torch_compile_mode (dynamo_mode) 'default' or "
            "'max-autotune-no-cudagraphs'"
        )


def is_replicated(state: AcceleratorState) -> bool:
    """Whether every process keeps the whole model (`MULTI_GPU`, `MULTI_CPU` and the like), in accelerate's DDP."""
    return str(state.distributed_type.value).startswith("MULTI_")


def _check_parallelism(state: AcceleratorState) -> None:
    config = state.parallelism_config
    for dimension in ("cp", "sp"):
        if config is not None and getattr(config, f"{dimension}_enabled"):
            raise NotImplementedError(
                f"{dimension}_size > 1 is not built yet; use dp_shard_size, dp_replicate_size and tp_size only"
            )
    if config is None or not config.tp_enabled:
        return
    if is_replicated(state):
        raise NotImplementedError(f"tp_size > 1 without FSDP is not built yet; {_USE_FSDP2}, with dp_shard_size > 1")
    if state.fsdp_plugin.cpu_ram_efficient_loading:
        raise NotImplementedError(
            "tp_size > 1 needs the weights on every process, to cut its part out of them: set "
            "fsdp_cpu_ram_efficient_loading: false"
        )


def _check_alone() -> None:
    """Refuse several processes that accelerate did not connect."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    launched = max(int(os.environ.get("WORLD_SIZE", "1")), world)
    if launched > 1:
        raise ConfigurationError(
            f"{launched} processes were launched but accelerate runs each of them alone, so every one would train "
            "its own unsynchronised copy. Import dmuon_hf before the first Accelerator or TrainingArguments is made; "
            "on CPU launch with FSDP2 (see accelerate_configs/dmuon_cpu_fsdp2.yaml)"
        )
