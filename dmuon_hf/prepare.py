"""What the hooks on `Accelerator` do: shard, or replicate, the rest of a model whose Muon weights have owners.

accelerate's own preparation must not see dedicated parameters: it would shard them, move them to meta, and map
optimizer parameters by `data_ptr`, which is 0 for every empty one. So they are taken out of the modules while it
runs, and the optimizer is bound to the result by name afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LRScheduler

import dmuon_hf.core as dmuon
from dmuon_hf import checks
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import canonical_name
from dmuon_hf.core.runtime import Runtime, hidden, runtime_of
from dmuon_hf.factory import is_description
from dmuon_hf.loaded_shards import check_prepared
from dmuon_hf.plugin import DMuonPlugin
from dmuon_hf.root_group import shared_weights_left_to_root
from dmuon_hf.small_rests import small_rests_left_to_root
from dmuon_hf.wrapping import blocks_wrapped, embeddings_answered

__all__ = ["get_state_dict", "muon_of", "prepare", "prepare_fsdp2"]

_BUILT_ALONE = (
    "the optimizer was built for one process: make the Accelerator first, then dmuon_hf.create_optimizer(model, ...)"
)


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """`Accelerator.prepare`: refuse what does not work; leave alone what is prepared already."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if any(map(is_description, args)):
        raise ConfigurationError(
            "dmuon_hf.create() describes an optimizer for Trainer(optimizers=...) alone: pass "
            "dmuon_hf.create_optimizer(model, ...) to accelerator.prepare"
        )
    optimizer = _find_muon(args)
    if optimizer is None:
        if isinstance(plugin, DMuonPlugin) and any(isinstance(arg, torch.optim.Optimizer) for arg in args):
            raise ConfigurationError(
                "DMuonPlugin needs a DMuon optimizer: pass dmuon_hf.create_optimizer(model, ...) to accelerator.prepare"
            )
        return original(accelerator, *args, **kwargs)
    _check_single(args)
    if not isinstance(optimizer.runtime, Runtime) and torch.distributed.is_initialized():
        check_prepared(accelerator.state, args)
        return original(accelerator, *args, **kwargs)
    checks.check_launch(accelerator.state)
    models = [arg for arg in args if isinstance(arg, nn.Module)]
    if checks.is_replicated(accelerator.state):
        _check_replicated(optimizer, models)
    if (
        accelerator.is_fsdp2
        and not any(arg is optimizer for arg in args)
        and all(isinstance(model, FSDPModule) for model in models)
    ):
        return _prepare_again(original, accelerator, args)
    return original(accelerator, *args, **kwargs)


def _check_replicated(optimizer: dmuon.Muon, models: list[nn.Module]) -> None:
    """Refuse a model that accelerate would wrap and the optimizer not update as a whole."""
    if any(runtime_of(model) is not optimizer.runtime for model in models):
        raise ConfigurationError("the optimizer belongs to another model than the one passed to accelerator.prepare")
    if optimizer.runtime.topology.ranks is None:
        raise ConfigurationError(_BUILT_ALONE)


def _check_single(args: tuple[Any, ...]) -> None:
    """Refuse a second optimizer: accelerate would bind it to parameters that sharding has replaced, or not at all."""
    optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
    if len(optimizers) > 1:
        names = [type(muon_of(optimizer) or optimizer).__name__ for optimizer in optimizers]
        raise ConfigurationError(
            f"accelerator.prepare got {len(optimizers)} optimizers ({', '.join(names)}). One dmuon_hf.create_optimizer("
            "model, ...) trains all of the model, with AdamW what Muon does not: leave the others out"
        )


def _prepare_again(original: Callable[..., Any], accelerator: Any, args: tuple[Any, ...]) -> Any:
    """Prepare what was prepared before, as a second `Trainer.train()` does: the Accelerator only has to know it again.

    accelerate would map the parameters once more, by addresses that empty tensors do not have.
    """
    results = []
    for arg in args:
        if isinstance(arg, (nn.Module, AcceleratedOptimizer)):
            known = accelerator._models if isinstance(arg, nn.Module) else accelerator._optimizers
            if not any(arg is item for item in known):
                known.append(arg)
            results.append(arg)
        else:
            results.append(original(accelerator, arg))
    return results[0] if len(results) == 1 else tuple(results)


