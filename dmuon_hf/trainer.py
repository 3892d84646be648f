"""What the hooks on `transformers.Trainer` do: build what `dmuon_hf.create()` describes, save whole models."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

import dmuon_hf.core as dmuon
from dmuon_hf import checks
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.everywhere import everywhere
from dmuon_hf.factory import DMuonOptimizers, create, create_optimizer, is_description
from dmuon_hf.loaded_shards import resumable
from dmuon_hf.prepare import muon_of

__all__ = [
    "TrainerOptimizerFactory",
    "create_scheduler",
    "description_of",
    "factory_of",
    "save_model",
    "trainer_init",
    "trains_with_muon",
]


class TrainerOptimizerFactory:
    """The Trainer's optimizer factory: called without arguments, then with the model.

    It is built before the Trainer has its arguments, and asks the Trainer for them when it runs.

    Args:
        model: what the Trainer is made with; None where it makes its models itself.
    """

    def __init__(self, trainer: Any, description: DMuonOptimizers, model: nn.Module | None) -> None:
        self._trainer = weakref.ref(trainer)
        self.description = description
        self._dtypes = {} if model is None else {name: p.dtype for name, p in model.named_parameters()}

    def cast(self, model: nn.Module) -> list[str]:
        """Parameters whose dtype is another one than when the Trainer was made."""
        return [name for name, p in model.named_parameters() if p.dtype != self._dtypes.get(name, p.dtype)]

    def __call__(self) -> Callable[[nn.Module], dmuon.Muon]:
        return self._build

    def _build(self, model: nn.Module) -> dmuon.Muon:
        trainer = self._trainer()
        if trainer is None:
            raise ConfigurationError("the Trainer that this optimizer belongs to no longer exists")
        checks.check_training_arguments(trainer.args)
        checks.check_same_batches(trainer)
        options = self.description.options
        return create_optimizer(
            model,
            trainer.args,
            decay_names=trainer.get_decay_parameter_names(model),
            **{name: getattr(options, name) for name in options.__dataclass_fields__},
        )


def trainer_init(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """`Trainer.__init__`: pass the result of `create()` on as the Trainer's optimizer factory."""
    # By position or by name; other arguments pass through as they are, also ones that decorators rename.
    names = list(inspect.signature(original).parameters)[1:]
    position = names.index("optimizers")
    named = dict(zip(names, args, strict=False)) | kwargs
    given = named.get("optimizers")
    if not isinstance(given, DMuonOptimizers):
        _check_no_description(given, args, kwargs)
        # What `dmuon_hf.run` gives to Trainers that come without an optimizer.
        offer = everywhere()
        description = None if offer is None else offer.offered_to(trainer, named)
    else:
        description = given
    if description is not None:
        if named.get("optimizer_cls_and_kwargs") is not None:
            raise ConfigurationError("pass either optimizers=dmuon_hf.create() or optimizer_cls_and_kwargs, not both")
        args = args[:position]
        kwargs.pop("optimizers", None)
        kwargs["optimizer_cls_and_kwargs"] = (TrainerOptimizerFactory(trainer, description, named.get("model")), {})
    elif muon_of(given[0] if given else None) is None:
        original(trainer, *args, **kwargs)
        return
    with resumable(named.get("model"), named.get("args")):
        original(trainer, *args, **kwargs)


def _check_no_description(given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if given is create:
        raise ConfigurationError("optimizers= got the function dmuon_hf.create: call it, optimizers=dmuon_hf.create()")
    if is_description(given):
        raise ConfigurationError(
            "optimizers= got what dmuon_hf.create() returned inside of something else. Pass it as it is, "
            "optimizers=dmuon_hf.create(...), neither unpacked nor in a tuple or list with a scheduler; a schedule of "
            "your own goes to dmuon_hf.create(scheduler=...)"
        )
    if any(map(is_description, (*args, *kwargs.values()))):
        raise ConfigurationError("pass what dmuon_hf.create() returns as the Trainer's optimizers=, and nowhere else")


def create_scheduler(original: Callable[..., Any], trainer: Any, num_training_steps: int, optimizer: Any = None) -> Any:
    """`Trainer.create_scheduler`: use the scheduler given to `create()`, if there is one."""
    description = description_of(trainer)
    scheduler = None if description is None else description.scheduler
    if scheduler is None or trainer.lr_scheduler is not None:
        return original(trainer, num_training_steps, optimizer)
    trainer.lr_scheduler = scheduler(trainer.optimizer if optimizer is None else optimizer, num_training_steps)
    trainer._created_lr_scheduler = True
    return trainer.lr_scheduler


def save_model(
    original: Callable[..., Any], trainer: Any, output_dir: str | None = None, _internal_call: bool = False
) -> Any:
    """`Trainer.save_model`: write a model that `from_pretrained` opens under `SHARDED_STATE_DICT` too.

    The Trainer alone writes nothing then, without a word. Its own saves of checkpoints stay sharded. Collective.
    """
    if trains_with_muon(trainer) and not _internal_call and _saves_shards(trainer):
        directory = trainer.args.output_dir if output_dir is None else output_dir
        trainer._save(directory, state_dict=trainer.accelerator.get_state_dict(trainer.model))
    return original(trainer, output_dir, _internal_call)


def _saves_shards(trainer: Any) -> bool:
    if not trainer.is_fsdp_enabled:
        return False
    return "FULL_STATE_DICT" not in str(trainer.accelerator.state.fsdp_plugin.state_dict_type)


def factory_of(trainer: Any) -> TrainerOptimizerFactory | None:
    """What builds the optimizer of a Trainer that got `create()`; None for another."""
    factory = (trainer.optimizer_cls_and_kwargs or (None,))[0]
    return factory if isinstance(factory, TrainerOptimizerFactory) else None


def description_of(trainer: Any) -> DMuonOptimizers | None:
    """What `create()` returned for this Trainer; None for a Trainer without DMuon."""
    factory = factory_of(trainer)
    return None if factory is None else factory.description


def trains_with_muon(trainer: Any) -> bool:
    """Whether the Trainer has a DMuon optimizer, or will build one."""
    return description_of(trainer) is not None or muon_of(trainer.optimizer) is not None
