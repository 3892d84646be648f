"""What a model consists of, for one who plans: matrices for Muon, everything else, and what each of them weighs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from dmuon_hf.core.plan import Candidate, MatrixSpec
from dmuon_hf.presets import Route, routes
from dmuon_hf.survey import Survey, survey

__all__ = ["Census", "RouteShare", "take_census"]


@dataclass(frozen=True, slots=True)
class RouteShare:
    """Parameters and elements that one optimizer updates."""

    route: str
    parameters: int
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Sizes of a model.

    Attributes:
        model_class: its class.
        shares: parameters and elements by route.
        candidates: the Muon matrices; each member of a stack of experts by itself.
        unit_names: hook boundaries in the order of the model.
        largest_unit: elements of the largest one, matrices alone.
        split_by_tp: elements of Muon matrices, and of the rest, that the model's tensor-parallel plan cuts.
        idle_elements: elements of experts that a token does not visit.
        layers, hidden: of the text model, None where its configuration does not say.
        has_tp_plan: whether transformers has a tensor-parallel plan for it.
    """

    model_class: str
    shares: tuple[RouteShare, ...]
    candidates: tuple[Candidate, ...]
    unit_names: tuple[str, ...]
    largest_unit: int
    split_by_tp: tuple[int, int]
    idle_elements: int
    layers: int | None
    hidden: int | None
    has_tp_plan: bool

    @property
    def matrix_numel(self) -> int:
        """P: elements of the matrices for Muon."""
        return sum(math.prod(candidate.shape) for candidate in self.candidates)

    @property
    def rest_numel(self) -> int:
        """Q: elements of all other trainable parameters."""
        return sum(share.elements for share in self.shares if share.route == "adamw")

    @property
    def units(self) -> int:
        """Number of hook boundaries."""
        return len(self.unit_names)

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward without recomputation: 6 for each element that a token meets, and causal attention."""
        attention = 6.0 * self.layers * self.hidden * sequence if self.layers and self.hidden else 0.0
        return 6.0 * (self.matrix_numel + self.rest_numel - self.idle_elements) + attention


def take_census(model: nn.Module, overrides: Mapping[str, str] | None = None) -> Census:
    """Count a model. Local; works on meta.

    Args:
        model: the model.
        overrides: as `routes=` of `dmuon_hf.create`.
    """
    found = survey(model)
    table = routes(model, overrides=overrides, found=found)
    parameters = dict(model.named_parameters())
    text = _text_config(model)
    tp_plan = _tp_plan(model)
    candidates: list[Candidate] = []
    shares: dict[str, list[int]] = {}
    units: dict[str, int] = {}
    split = [0, 0]
    for name, route in table.items():
        parameter = parameters[name]
        shares.setdefault(route.route, []).append(parameter.numel())
        if _is_split(name, tp_plan):
            split[route.route != "muon"] += parameter.numel()
        if route.route == "muon":
            members = _candidates(name, parameter, route, found)
            candidates += members
            units[members[0].unit] = units.get(members[0].unit, 0) + parameter.numel()
    return Census(
        model_class=type(model).__name__,
        shares=tuple(RouteShare(name, len(sizes), sum(sizes)) for name, sizes in shares.items()),
        candidates=tuple(candidates),
        unit_names=tuple(units),
        largest_unit=max(units.values(), default=0),
        split_by_tp=(split[0], split[1]),
        idle_elements=_idle(found, parameters, text),
        layers=getattr(text, "num_hidden_layers", None),
        hidden=getattr(text, "hidden_size", None),
        has_tp_plan=bool(tp_plan),
    )


def _candidates(name: str, parameter: nn.Parameter, route: Route, found: Survey) -> list[Candidate]:
    unit = found.boundaries.block_name(name) or name.rpartition(".")[0]
    spec = route.spec or MatrixSpec()
    shape = tuple(parameter.shape)
    if len(shape) == 2 or spec.folded:
        return [Candidate(name=name, shape=shape, dtype=parameter.dtype, unit=unit, spec=spec)]
    return [
        Candidate(name=f"{name}.{i}", shape=shape[1:], dtype=parameter.dtype, unit=unit, spec=spec)
        for i in range(shape[0])
    ]


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return None if config is None else config.get_text_config()


def _tp_plan(model: nn.Module) -> tuple[str, ...]:
    """Patterns of what is cut; the plan also names what stays whole on every rank."""
    plan = getattr(model, "_tp_plan", None) or {}
    return tuple(pattern for pattern, style in plan.items() if not str(style).startswith("replicated"))


def _is_split(name: str, tp_plan: tuple[str, ...]) -> bool:
    module = name.rpartition(".")[0]
    return any(fnmatchcase(candidate, pattern) for pattern in tp_plan for candidate in (module, name))


def _idle(found: Survey, parameters: Mapping[str, nn.Parameter], text: Any) -> int:
    """Elements of stacks of experts that one token does not pass through."""
    visited = getattr(text, "num_experts_per_tok", None)
    if not isinstance(visited, int):
        return 0
    stacks = [parameters[name] for name, role in found.roles.items() if role.kind == "expert stack"]
    return sum(stack.numel() // stack.shape[0] * max(0, stack.shape[0] - visited) for stack in stacks)
