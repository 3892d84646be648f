"""What the hooks on `transformers.Trainer` do: build the optimizer that `dmuon_hf.create()` describes."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

import dmuon_hf.core as dmuon
from dmuon_hf import checks
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.factory import DMuonOptimizers, create_optimizer

__all__ = ["TrainerOptimizerFactory", "create_scheduler", "trainer_init"]


class TrainerOptimizerFactory:
    """The Trainer's optimizer factory: called without arguments, then with the model.

    It is built before the Trainer has its arguments, and asks the Trainer for them when it runs.
    """

    def __init__(self, trainer: Any, description: DMuonOptimizers) -> None:
        self._trainer = weakref.ref(trainer)
        self.description = description

    def __call__(self) -> Callable[[nn.Module], dmuon.Muon]:
        return self._build

    def _build(self, model: nn.Module) -> dmuon.Muon:
        trainer = self._trainer()
        if trainer is None:
            raise ConfigurationError("the Trainer that this optimizer belongs to no longer exists")
        checks.check_training_arguments(trainer.args)
        options = self.description.options
        return create_optimizer(
            model,
            trainer.args,
            decay_names=trainer.get_decay_parameter_names(model),
            **{name: getattr(options, name) for name in options.__dataclass_fields__},
        )


def trainer_init(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """`Trainer.__init__`: pass the result of `create()` on as the Trainer's optimizer factory."""
    bound = inspect.signature(original).bind(trainer, *args, **kwargs)
    description = bound.arguments.get("optimizers")
    if not isinstance(description, DMuonOptimizers):
        original(trainer, *args, **kwargs)
        return
    if bound.arguments.get("optimizer_cls_and_kwargs") is not None:
        raise ConfigurationError("pass either optimizers=dmuon_hf.create(...) or optimizer_cls_and_kwargs, not both")
    bound.arguments["optimizers"] = (None, None)
    bound.arguments["optimizer_cls_and_kwargs"] = (TrainerOptimizerFactory(trainer, description), {})
    original(*bound.args, **bound.kwargs)


def create_scheduler(original: Callable[..., Any], trainer: Any, num_training_steps: int, optimizer: Any = None) -> Any:
    """`Trainer.create_scheduler`: use the scheduler given to `create()`, if there is one."""
    factory = (trainer.optimizer_cls_and_kwargs or (None,))[0]
    scheduler = factory.description.scheduler if isinstance(factory, TrainerOptimizerFactory) else None
    if scheduler is None or trainer.lr_scheduler is not None:
        return original(trainer, num_training_steps, optimizer)
    trainer.lr_scheduler = scheduler(trainer.optimizer if optimizer is None else optimizer, num_training_steps)
    trainer._created_lr_scheduler = True
    return trainer.lr_scheduler
