"""Which module's forward and backward carry a dedicated parameter's communication, as torch sees a model.

Module tree, names and the arguments of ``dedicate_params`` decide. What the blocks of a transformers model are,
whatever their names, is found in :mod:`dmuon_hf.boundaries`, whose result is a resolver for :class:`BoundaryRule`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["BoundaryRule", "HookBoundaryResolver", "ancestors", "is_called"]

HookBoundaryResolver = Callable[[str, nn.Parameter], nn.Module]

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class BoundaryRule:
    """How the module to hook for a parameter is found.

    In order of precedence: ``resolver(name, param)``; the lowest ancestor for which ``predicate`` holds; the enclosing
    ``layers.N`` or ``blocks.N`` unless that is a mere container; the module that holds the parameter.

    Args:
        predicate, strict, resolver: ``hook_boundary_predicate`` and so on of :func:`dmuon_hf.core.dedicate_params`.
    """

    predicate: Callable[[nn.Module], bool] | None = None
    strict: bool = True
    resolver: HookBoundaryResolver | None = None

    def module_of(self, model: nn.Module, name: str, param: nn.Parameter) -> nn.Module:
        """The module for the parameter that ``model.named_parameters()`` calls ``name``.

        Raises:
            ConfigurationError: The resolver returned something that is not a module of the model, or no ancestor
                matches the predicate and ``strict`` is set.
        """
        if self.resolver is not None:
            return self._resolved(model, name, param)
        holder = model.get_submodule(name.rpartition(".")[0])
        if self.predicate is not None:
            for path in (*ancestors(name), ""):
                module = model.get_submodule(path)
                if self.predicate(module):
                    return module
            if self.strict:
                raise ConfigurationError(
                    f"no ancestor of {name} matches hook_boundary_predicate: widen it, narrow the parameter predicate, "
                    "or pass hook_boundary_strict=False to hook the parameter's own module"
                )
            return holder
        layer = _layer_path(name)
        if layer is not None and layer != name and is_called(module := model.get_submodule(layer)):
            return module
        return holder

    def _resolved(self, model: nn.Module, name: str, param: nn.Parameter) -> nn.Module:
        assert self.resolver is not None
        module = self.resolver(name, param)
        if not isinstance(module, nn.Module) or not any(module is candidate for candidate in model.modules()):
            raise ConfigurationError(
                f"hook_boundary_resolver must return a module of the model, got {type(module).__name__} for {name}"
            )
        return module


def _layer_path(name: str) -> str | None:
    """Path of the outermost ``layers.N`` or ``blocks.N`` module in a parameter's name, ``None`` where there is none."""
    match = _LAYER.search(name)
    return name[: match.end()] if match else None


def is_called(module: nn.Module) -> bool:
    """False for a container (``ModuleDict``, ``ModuleList``): it is never called, so hooks on it never run."""
    return type(module).forward is not nn.Module.forward


def ancestors(name: str) -> list[str]:
    """Paths of the modules around a parameter, innermost first: ``a.b.weight`` -> ``["a.b", "a"]``."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
