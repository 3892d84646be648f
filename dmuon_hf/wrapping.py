"""What accelerate wraps where the user named no classes: the blocks that were found, not what the model lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dmuon_hf.survey import survey

__all__ = ["blocks_wrapped"]


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
