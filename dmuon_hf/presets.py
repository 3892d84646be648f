"""Which optimizer updates which parameter, and as which logical matrices.

The route follows from the role of a parameter (`roles.py`), the layout of a fused weight from its family
(`families.py`) or from the caller, never from the number of dimensions or from a name alone. Muon takes the weights of
linear layers inside transformer blocks and the stacks of experts (`stacks.py`), each expert by itself. AdamW takes
embeddings, output heads, whatever lies outside the blocks, routers, norms, biases and vectors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, cast
from weakref import WeakSet

import torch.distributed as dist
from torch import nn

from dmuon_hf.adapters import LoraPolicy, check_lora, lora_factors
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import MatrixSpec, canonical_name, stored_matrices
from dmuon_hf.families import is_known, layout_of
from dmuon_hf.fused import is_split_by
from dmuon_hf.layouts import Projection, each_head, named_layout, projection_of
from dmuon_hf.roles import EXPERTS, Role
from dmuon_hf.stacks import known_stacks
from dmuon_hf.survey import Survey, survey

__all__ = ["Route", "RouteName", "muon_specs", "routes"]

logger = logging.getLogger(__name__)

RouteName = Literal["muon", "adamw", "frozen"]
Predicate = Callable[[str, nn.Parameter], bool]

# Models whose peculiarities were logged already.
_reported: WeakSet[nn.Module] = WeakSet()

_UNKNOWN_LAYOUT = "linear weight in a block, its output is split in a way not known here: one matrix"


@dataclass(frozen=True, slots=True)
class Route:
    """How one parameter is updated.

    `route` is `"muon"`, `"adamw"` or `"frozen"`; `spec` says which logical `(out, in)` matrices a Muon weight holds
    (None on the other routes); `reason` is one clause for people.
    """

    route: RouteName
    spec: MatrixSpec | None
    reason: str


def routes(
    model: nn.Module,
    *,
    predicate: Predicate | None = None,
    overrides: Mapping[str, str] | None = None,
    layouts: Mapping[str, MatrixSpec | str] | None = None,
    per_head: bool = False,
    lora: LoraPolicy = "adamw",
    found: Survey | None = None,
) -> dict[str, Route]:
    """Route of every parameter of `model`, by canonical name, in the order of `named_parameters()`.

    Local and free of side effects; works before and after the model is prepared. A tied weight appears once, under its
    first name.

    Args:
        model: any module; layouts of fused weights are known for the families of `transformers`.
        predicate: `(name, parameter) -> bool` that replaces the built-in choice of Muon weights. Their matrix layout
            still comes from the family.
        overrides: `{name or shell pattern: "muon" | "adamw"}`, applied last; the last matching entry wins.
        layouts: `{name or shell pattern: MatrixSpec, or a name such as "qkv" and "gate_up"}`, the logical matrices of
            fused weights that no family says, or says otherwise; the last matching entry wins.
        per_head: orthogonalise queries, keys and values head by head instead of all heads of one as one matrix.
        lora: which factors of LoRA adapters Muon takes: none (`"adamw"`), the factors B (`"muon_b"`), or both
            (`"muon"`).
        found: the survey of the model, where there is one already.

    Raises:
        ConfigurationError: a weight that is not a matrix was sent to Muon, a layout does not fit its weight, or an
            entry of `overrides` or `layouts` matches nothing.
    """
    _check_said("layouts", layouts, (MatrixSpec, str), "a MatrixSpec or the name of a layout")
    _check_said("routes", overrides, (str,), "'muon' or 'adamw'")
    context = _Context(found or survey(model), layouts or {}, per_head, lora)
    unused = set(overrides or ())
    table: dict[str, Route] = {}
    for raw_name, parameter in model.named_parameters():
        name = canonical_name(raw_name, model)
        route = context.default_route(name, parameter)
        if predicate is not None and route.route != "frozen":
            route = context.forced(name, parameter, "muon" if predicate(name, parameter) else "adamw", "predicate")
        for pattern, target in (overrides or {}).items():
            if _matches(name, pattern):
                unused.discard(pattern)
                if route.route != "frozen":
                    route = context.forced(name, parameter, target, f"override {pattern!r}")
        table[name] = route
    if unused:
        raise ConfigurationError(f"these route overrides match no parameter of the model: {sorted(unused)}")
    context.check_layouts(table)
    _report(model, table)
    return table


def _check_said(argument: str, said: object, kinds: tuple[type, ...], what: str) -> None:
    """Refuse an argument that is no mapping of patterns to what it takes."""
    if said is None:
        return
    if not isinstance(said, Mapping):
        raise ConfigurationError(f"{argument}= takes a mapping {{name or shell pattern: {what}}}, not {said!r}")
    for pattern, value in said.items():
        if not isinstance(value, kinds):
            raise ConfigurationError(f"{argument}={{{pattern!r}: {value!r}}}: give {what}")


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


class _Context:
    """The survey of one model and what its caller says about layouts."""

    def __init__(
        self, found: Survey, layouts: Mapping[str, MatrixSpec | str], per_head: bool, lora: LoraPolicy
    ) -> None:
        self._found = found
        self._layouts = layouts
        self._per_head = per_head
        self._stacks = known_stacks(found.model)
        self._lora = lora
        self._factors = lora_factors(found.model)
        check_lora(lora, self._factors)

    def default_route(self, name: str, parameter: nn.Parameter) -> Route:
        """The route without predicate and overrides."""
        if not parameter.requires_grad:
            return Route("frozen", None, "requires_grad is False")
        factor = self._factors.get(name)
        if factor is not None:
            is_muon = factor.is_on_muon(self._lora)
            return Route("muon", factor.spec, factor.reason) if is_muon else Route("adamw", None, factor.reason)
        role = self._found.roles[name]
        if self._is_stack(name, parameter):
            return self._stack(name, parameter, f"linear weights of {_members(role)}")
        if role.kind == "projection" or self._is_folded(name, parameter):
            return self._muon(name, parameter, role.reason)
        if role.kind == "expert stack" and parameter.ndim == 2 and self._is_said(name):
            return self._muon(name, parameter, f"linear weights of {_members(role)}")
        return Route("adamw", None, role.reason)

    def forced(self, name: str, parameter: nn.Parameter, target: str, source: str) -> Route:
        """The route that `source` demands, with the layout that the model implies."""
        if target == "adamw":
            return Route("adamw", None, source)
        if target != "muon":
            raise ConfigurationError(f"{source} sends {name!r} to {target!r}; choose 'muon' or 'adamw'")
        if self._is_stack(name, parameter):
            return self._stack(name, parameter, source)
        if not self._is_folded(name, parameter) and (parameter.ndim != 2 or min(parameter.shape) == 1):
            raise ConfigurationError(
                f"{source} sends {name!r} of shape {tuple(parameter.shape)} to Muon, which updates matrices with at "
                "least two rows and two columns; route it to 'adamw'. Of three dimensions say in layouts={name: ...} "
                "what they are: the MatrixSpec of one matrix of a stack (count, out, in), or MatrixSpec(folded=True) "
                "of one matrix (out, heads, size)"
            )
        return self._muon(name, parameter, source)

    def check_layouts(self, table: Mapping[str, Route]) -> None:
        """Refuse entries of `layouts` that say nothing about a Muon weight."""
        muon = [name for name, route in table.items() if route.route == "muon"]
        unused = sorted(pattern for pattern in self._layouts if not any(_matches(name, pattern) for name in muon))
        if unused:
            raise ConfigurationError(f"these layouts match no weight that Muon updates: {unused}")

    def _is_stack(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter stores several matrices of one shape, whose layout is known or said by the caller."""
        said = parameter.ndim == 3 and self._said(name)
        return not self._is_folded(name, parameter) and (name in self._stacks or bool(said))

    def _is_folded(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter in three dimensions is one matrix, as its family knows or the caller says."""
        said = self._said(name)
        if isinstance(said, MatrixSpec):
            return said.folded
        return parameter.ndim == 3 and name not in self._stacks and self._is_known(name)

    def _is_known(self, name: str) -> bool:
        return is_known(self._found.module_of(name), name.rpartition(".")[2])

    def _is_said(self, name: str) -> bool:
        """Whether the caller or a family says how the matrices of experts in two dimensions lie."""
        return self._said(name) is not None or self._is_known(name)

    def _stack(self, name: str, parameter: nn.Parameter, reason: str) -> Route:
        """The route of a stack, with the layout of each of its members."""
        said = self._said(name)
        if isinstance(said, str):
            raise ConfigurationError(
                f"layouts= says {said!r} of {name!r}, a stack of matrices: give the MatrixSpec of one expert"
            )
        spec = self._stacks[name] if said is None else said
        try:
            spec.validate(tuple(parameter.shape[1:]))
        except ConfigurationError as error:
            raise ConfigurationError(f"layouts= of {name!r} does not fit one of its matrices: {error}") from error
        return Route("muon", spec, reason)

    def _muon(self, name: str, parameter: nn.Parameter, reason: str) -> Route:
        if name in self._factors and self._said(name) is None:
            return Route("muon", self._factors[name].spec, reason)
        projection = projection_of(name, parameter, self._found.modules)
        spec, source = self._said_layout(projection), "layouts="
        if spec is None:
            source = "the known layout"
            spec = layout_of(projection)
            if spec is None:
                spec = MatrixSpec(transposed=projection.transposed)
                if any(is_split_by(caller, layer) for caller, layer in projection.callers):
                    reason = _UNKNOWN_LAYOUT
        if self._per_head:
            spec = each_head(projection, spec)
        if parameter.ndim == 3 and not spec.folded:
            raise ConfigurationError(f"{source} of {name!r} is of two dimensions: give a MatrixSpec(folded=True)")
        try:
            spec.validate(stored_matrices(parameter.shape, spec)[1])
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{source} of {name!r} does not fit its shape: {error}; give its own in layouts={{name: ...}}"
            ) from error
        return Route("muon", spec, reason)

    def _said_layout(self, projection: Projection) -> MatrixSpec | None:
        said = self._said(projection.name)
        return named_layout(said)(projection) if isinstance(said, str) else said

    def _said(self, name: str) -> MatrixSpec | str | None:
        said = [layout for pattern, layout in self._layouts.items() if _matches(name, pattern)]
        return said[-1] if said else None


def _report(model: nn.Module, table: Mapping[str, Route]) -> None:
    """Log what a user may not expect, once per model, on one rank."""
    if model in _reported or (dist.is_initialized() and dist.get_rank() != 0):
        return
    _reported.add(model)
    stacks = [name for name, route in table.items() if route.reason == EXPERTS]
    if stacks:
        logger.warning(
            "%d weights of experts are updated by AdamW, since how their matrices lie is not known here: say it in "
            "layouts={pattern: MatrixSpec of one expert}, first %s",
            len(stacks),
            stacks[0],
        )
    fused = [name for name, route in table.items() if route.reason == _UNKNOWN_LAYOUT]
    if fused:
        logger.warning(
            "%d weights are fused but their layout is not known here; each is orthogonalised as one matrix. Say it in "
            "layouts={pattern: MatrixSpec}, first %s",
            len(fused),
            fused[0],
        )


def _members(role: Role) -> str:
    return "experts" if role.kind == "expert stack" else "heads"


def muon_specs(table: Mapping[str, Route]) -> dict[str, MatrixSpec]:
    """The Muon part of a routing table: canonical name -> layout."""
    return {name: cast(MatrixSpec, route.spec) for name, route in table.items() if route.route == "muon"}
