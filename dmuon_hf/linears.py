"""Which modules project: linear layers by what they hold and do, whatever their class derives from."""

from __future__ import annotations

from torch import nn

__all__ = ["holds_projection", "is_conv1d", "is_linear"]


def is_conv1d(module: nn.Module) -> bool:
    """The `(in, out)` linear layer of GPT-2, by name so that this module needs no import of transformers."""
    return any(base.__name__ == "Conv1D" for base in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies its input by a matrix `weight`: `nn.Linear`, `Conv1D`, or a class of the kind.

    Linear layers of other classes (quantisation-aware ones, low-rank, with a norm inside) say their sizes as
    `nn.Linear` does.
    """
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return True
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        return False
    sizes = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    return tuple(weight.shape) == sizes or "Linear" in type(module).__name__


def holds_projection(module: nn.Module) -> bool:
    """Whether a projection is somewhere in a module, as a layer or as a matrix of its own."""
    return any(
        is_linear(part) or isinstance(part, nn.MultiheadAttention) or _is_bare(part) for part in module.modules()
    )


def _is_bare(module: nn.Module) -> bool:
    """A module that multiplies by matrices of its own, as experts and some attention do."""
    return not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and any(
        parameter is not None and parameter.ndim == 3 and leaf != "weight"
        for leaf, parameter in module._parameters.items()
    )
