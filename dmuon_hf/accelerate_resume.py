"""What the hooks on `load_state` and `save_state` do: a checkpoint loads in any mode, whichever saved it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from dmuon_hf import checkpoint_files as files
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.runtime import runtime_of
from dmuon_hf.loaded_shards import check_saved_by_accelerate
from dmuon_hf.prepare import muon_of
from dmuon_hf.resume import load_model, load_optimizer, saved_whole

__all__ = ["load_accelerator_state", "load_fsdp_model", "load_fsdp_optimizer", "save_state"]


def load_fsdp_model(
    original: Callable[..., Any],
    plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: Any,
    model_index: int = 0,
    **options: Any,
) -> Any:
    """`load_fsdp_model`, as `accelerator.load_state` calls it under FSDP. Collective."""
    if runtime_of(model) is None:
        return original(plugin, accelerator, model, input_dir, model_index, **options)
    _check_complete(Path(input_dir), len(accelerator._schedulers), has_scaler=accelerator.scaler is not None)
    load_model(model, Path(input_dir), model_index)
    return None


def load_fsdp_optimizer(
    original: Callable[..., Any],
    plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: Any,
    optimizer_index: int = 0,
    **options: Any,
) -> None:
    """`load_fsdp_optimizer`, as `accelerator.load_state` calls it under FSDP. Collective."""
    muon = muon_of(optimizer)
    if muon is None:
        original(plugin, accelerator, optimizer, model, input_dir, optimizer_index, **options)
    else:
        load_optimizer(model, muon, Path(input_dir), optimizer_index)


def load_accelerator_state(
    original: Callable[..., Any],
    input_dir: Any,
    models: list[nn.Module],
    optimizers: list[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`load_accelerator_state`, which in one process loads models and optimizers, and in all modes everything else.

    accelerate counts the files of models and optimizers by their place in the lists, so all or none are loaded here.
    """
    owner = next((model for model in models if runtime_of(model) is not None), None)
    if owner is None:
        for mine in filter(None, map(muon_of, optimizers)):
            check_saved_by_accelerate(mine)
        return original(input_dir, models, optimizers, *args, **kwargs)
    given = inspect.signature(original).bind_partial(input_dir, models, optimizers, *args, **kwargs).arguments
    _check_complete(Path(input_dir), len(given.get("schedulers", ())), has_scaler=given.get("scaler") is not None)
    for index, model in enumerate(models):
        load_model(model, Path(input_dir), index)
    for index, optimizer in enumerate(optimizers):
        muon = muon_of(optimizer)
        if muon is None:
            optimizer.load_state_dict(files.read_whole(files.optimizer_in(Path(input_dir), index)))
        else:
            load_optimizer(owner, muon, Path(input_dir), index)
    return original(input_dir, [], [], *args, **kwargs)


def _check_complete(directory: Path, schedulers: int, *, has_scaler: bool) -> None:
    """Refuse a checkpoint without what accelerate reads last, before anything is loaded. Local.

    Raises:
        ConfigurationError: names the files that are missing.
    """
    names = ["scheduler.bin" if index == 0 else f"scheduler_{index}.bin" for index in range(schedulers)]
    names += ["scaler.pt"] if has_scaler else []
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ConfigurationError(
            f"{directory} holds no {' and no '.join(missing)}, so nothing was loaded: it was saved without a prepared "
            "scheduler, or with other mixed precision than 'fp16'. Prepare what the run that saved it had prepared, or "
            "load its weights with from_pretrained and start a new run"
        )


def save_state(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """`Accelerator.save_state`: without FSDP, too, the names of parameters and whole momentum are written."""
    owner = next((model for model in accelerator._models if runtime_of(model) is not None), None)
    muon = next(filter(None, map(muon_of, accelerator._optimizers)), None)
    if owner is None and muon is not None:
        check_saved_by_accelerate(muon)
    if owner is None or muon is None or accelerator.is_fsdp2:
        return original(accelerator, *args, **kwargs)
    with saved_whole(owner, muon):
        return original(accelerator, *args, **kwargs)
