"""What the hooks on `PreTrainedModel` do: no rank writes its part of a distributed model as if it were the whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dmuon_hf.boundaries import own_class
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.runtime import runtime_of
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor

__all__ = ["push_to_hub", "save_pretrained"]


def save_pretrained(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.save_pretrained`: refuse values that are spread over ranks.

    It is often called on one rank alone, so gathering them here could hang.
    """
    state = inspect.signature(original).bind(model, *args, **kwargs).arguments.get("state_dict")
    if _holds_owned(model.parameters() if state is None else state.values()):
        raise ConfigurationError(
            "save_pretrained() got no whole weights: each rank has only part of them. Call trainer.save_model("
            "directory), accelerator.save_model(model, directory), or save_pretrained(directory, state_dict="
            "accelerator.get_state_dict(model), is_main_process=accelerator.is_main_process), on every rank"
        )
    if runtime_of(model) is None:
        return original(model, *args, **kwargs)
    with _own_class_names(model):
        return original(model, *args, **kwargs)


@contextmanager
def _own_class_names(model: nn.Module) -> Iterator[None]:
    """Let the classes that FSDP2 made for the modules of a model pass for those it was written with.

    By name and origin of a class transformers finds how the keys of a model that was not loaded are called in files.
    """
    made = {kind: own for module in model.modules() if (kind := type(module)) is not (own := own_class(module))}
    names = {kind: (kind.__name__, kind.__module__) for kind in made}
    for kind, own in made.items():
        kind.__name__, kind.__module__ = own.__name__, own.__module__
    try:
        yield
    finally:
        for kind, (name, origin) in names.items():
            kind.__name__, kind.__module__ = name, origin


def push_to_hub(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.push_to_hub`: refuse a distributed model before a repository is made for it."""
    if _holds_owned(model.parameters()):
        raise ConfigurationError(
            "model.push_to_hub() has no whole weights to push: each rank has only part of them. Call "
            "trainer.push_to_hub() on every rank, or save the model first and push what from_pretrained opens"
        )
    return original(model, *args, **kwargs)


def _holds_owned(values: Iterable[Any]) -> bool:
    return any(isinstance(value.data, OwnedTensor) for value in values if isinstance(value, Tensor))
