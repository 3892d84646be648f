"""What the hooks on `transformers.Trainer` do so that a run can be resumed.

The Trainer goes on without optimizer state in silence wherever it does not find what it looks for: no `scheduler.pt`,
another mode's file names. Here the state is loaded, or the run ends with an error that says why.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dmuon_hf import checkpoint_files as files
from dmuon_hf.adapters import active_adapter
from dmuon_hf.announcement import announce
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.loaded_shards import is_loaded_in_shards, save_optimizer
from dmuon_hf.prepare import muon_of
from dmuon_hf.resume import load_model, load_optimizer, optimizer_state_is_fresh, saved_whole
from dmuon_hf.trainer import factory_of, trains_with_muon

__all__ = [
    "last_complete_checkpoint",
    "load_best_model",
    "load_from_checkpoint",
    "load_optimizer_and_scheduler",
    "prepare_for_training",
    "save_optimizer_and_scheduler",
    "train",
]

logger = logging.getLogger(__name__)

_STATE = "trainer_state.json"
_SCHEDULER = "scheduler.pt"

_OF_THE_SCHEDULE = ("lr", "initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum")
"""What schedules keep in parameter groups: a new schedule starts from its own values, not from the checkpoint's."""

_SETTINGS = ("initial_lr", "weight_decay", "nesterov", "ns_steps", "lr_scale", "eps")
"""Settings of a group that no schedule changes, so that they tell what a run was asked for."""


def train(
    original: Callable[..., Any], trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """`Trainer.train`: resume from the last checkpoint that was written to its end, not one that a crash cut off.

    A checkpoint that cannot be resumed from is refused before the model is touched.
    """
    _check_not_cast(trainer)
    if trains_with_muon(trainer) and resume_from_checkpoint:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(Path(trainer.args.output_dir))
        _check_resumable(Path(resume_from_checkpoint), trainer.model)
        resume_from_checkpoint = str(resume_from_checkpoint)
    return original(trainer, resume_from_checkpoint, *args, **kwargs)


def _check_not_cast(trainer: Any) -> None:
    """Refuse to go on with weights that an evaluation has cast, before anything runs on them. Local.

    With another optimizer the Trainer trains on in the lower precision without a word.
    """
    optimizer, factory = muon_of(trainer.optimizer), factory_of(trainer)
    flags = [name for name in ("bf16_full_eval", "fp16_full_eval") if getattr(trainer.args, name)]
    if not flags or trainer.model_init is not None:
        return
    cast: list[str] = []
    if optimizer is not None:
        cast = [name for name, problem in optimizer.runtime.misplaced(trainer.model).items() if "was cast" in problem]
    elif factory is not None:
        cast = factory.cast(trainer.model)
    if cast:
        raise ConfigurationError(
            f"{flags[0]} cast the model when it was evaluated ({cast[0]} and {len(cast) - 1} more), so train() cannot "
            "go on with it: leave it out, bf16=True evaluates in bf16 as well; or make a new Trainer with the model "
            "loaded anew. eval_on_start=True evaluates before the first step, and casts nothing"
        )


def _check_resumable(checkpoint: Path, model: Any) -> None:
    if not checkpoint.is_dir():
        raise ConfigurationError(
            f"resume_from_checkpoint={str(checkpoint)!r} is no directory: pass that of a checkpoint, or True for the "
            "last one in output_dir"
        )
    files.model_in(checkpoint, adapter=active_adapter(model))
    files.optimizer_in(checkpoint)
    if not _is_json(checkpoint / _STATE):
        raise ConfigurationError(
            f"{checkpoint} holds no whole {_STATE}, which is written last: the run ended while it was saved. Resume "
            "from the checkpoint before it"
        )


def load_from_checkpoint(original: Callable[..., Any], trainer: Any, checkpoint: Any, model: Any = None) -> None:
    """`Trainer._load_from_checkpoint`: the weights of a checkpoint, whatever mode saved it. Collective."""
    if not trains_with_muon(trainer):
        original(trainer, checkpoint, model)
        return
    logger.info("loading the model from %s", checkpoint)
    load_model(trainer.model if model is None else model, Path(checkpoint))


def load_best_model(original: Callable[..., Any], trainer: Any) -> None:
    """`Trainer._load_best_model`: the best checkpoint may be of an earlier run in another mode. Collective."""
    if not trains_with_muon(trainer):
        original(trainer)
        return
    best = trainer.state.best_model_checkpoint
    logger.info("loading the best model from %s (score: %s)", best, trainer.state.best_metric)
    load_model(trainer.model, Path(best))


def load_optimizer_and_scheduler(original: Callable[..., Any], trainer: Any, checkpoint: Any) -> None:
    """`Trainer._load_optimizer_and_scheduler`: the optimizer's state always; without `scheduler.pt` a new schedule.

    Then the learning rates are those of this run's arguments at the step that is resumed; all else in the parameter
    groups is the checkpoint's, as with any optimizer of torch. Collective.
    """
    optimizer = muon_of(trainer.optimizer)
    if checkpoint is None or optimizer is None:
        original(trainer, checkpoint)
        return
    saved_schedule = Path(checkpoint) / _SCHEDULER
    if saved_schedule.is_file():
        here = [{name: group.get(name) for name in _SETTINGS} for group in optimizer.param_groups]
        load_optimizer(trainer.model, optimizer, Path(checkpoint))
        if trainer.is_world_process_zero():
            _say_what_counts(here, optimizer)
        trainer.lr_scheduler.load_state_dict(torch.load(saved_schedule, map_location="cpu", weights_only=True))
        return
    load_optimizer(trainer.model, optimizer, Path(checkpoint), keep=_OF_THE_SCHEDULE)
    _advance(trainer.lr_scheduler, trainer.state.global_step)
    logger.warning(
        "%s holds no %s: optimizer state was loaded, and the learning rate follows a new schedule from step %d",
        checkpoint,
        _SCHEDULER,
        trainer.state.global_step,
    )


def _say_what_counts(here: list[dict[str, Any]], optimizer: Any) -> None:
    """Name the settings of this run that the checkpoint has replaced, as it does with any optimizer of torch."""
    changed = [
        f"{name} of {group['group_name']!r} is {group.get(name)} and not {value}"
        for settings, group in zip(here, optimizer.param_groups, strict=True)
        for name, value in settings.items()
        if group.get(name) != value
    ]
    if changed:
        logger.warning(
            "the settings of the checkpoint count, not those of this run: %s. To train with other rates, delete %s "
            "from the checkpoint; to change other settings, set them in optimizer.param_groups in on_train_begin",
            "; ".join(changed),
            _SCHEDULER,
        )


def save_optimizer_and_scheduler(original: Callable[..., Any], trainer: Any, output_dir: str) -> None:
    """`Trainer._save_optimizer_and_scheduler`: names of parameters and whole momentum, without FSDP too.

    Of a model that transformers sharded while it loaded it every rank writes its part. Collective.
    """
    optimizer = muon_of(trainer.optimizer)
    if optimizer is None or trainer.is_fsdp_enabled:
        original(trainer, output_dir)
        return
    if is_loaded_in_shards(trainer.model):
        save_optimizer(trainer.model, optimizer, Path(output_dir))
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)
        return
    with saved_whole(trainer.model, optimizer):
        original(trainer, output_dir)


