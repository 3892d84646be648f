"""What each managed parameter is told: its route and dtypes, from the arguments of ``dedicate_params``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import SHARDED

__all__ = ["ROUTES", "ParamPolicy", "ParamPolicyFn", "RouteHintFn", "check_route", "policy_source"]


RouteHintFn: TypeAlias = Callable[[str, nn.Parameter], "str | None"]
ParamPolicyFn: TypeAlias = Callable[[str, nn.Parameter], "Mapping[str, Any] | None"]

ROUTES: Final = ("muon", "adamw", SHARDED)
FORWARD_UNSHARDS: Final = ("broadcast", "all_gather")


@dataclass(frozen=True, slots=True)
class ParamPolicy:
    """The policy of one parameter; ``None`` is what the arguments of ``dedicate_params`` say for all.

    Attributes:
        route: ``"muon"``; ``"adamw"``: owned as well, and updated with AdamW by its owner; or ``"sharded_adamw"``:
            without an owner, cut into rows of which every rank keeps and updates its own.
        param_dtype: Dtype that the weight is gathered and used in.
        grad_dtype: Dtype in which its gradient is accumulated on each rank and travels.
        output_dtype: Dtype that floating-point outputs of the modules that hold it are cast to.
        cast_forward_inputs: Whether floating-point inputs of those modules are cast to ``param_dtype``, where that is
            set.
        master_dtype: Dtype of what the owner keeps and updates.
        optim_dtype: Dtype of the tensors of its optimizer state. The update is computed in fp32 at least.
        muon_forward_unshard: How a weight of the muon route becomes whole.
    """

    route: str = "muon"
    param_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    master_dtype: torch.dtype | None = None
    optim_dtype: torch.dtype | None = None
    muon_forward_unshard: str | None = None

    def with_unshard(self, default: str) -> ParamPolicy:
        """The policy with the unshard that holds for it: ``default`` where it names none; ``None`` for a broadcast."""
        chosen = self.muon_forward_unshard or default
        shards = self.route == "muon" and chosen == "all_gather"
        return replace(self, muon_forward_unshard="all_gather" if shards else None)

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Dtype that inputs of the modules that hold the parameter are cast to, ``None`` for as they are."""
        return self.param_dtype if self.cast_forward_inputs else None

    @property
    def unit_key(self) -> tuple[str, ...]:
        """What the parameters of one unit have in common: they travel in one buffer.

        A parameter that is sharded has a unit for itself.
        """
        parts = {
            "route": self.route if self.route == SHARDED else None,
            "weights": self.param_dtype,
            "gradients": self.grad_dtype,
            "unshard": self.muon_forward_unshard,
        }
        return tuple(f"{what} {_shown(value)}" for what, value in parts.items() if value is not None)

    def described(self) -> dict[str, str]:
        """The fields that are not at their defaults, JSON-friendly."""
        named = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return {name: _shown(value) for name, value, default in named if value != default}


def policy_source(
    *,
    param_policy: Mapping[str, Any] | None,
    param_policy_fn: ParamPolicyFn | None,
    route_hint_fn: RouteHintFn | None,
) -> Callable[[str, nn.Parameter], ParamPolicy]:
    """The policy of each parameter, from whichever of the three arguments is given; the defaults without any.

    Raises:
        ConfigurationError: More than one is given, ``param_policy`` has another form than ``defaults`` and
            ``overrides``, or a field does not exist or has a value that it does not take. The functions raise it too.
    """
    given = {
        "param_policy": param_policy,
        "param_policy_fn": param_policy_fn,
        "route_hint_fn": route_hint_fn,
    }
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigurationError(f"dedicate_params got {' and '.join(chosen)}: each decides over routes, pass one")
    if param_policy is not None:
        return _Structured(param_policy)
    if param_policy_fn is not None:
        decide = param_policy_fn
        return lambda name, param: _policy(decide(name, param) or {}, f"param_policy_fn for {name}")
    if route_hint_fn is not None:
        hint = route_hint_fn
        return lambda name, param: ParamPolicy(
            route=check_route(hint(name, param) or "muon", f"route_hint_fn ({name})")
        )
    return lambda name, param: ParamPolicy()


class _Structured:
    """``param_policy``: defaults, and overrides in order, each for the names that contain one of its tokens."""

    def __init__(self, policy: Mapping[str, Any]) -> None:
        _check_keys(policy, ("defaults", "overrides"), "param_policy")
        self._defaults = _fields(policy.get("defaults", {}), "the defaults of param_policy")
        self._overrides = [
            _override(entry, f"overrides[{i}] of param_policy") for i, entry in enumerate(policy.get("overrides", ()))
        ]
        _policy(self._defaults, "the defaults of param_policy")
        for i, (_, values) in enumerate(self._overrides):
            _policy({**self._defaults, **values}, f"overrides[{i}] of param_policy")

    def __call__(self, name: str, param: nn.Parameter) -> ParamPolicy:
        values = dict(self._defaults)
        for tokens, override in self._overrides:
            if any(token in name for token in tokens):
                values |= override
        return _policy(values, f"param_policy for {name}")


def _override(entry: Any, where: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    if not isinstance(entry, Mapping):
        raise ConfigurationError(f"{where} must be a dict of 'name' and 'set', got a {type(entry).__name__}")
    _check_keys(entry, ("name", "set"), where)
    names = entry.get("name")
    tokens = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else ()
    if not tokens or not all(isinstance(token, str) and token for token in tokens):
        raise ConfigurationError(f"{where} must have a token or a list of tokens in 'name', got {names!r}")
    if "set" not in entry:
        raise ConfigurationError(f"{where} has no 'set', so that it would change nothing")
    return tokens, _fields(entry["set"], where)


def _check_keys(given: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where} must be a dict of {', '.join(map(repr, known))}, got {given!r}")
    unknown = sorted(str(key) for key in given if key not in known)
    if unknown:
        raise ConfigurationError(f"{where} has {', '.join(map(repr, unknown))}; it takes {', '.join(map(repr, known))}")


def _fields(values: Any, where: str) -> dict[str, Any]:
    _check_keys(values, [field.name for field in fields(ParamPolicy)], where)
    return dict(values)


def _policy(values: Mapping[str, Any], where: str) -> ParamPolicy:
    found = _fields(values, where)
    if "route" in found:
        check_route(found["route"], where)
    for name, value in found.items():
        if name.endswith("_dtype") and value is not None:
            _check_dtype(value, f"{name} in {where}")
    if not isinstance(found.get("cast_forward_inputs", True), bool):
        raise ConfigurationError(f"cast_forward_inputs in {where} must be true or false")
    check_forward_unshard(found.get("muon_forward_unshard"), where)
    return ParamPolicy(**found)


def check_route(route: Any, where: str) -> str:
    """A route of a managed parameter.

    Raises:
        ConfigurationError: There is no such route.
    """
    if route not in ROUTES:
        raise ConfigurationError(f"{where}: route must be one of {', '.join(map(repr, ROUTES))}, got {route!r}")
    return str(route)


def check_forward_unshard(value: Any, where: str) -> None:
    """Raises ``ConfigurationError`` for what ``muon_forward_unshard`` does not take."""
    if value is not None and value not in FORWARD_UNSHARDS:
        raise ConfigurationError(
            f"{where}: muon_forward_unshard must be one of {', '.join(map(repr, FORWARD_UNSHARDS))}, got {value!r}"
        )


def _check_dtype(value: Any, where: str) -> None:
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ConfigurationError(f"{where} must be a floating-point torch.dtype, got {value!r}")


def _shown(value: object) -> str:
    return str(value).removeprefix("torch.")
