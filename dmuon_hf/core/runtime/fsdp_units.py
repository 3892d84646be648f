"""Which units an FSDP module stands for: those of the owned weights that FSDP2 would otherwise manage in its group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from dmuon_hf.core.runtime.unit import Unit

__all__ = ["group_units", "note_unit"]

_UNITS = "_dmuon_units"


def note_unit(unit: Unit) -> None:
    """Let :func:`group_units` find the unit from the modules that hold its weights."""
    for param in unit.params:
        for module, _ in param.places:
            units: list[Unit] = module.__dict__.setdefault(_UNITS, [])
            if unit not in units:
                units.append(unit)


def group_units(modules: Iterable[nn.Module]) -> list[Unit]:
    """Units with a weight at or below one of ``modules``, but not in an FSDP module further down; in plan order.

    The hook boundary need not be an FSDP module: a unit may lie below one (the root alone is wrapped), or above several
    (a block is a unit, its halves are wrapped), and then belongs to each of them.
    """
    found = {unit.index: unit for module in modules for part in _own_modules(module) for unit in _noted(part)}
    return [found[index] for index in sorted(found)]


def _noted(module: nn.Module) -> list[Unit]:
    units: list[Unit] = module.__dict__.get(_UNITS, [])
    return units


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)
