"""What the modules of a model hold, in a form that is compared in microseconds."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon_hf.core.plan import canonical_name

__all__ = ["Fingerprint", "Place", "places_of"]

_requires_grad = attrgetter("requires_grad")
_dtype = attrgetter("dtype")
_local = attrgetter("_local_tensor")


class Place(NamedTuple):
    """One attribute of one module, by which the model holds a parameter."""

    module: nn.Module
    attribute: str
    name: str
    param: nn.Parameter


def places_of(model: nn.Module) -> dict[int, list[Place]]:
    """All places of every parameter, by its ``id``, in the order of the model; names are canonical."""
    places: dict[int, list[Place]] = {}
    for path, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                name = canonical_name(f"{path}.{attribute}" if path else attribute, model)
                places.setdefault(id(param), []).append(Place(module, attribute, name, param))
    return places


class Fingerprint:
    """Every module and parameter of a model, and of each parameter its dtype, local storage and whether it trains.

    [Note: cost of the fingerprint]
    :meth:`is_current` runs in each step. It compares objects by identity in loops of the interpreter's C code: about
    0.2 us for a module with a parameter. Whatever differs is looked into by name, with a walk that costs much more.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables: list[dict[str, Any]] = []
        for module in model.modules():
            self._tables += (module._modules, module._parameters)
        self._content = self._held()
        held = {id(item): item for item in self._content if isinstance(item, Tensor)}
        self.params: list[Tensor] = list(held.values())
        """Every parameter once."""
        self._distributed = [param for param in self.params if isinstance(param, DTensor)]
        self._trainable, self._dtypes = self._flags(), self._types()
        self._locals: list[Tensor] = list(map(_local, self._distributed))

    def is_current(self) -> bool:
        """Whether nothing has changed since this was taken."""
        return (
            sum(map(len, self._tables)) == len(self._content)
            and all(map(is_, chain.from_iterable(map(_values, self._tables)), self._content))
            and self._flags() == self._trainable
            and self._types() == self._dtypes
            and all(map(is_, map(_local, self._distributed), self._locals))
        )

    def _held(self) -> list[Any]:
        return list(chain.from_iterable(map(_values, self._tables)))

    def _flags(self) -> list[bool]:
        return list(map(_requires_grad, self.params))

    def _types(self) -> list[torch.dtype]:
        return list(map(_dtype, self.params))


def _values(table: dict[str, Any]) -> Any:
    return table.values()
