"""Which module's forward and backward carry a dedicated parameter's communication."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["HookBoundaryResolver", "ancestors", "boundary_of", "is_called", "layer_path"]

HookBoundaryResolver = Callable[[str, nn.Parameter], nn.Module]

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.\d+(?=\.|$)")


def layer_path(name: str) -> str | None:
    """Path of the outermost ``layers.N`` or ``blocks.N`` module in a parameter's name, ``None`` where there is none."""
    match = _LAYER.search(name)
    return name[: match.end()] if match else None


def boundary_of(
    model: nn.Module,
    name: str,
    param: nn.Parameter,
    *,
    predicate: Callable[[nn.Module], bool] | None = None,
    strict: bool = True,
    resolver: HookBoundaryResolver | None = None,
) -> nn.Module:
    """The module to hook for one parameter.

    In order of precedence: ``resolver(name, param)``; the lowest ancestor for which ``predicate`` holds; the enclosing
    ``layers.N`` or ``blocks.N`` unless that is a mere container; the module that holds the parameter.

    Args:
        model: Root module that ``name`` is relative to.
        name: Dotted name of the parameter in ``model`` as ``named_parameters()`` gives it.
        predicate, strict, resolver: As in :func:`dmuon_hf.core.dedicate_params`.

    Raises:
        ConfigurationError: The resolver returned something that is not a module of the model, or no ancestor matches
            the predicate and ``strict`` is set.
    """
    if resolver is not None:
        module = resolver(name, param)
        if not isinstance(module, nn.Module) or not any(module is candidate for candidate in model.modules()):
            raise ConfigurationError(
                f"hook_boundary_resolver must return a module of the model, got {type(module).__name__} for {name}"
            )
        return module
    parent = name.rpartition(".")[0]
    if predicate is not None:
        for path in (*ancestors(name), ""):
            module = model.get_submodule(path)
            if predicate(module):
                return module
        if strict:
            raise ConfigurationError(
                f"no ancestor of {name} matches hook_boundary_predicate: widen it, narrow the parameter predicate, or "
                "pass hook_boundary_strict=False to hook the parameter's own module"
            )
        return model.get_submodule(parent)
    layer = layer_path(name)
    if layer is not None and layer != name and is_called(module := model.get_submodule(layer)):
        return module
    return model.get_submodule(parent)


def is_called(module: nn.Module) -> bool:
    """False for a container (``ModuleDict``, ``ModuleList``): it is never called, so hooks on it never run."""
    return type(module).forward is not nn.Module.forward


def ancestors(name: str) -> list[str]:
    """Paths of the modules around a parameter, innermost first: ``a.b.weight`` -> ``["a.b", "a"]``."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