def _advance(scheduler: Any, steps: int) -> None:
    """Bring a new schedule to where it would be after `steps`; one that follows a metric has nothing to follow yet."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return
    with warnings.catch_warnings():
        # That the optimizer has made no step yet, and that the schedule counts its own.
        warnings.simplefilter("ignore")
        for _ in range(steps):
            scheduler.step()


def prepare_for_training(
    original: Callable[..., Any], trainer: Any, max_steps: int, loader: Any, checkpoint: Any
) -> Any:
    """`Trainer._prepare_for_training`: say what is trained how.

    No run is resumed with momentum of zero, whatever a subclass did. Collective.
    """
    result = original(trainer, max_steps, loader, checkpoint)
    optimizer = muon_of(trainer.optimizer)
    if optimizer is not None:
        announce(trainer.model, optimizer, silent=trainer.args.log_level in ("error", "critical"))
    if checkpoint is None or optimizer is None or trainer.state.global_step == 0:
        return result
    if optimizer_state_is_fresh(optimizer):
        raise ConfigurationError(
            f"the run was resumed from {checkpoint}, but the optimizer's state was not loaded, so momentum would start "
            f"from zero: {type(trainer).__name__}._load_optimizer_and_scheduler has to load it, or to leave that to "
            "the Trainer"
        )
    return result


def last_complete_checkpoint(directory: Path) -> Path:
    """The newest `checkpoint-<step>` in `directory` whose trainer state, which is written last, is whole.

    Raises:
        ConfigurationError: there is none.
    """
    steps = {path: path.name.removeprefix("checkpoint-") for path in directory.glob("checkpoint-*") if path.is_dir()}
    found = sorted((path for path, step in steps.items() if step.isdigit()), key=lambda path: int(steps[path]))
    for path in reversed(found):
        if _is_json(path / _STATE):
            return path
        logger.warning("%s is incomplete, most likely because the run ended while it was saved; passing it by", path)
    raise ConfigurationError(f"there is no complete checkpoint to resume from in {directory}")


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