def prepare_fsdp2(original: Callable[..., Any], accelerator: Any, *args: Any) -> Any:
    """`Accelerator._prepare_fsdp2`: let accelerate shard what is not dedicated, then rebind the optimizer.

    Collective: every rank calls it with the same model.
    """
    optimizer = _find_muon(args)
    if optimizer is None:
        return original(accelerator, *args)
    model = next(arg for arg in args if isinstance(arg, nn.Module))
    _check_dedicated(accelerator, model)

    # Schedulers find the wrapper of their optimizer among the prepared ones, so they come after it.
    ours = [arg for arg in args if arg is optimizer or isinstance(arg, LRScheduler)]
    theirs = [arg for arg in args if not any(arg is own for own in ours)]
    wrapped = blocks_wrapped(accelerator.state.fsdp_plugin, model)
    with (
        wrapped,
        embeddings_answered(model),
        hidden(model),
        _persistent_buffers_kept(accelerator, model),
        shared_weights_left_to_root(model),
        small_rests_left_to_root(model),
    ):
        results = dict(zip(map(id, theirs), original(accelerator, *theirs), strict=True))
    optimizer.rebind(model)
    results[id(optimizer)] = accelerator._prepare_one(optimizer, first_pass=True)
    for scheduler in ours:
        if scheduler is not optimizer:
            results[id(scheduler)] = accelerator._prepare_one(scheduler)
    return tuple(results[id(arg)] for arg in args)


@contextmanager
def _persistent_buffers_kept(accelerator: Any, model: nn.Module) -> Iterator[None]:
    """Give every rank the saved buffers of rank 0, where only rank 0 has loaded the model.

    accelerate takes whatever a state dict holds for a sharded parameter then, and fails on buffers, so it must not see
    them. Collective in that mode; nothing in others.
    """
    if not accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
        yield
        return
    kept = {
        (module, name): buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    for module, name in kept:
        del module._buffers[name]
    try:
        yield
    finally:
        for (module, name), buffer in kept.items():
            module._buffers[name] = buffer
    for (module, name), buffer in kept.items():
        value = torch.empty_like(buffer, device=accelerator.device) if buffer.is_meta else buffer.to(accelerator.device)
        torch.distributed.broadcast(value, src=0)
        module._buffers[name] = value


def get_state_dict(original: Callable[..., Any], accelerator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`Accelerator.get_state_dict`: wait for the gathers, and let tied names share one tensor.

    accelerate hands out tensors whose collective nobody waited for; on CPU they cannot be saved. It also gathers tied
    weights once per name, and `save_pretrained` would write every copy.
    """
    state = original(accelerator, model, *args, **kwargs)
    if runtime_of(model) is None:
        return state
    for name, value in state.items():
        if isinstance(value, AsyncCollectiveTensor):
            state[name] = value.wait()
    first_name: dict[int, str] = {}
    for raw_name, parameter in model.named_parameters(remove_duplicate=False):
        name = canonical_name(raw_name, model)
        first = first_name.setdefault(id(parameter), name)
        if first != name and first in state and name in state:
            state[name] = state[first]
    return state


def _check_dedicated(accelerator: Any, model: nn.Module) -> None:
    """Refuse a model whose owners are not spread over accelerate's data-parallel ranks."""
    runtime = runtime_of(model)
    if runtime is None:
        raise ConfigurationError("the optimizer belongs to another model than the one passed to accelerator.prepare")
    if not runtime.topology.is_distributed:
        raise ConfigurationError(_BUILT_ALONE)
    config = accelerator.parallelism_config
    replicas = 1 if config is None else config.dp_replicate_size
    axis = 1 if config is None else config.tp_size
    wanted = (accelerator.num_processes // replicas // axis, replicas)
    found = (runtime.topology.shard_size, runtime.topology.replicate_size)
    if found != wanted:
        raise ConfigurationError(
            f"the model is dedicated over (shards, replicas) = {found}, but accelerate shards over "
            f"{wanted}: use one mesh"
        )


def muon_of(optimizer: Any) -> dmuon.Muon | None:
    """The DMuon optimizer that `optimizer` is or wraps."""
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return inner if isinstance(inner, dmuon.Muon) else None


def _find_muon(args: Iterable[Any]) -> dmuon.Muon | None:
    """The DMuon optimizer among `args`, unwrapped."""
    return next((muon for muon in map(muon_of, args) if muon is not None), None)
