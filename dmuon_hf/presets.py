"""Which optimizer updates which parameter, and as which logical matrices.

The route follows from the role of a parameter: the type of its module, its place in the model and the preset of its
family (`families.py`), never from its number of dimensions or from its name alone. Muon takes the weights of linear
layers inside transformer blocks. AdamW takes embeddings, output heads, whatever lies outside the blocks, routers,
norms, biases, vectors and, in this release, stacks of experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast
from weakref import WeakSet

import torch.distributed as dist
from torch import nn

from dmuon_hf.boundaries import HookBoundaries, embeddings
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import MatrixSpec, canonical_name
from dmuon_hf.families import PRESETS, rule_for

__all__ = ["Route", "RouteName", "muon_specs", "routes"]

logger = logging.getLogger(__name__)

RouteName = Literal["muon", "adamw", "frozen"]
Predicate = Callable[[str, nn.Parameter], bool]

# Models whose peculiarities were logged already.
_reported: WeakSet[nn.Module] = WeakSet()

_ROUTER_NAMES = frozenset({"gate", "shared_expert_gate"})
_FUSED_NAMES = frozenset(
    {
        "Wqkv",
        "c_attn",
        "dense_h_to_4h_gate",
        "fused_qkv",
        "gate_up_proj",
        "in_proj",
        "in_proj_qkv",
        "in_proj_qkvz",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "qkv",
        "qkv_proj",
        "query_key_value",
    }
)


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
) -> dict[str, Route]:
    """Route of every parameter of `model`, by canonical name, in the order of `named_parameters()`.

    Local and free of side effects; works before and after the model is prepared. A tied weight appears once, under its
    first name.

    Args:
        model: any module; presets apply to `transformers` models of a known family, also inside composite models.
        predicate: `(name, parameter) -> bool` that replaces the built-in choice of Muon weights. Their matrix layout
            still comes from the preset.
        overrides: `{name or shell pattern: "muon" | "adamw"}`, applied last; the last matching entry wins.

    Raises:
        ConfigurationError: a weight that is not a matrix was sent to Muon, or an override matches nothing.
    """
    context = _Context(model)
    unused = set(overrides or ())
    table: dict[str, Route] = {}
    for raw_name, parameter in model.named_parameters():
        name = canonical_name(raw_name, model)
        found = context.default_route(name, parameter)
        if predicate is not None and found.route != "frozen":
            found = context.forced(name, parameter, "muon" if predicate(name, parameter) else "adamw", "predicate")
        for pattern, target in (overrides or {}).items():
            if name == pattern or fnmatchcase(name, pattern):
                unused.discard(pattern)
                if found.route != "frozen":
                    found = context.forced(name, parameter, target, f"override {pattern!r}")
        table[name] = found
    if unused:
        raise ConfigurationError(f"these route overrides match no parameter of the model: {sorted(unused)}")
    context.report(table)
    return table


class _Context:
    """Facts about one model that every routing decision needs."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {canonical_name(name, model): module for name, module in model.named_modules()}
        self._boundaries = HookBoundaries(model)
        self._input_embedding, self._output_embedding = (
            getattr(module, "weight", None) for module in embeddings(model)
        )
        self._model = model
        self._unknown_fused: list[str] = []

    def default_route(self, name: str, parameter: nn.Parameter) -> Route:
        """The route without predicate and overrides."""
        if not parameter.requires_grad:
            return Route("frozen", None, "requires_grad is False")
        reason = self._adamw_reason(name, parameter)
        if reason is not None:
            return Route("adamw", None, reason)
        rule = self._family_rule(name)
        if isinstance(rule, str):
            return Route("adamw", None, rule)
        return Route("muon", self._spec(name, parameter), "linear weight in a block")

    def forced(self, name: str, parameter: nn.Parameter, target: str, source: str) -> Route:
        """The route that `source` demands, with the layout that the model implies."""
        if target == "adamw":
            return Route("adamw", None, source)
        if target != "muon":
            raise ConfigurationError(f"{source} sends {name!r} to {target!r}; choose 'muon' or 'adamw'")
        if parameter.ndim != 2 or min(parameter.shape) == 1:
            raise ConfigurationError(
                f"{source} sends {name!r} of shape {tuple(parameter.shape)} to Muon, which updates matrices with at "
                "least two rows and two columns; route it to 'adamw'"
            )
        return Route("muon", self._spec(name, parameter), source)

    def report(self, table: Mapping[str, Route]) -> None:
        """Log what a user may not expect, once per model, on one rank."""
        if self._model in _reported or (dist.is_initialized() and dist.get_rank() != 0):
            return
        _reported.add(self._model)
        stacks = [name for name, route in table.items() if route.reason == _EXPERT_STACK]
        if stacks:
            logger.warning("%d expert stacks are updated by AdamW in this release, first %s", len(stacks), stacks[0])
        fused = [name for name in self._unknown_fused if table[name].route == "muon"]
        if fused:
            logger.warning(
                "%d weights look fused but their layout is not known here; each is orthogonalised as one matrix, "
                "first %s",
                len(fused),
                fused[0],
            )

    def _adamw_reason(self, name: str, parameter: nn.Parameter) -> str | None:
        module_name, _, leaf = name.rpartition(".")
        module = self._modules[module_name]
        if parameter is self._input_embedding or _is_embedding(module):
            return "embedding"
        if parameter is self._output_embedding:
            return "output embedding"
        if parameter.ndim == 3 and not isinstance(module, nn.Conv1d):
            return _EXPERT_STACK
        if parameter.ndim != 2 or min(parameter.shape) == 1:
            return "not a matrix"
        if self._is_router(module_name):
            return "router"
        if self._boundaries.block_name(name) is None:
            return "outside the transformer blocks"
        if leaf != "weight" or not (isinstance(module, nn.Linear) or _is_conv1d(module)):
            return f"{leaf} of a {type(module).__name__}"
        return None

    def _is_router(self, module_name: str) -> bool:
        """Whether a module, or one around it, chooses what its input is sent to."""
        parts = module_name.split(".")
        if parts[-1] in _ROUTER_NAMES or type(self._modules[module_name]).__name__.endswith("Gate"):
            return True
        around = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return any(
            part.endswith("router") or type(self._modules[name]).__name__.endswith("Router")
            for part, name in zip(parts, around, strict=True)
        )

    def _family_rule(self, name: str) -> Any:
        """The preset's rule, from the innermost module around the parameter whose config names a known family."""
        parts = name.split(".")[:-1]
        for end in range(len(parts), -1, -1):
            module = self._modules.get(".".join(parts[:end]))
            model_type = getattr(getattr(module, "config", None), "model_type", None)
            if model_type in PRESETS:
                rule = rule_for(cast(str, model_type), name)
                return rule if rule is None or isinstance(rule, str) else rule(cast(Any, module).config)
        return None

    def _spec(self, name: str, parameter: nn.Parameter) -> MatrixSpec:
        rule = self._family_rule(name)
        module_name = name.rpartition(".")[0]
        if isinstance(rule, MatrixSpec):
            spec = rule
        else:
            spec = MatrixSpec(transposed=_is_conv1d(self._modules[module_name]))
            if module_name.rpartition(".")[2] in _FUSED_NAMES:
                self._unknown_fused.append(name)
        try:
            spec.logical_shapes(tuple(parameter.shape))
        except ValueError as error:
            raise ConfigurationError(f"the layout preset of {name!r} does not fit its shape: {error}") from error
        return spec


_EXPERT_STACK = "stack of matrices (experts)"


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in type(module).__name__


def _is_conv1d(module: nn.Module) -> bool:
    """The `(in, out)` linear layer of GPT-2, by name so that this module needs no import of transformers."""
    return type(module).__name__ == "Conv1D"


def muon_specs(table: Mapping[str, Route]) -> dict[str, MatrixSpec]:
    """The Muon part of a routing table: canonical name -> layout."""
    return {name: cast(MatrixSpec, route.spec) for name, route in table.items() if route.route == "muon"}
