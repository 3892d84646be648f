"""One survey of a model: its blocks, the role of each parameter, and what is tied, found once for everyone who asks.

Routes, checks, dedication, wrapping and `describe` read the same survey, so none can take another module for a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from weakref import WeakKeyDictionary

from torch import nn

from dmuon_hf.boundaries import HookBoundaries, embeddings
from dmuon_hf.core.plan import canonical_name
from dmuon_hf.roles import Role, role_of

__all__ = ["Survey", "survey"]

# Block classes that were named for a model, so that whoever asks later sees the same blocks.
_named: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Survey:
    """Facts about one model that do not change while it is trained. All names are canonical.

    Attributes:
        model: what was surveyed.
        modules: every module, shared ones under each of their names.
        boundaries: which block a parameter is in; a `hook_boundary_resolver` of `dedicate_params`.
        block_classes: class names of the blocks, which FSDP2 has to wrap.
        roles: role of every parameter, in the order of `named_parameters()`; a tied one under its first name.
        ties: names of each parameter that has several, the first name first.
    """

    model: nn.Module = field(repr=False)
    modules: Mapping[str, nn.Module] = field(repr=False)
    boundaries: HookBoundaries
    block_classes: tuple[str, ...]
    roles: Mapping[str, Role] = field(repr=False)
    ties: tuple[tuple[str, ...], ...]

    def module_of(self, parameter_name: str) -> nn.Module:
        """The module that holds a parameter."""
        return self.modules[parameter_name.rpartition(".")[0]]


def survey(model: nn.Module, block_classes: Iterable[str] | None = None) -> Survey:
    """Survey `model`. Local; works on meta, before and after the model is prepared.

    Args:
        block_classes: names of the classes that FSDP2 wraps (`transformer_cls_names_to_wrap`), which then are the
            blocks, also in later surveys of this model that name none; None finds the blocks from the model.

    Raises:
        ConfigurationError: none of the named classes occurs in the model.
    """
    modules = {canonical_name(name, model): module for name, module in model.named_modules(remove_duplicate=False)}
    named = _named.get(model) if block_classes is None else tuple(block_classes)
    boundaries = HookBoundaries(model, named)
    if named is not None:
        _named[model] = named
    holders: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(parameter, []).append(canonical_name(name, model))
    heads = embeddings(model)
    roles = {names[0]: role_of(names, parameter, modules, boundaries, heads) for parameter, names in holders.items()}
    return Survey(
        model=model,
        modules=MappingProxyType(modules),
        boundaries=boundaries,
        block_classes=boundaries.class_names,
        roles=MappingProxyType(roles),
        ties=tuple(tuple(names) for names in holders.values() if len(names) > 1),
    )
