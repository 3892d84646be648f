"""The dedicated parameters as the optimizer walks through them: by unit, in plan order, each unit with its publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dmuon_hf.core.runtime.dedicated import DedicatedParam

__all__ = ["OwnedUnit", "owned_units"]


@dataclass(frozen=True, slots=True)
class OwnedUnit:
    """Matrices of one hook boundary; ``publish`` does nothing where nobody else keeps a copy of them."""

    name: str
    matrices: tuple[DedicatedParam, ...]
    publish: Callable[[], None]


def owned_units(
    params: Sequence[DedicatedParam], order: Sequence[str], publishes: Mapping[str, Callable[[], None]]
) -> list[OwnedUnit]:
    """Group ``params`` by unit, the units in ``order``; a unit without a publish has nothing to publish to."""
    members: dict[str, list[DedicatedParam]] = {name: [] for name in order}
    for param in params:
        members[param.unit].append(param)
    return [OwnedUnit(name, tuple(found), publishes.get(name, _nothing)) for name, found in members.items()]


def _nothing() -> None:
    pass
