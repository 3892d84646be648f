"""What accelerate wraps where the user named no classes: the blocks that were found, not what the model lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dmuon_hf.survey import survey

__all__ = ["blocks_wrapped", "embeddings_answered"]


@contextmanager
def blocks_wrapped(plugin: Any, model: nn.Module) -> Iterator[None]:
    """Let an FSDP plugin wrap the blocks of `model` while accelerate prepares it, unless its user named classes.

    accelerate would take the model's `_no_split_modules`, refuse a model that lists a class it does not contain, and
    keep the list for the next model: here each model is wrapped by its own.
    """
    if plugin.transformer_cls_names_to_wrap is not None:
        yield
        return
    plugin.transformer_cls_names_to_wrap = list(survey(model).block_classes)
    try:
        yield
    finally:
        plugin.transformer_cls_names_to_wrap = None


@contextmanager
def embeddings_answered(model: nn.Module) -> Iterator[None]:
    """Let a model that does not know its embeddings say that it has none, where accelerate asks without a guard."""
    answered = [name for name in ("get_input_embeddings", "get_output_embeddings") if not _answers(model, name)]
    for getter in answered:
        model.__dict__[getter] = lambda: None
    try:
        yield
    finally:
        for getter in answered:
            del model.__dict__[getter]


def _answers(model: nn.Module, getter: str) -> bool:
    try:
        getattr(model, getter, lambda: None)()
    except (AttributeError, NotImplementedError):
        return False
    return True
