"""What the hooks on `PreTrainedModel` do: no rank writes its part of a distributed model as if it were the whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from dmuon_hf.core.errors import ConfigurationError
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
    return original(model, *args, **kwargs)


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
