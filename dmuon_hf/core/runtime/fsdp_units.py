"""Which units an FSDP module stands for: those of the owned weights that FSDP2 would otherwise manage in its group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from dmuon_hf.core.lockstep import LockstepMonitor
    from dmuon_hf.core.runtime.hooks import UnitHooks
    from dmuon_hf.core.runtime.runtime import Runtime
    from dmuon_hf.core.runtime.unit import Unit

__all__ = [
    "group_hooks",
    "group_units",
    "hooks_below",
    "in_dedicated_model",
    "monitor_of_part",
    "note_root",
    "note_unit",
    "runtimes_below",
]

_HOOKS = "_dmuon_unit_hooks"
_ROOT = "_dmuon_root_runtime"
_PART = "_dmuon_part"


def note_unit(hooks: UnitHooks) -> None:
    """Let :func:`group_units` find the unit from the modules that hold its weights."""
    for param in hooks.unit.params:
        for module, _ in param.places:
            noted: list[UnitHooks] = module.__dict__.setdefault(_HOOKS, [])
            if hooks not in noted:
                noted.append(hooks)


def note_root(root: nn.Module, runtime: Runtime) -> None:
    """Let :func:`runtimes_below` find the runtime from the module that was dedicated."""
    root.__dict__[_ROOT] = runtime
    for part in root.modules():
        part.__dict__[_PART] = runtime.context.monitor


def monitor_of_part(module: nn.Module) -> LockstepMonitor | None:
    """The monitor of the model with owned weights that ``module`` was a part of when it was dedicated."""
    monitor: LockstepMonitor | None = module.__dict__.get(_PART)
    return monitor


def in_dedicated_model(asker: Any, modules: Iterable[nn.Module]) -> bool:
    """Whether ``modules`` belong to a model with owned weights, or hold one; the answer is kept on ``asker``."""
    known = asker.__dict__.get(_PART)
    if known is None:
        known = any(_PART in part.__dict__ for module in modules for part in module.modules())
        asker.__dict__[_PART] = known
    return bool(known)


def runtimes_below(module: Any) -> list[Runtime]:
    """The runtimes that have units and whose root is ``module`` or below it."""
    roots = (part.__dict__.get(_ROOT) for part in module.modules())
    return [runtime for runtime in roots if runtime is not None]


def group_units(modules: Iterable[nn.Module]) -> list[Unit]:
    """Units with a weight at or below one of ``modules``, but not in an FSDP module further down; in plan order.

    The hook boundary need not be an FSDP module: a unit may lie below one (the root alone is wrapped), or above several
    (a block is a unit, its halves are wrapped), and then belongs to each of them.
    """
    return [hooks.unit for hooks in group_hooks(modules)]


def group_hooks(modules: Iterable[nn.Module]) -> list[UnitHooks]:
    """The hooks of :func:`group_units`."""
    found = {hooks.unit.index: hooks for module in modules for part in _own(module) for hooks in _noted(part)}
    return [found[index] for index in sorted(found)]


def hooks_below(module: nn.Module) -> list[UnitHooks]:
    """The hooks of all units with a weight at or below ``module``."""
    found = {id(hooks): hooks for part in module.modules() for hooks in _noted(part)}
    return list(found.values())


def _noted(module: nn.Module) -> list[UnitHooks]:
    hooks: list[UnitHooks] = module.__dict__.get(_HOOKS, [])
    return hooks


def _own(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own(child)
