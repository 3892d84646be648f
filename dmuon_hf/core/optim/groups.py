"""From the user's groups to the optimizer's: each semantic group becomes ``<name>/muon`` and ``<name>/adamw``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim.normuon import UPDATE_RULES
from dmuon_hf.core.optim.scaling import LR_SCALES
from dmuon_hf.core.plan import canonical_name
from dmuon_hf.core.policy import check_route

__all__ = [
    "DEFAULT_GROUP",
    "Defaults",
    "LoweredGroup",
    "changed_update_rule",
    "forced_routes",
    "frozen_parameters",
    "lower_groups",
    "materialised",
    "scalar",
    "trainable_parameters",
]

DEFAULT_GROUP: Final = "default"

# Key of a lowered group -> keys of a user's group that set it, the most specific first.
_MUON_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "lr": ("muon_lr", "lr"),
    "momentum": ("momentum",),
    "nesterov": ("nesterov",),
    "ns_steps": ("ns_steps",),
    "weight_decay": ("muon_weight_decay", "weight_decay"),
    "lr_scale": ("lr_scale",),
    "update_rule": ("update_rule",),
    "normuon_beta2": ("normuon_beta2",),
}
_ADAMW_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "lr": ("adamw_lr", "lr"),
    "betas": ("adamw_betas", "betas"),
    "eps": ("adamw_eps", "eps"),
    "weight_decay": ("adamw_weight_decay", "weight_decay"),
}
_ROUTE_KEYS: Final = ("dmuon_route", "dmuon_optimizer", "matrix_optimizer")
_CONSUMED: Final = frozenset(
    key for table in (_MUON_KEYS, _ADAMW_KEYS) for sources in table.values() for key in sources
) | {"params", "group_name", "route", *_ROUTE_KEYS}


@dataclass(frozen=True, slots=True)
class Defaults:
    """Hyperparameters of a group that sets none itself, per route."""

    muon: Mapping[str, Any]
    adamw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoweredGroup:
    """One group of the flat optimizer: canonical names and parameters in the model's order."""

    names: list[str]
    params: list[nn.Parameter]
    options: dict[str, Any] = field(default_factory=dict)
    waiting: frozenset[str] = frozenset()
    """Frozen parameters of the user's group, which join the one of their route when they are unfrozen."""

    def as_param_group(self) -> dict[str, Any]:
        return {"params": list(self.params), **self.options}


def materialised(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A user's groups, whose parameters, maybe of generators, can be read more than once."""
    given = [(group, group.get("params")) for group in groups]
    return [
        dict(group) if params is None or isinstance(params, Tensor) else {**group, "params": list(params)}
        for group, params in given
    ]


def frozen_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The others, in the form of :func:`trainable_parameters`."""
    return {canonical_name(name, model): param for name, param in model.named_parameters() if not param.requires_grad}


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every trainable parameter once, by canonical name, in the order of the model; a tied one under its first name."""
    return {canonical_name(name, model): param for name, param in model.named_parameters() if param.requires_grad}


def lower_groups(
    trainable: Mapping[str, nn.Parameter],
    muon_names: Collection[str],
    user_groups: Sequence[Mapping[str, Any]] | None,
    defaults: Defaults,
    frozen: Mapping[str, nn.Parameter] | None = None,
) -> list[LoweredGroup]:
    """Lower the user's groups to muon and adamw groups, none of them empty.

    Args:
        trainable: Canonical name to parameter, every trainable parameter of the model.
        muon_names: Canonical names of the parameters on the muon route.
        user_groups: Semantic groups of ``Muon(param_groups=...)``, or ``None`` for one group of everything.
        defaults: Hyperparameters for what a group leaves out.
        frozen: Canonical name to parameter, what else the model holds; groups may list any of it, or none.

    Raises:
        ConfigurationError: A parameter is missing, listed twice or not the model's, or a hyperparameter is out of
            range. The parameters and the group are named.
    """
    everything = {**trainable, **(frozen or {})}
    if user_groups is None:
        user_groups = [{"params": list(everything.values()), "group_name": DEFAULT_GROUP}]
    groups = [dict(group) for group in user_groups]
    members = _assign(groups, everything, required=trainable)
    lowered: list[LoweredGroup] = []
    for index, (group, names) in enumerate(zip(groups, members, strict=True)):
        label = _label(group, index)
        extra = {key: value for key, value in group.items() if key not in _CONSUMED}
        for route, table, base in (("muon", _MUON_KEYS, defaults.muon), ("adamw", _ADAMW_KEYS, defaults.adamw)):
            chosen = [name for name in names if name in trainable and (name in muon_names) == (route == "muon")]
            if not chosen:
                continue
            options = {key: _first(group, sources, base[key]) for key, sources in table.items()}
            _check_options(options, f"{label}/{route}")
            options = {**extra, **options, "route": route, "group_name": f"{label}/{route}"}
            waiting = frozenset(name for name in names if name not in trainable)
            lowered.append(LoweredGroup(chosen, [trainable[name] for name in chosen], options, waiting))
    _check_distinct([group.options["group_name"] for group in lowered])
    return lowered


def _label(group: Mapping[str, Any], index: int) -> str:
    return str(group.get("group_name", f"group{index}"))


def _first(group: Mapping[str, Any], sources: Sequence[str], default: Any) -> Any:
    """Value of the most specific key that ``group`` sets."""
    for key in sources:
        if key in group:
            return group[key]
    return default


def _assign(
    groups: Sequence[Mapping[str, Any]], everything: Mapping[str, nn.Parameter], required: Collection[str]
) -> list[list[str]]:
    """Names of each group in the order of ``everything``, after checking that each of ``required`` has one group."""
    name_of = {id(param): name for name, param in everything.items()}
    group_of: dict[str, int] = {}
    for index, group in enumerate(groups):
        if "params" not in group:
            raise ConfigurationError(f"param_groups[{index}] ({_label(group, index)!r}) has no 'params'")
        for position, (given_name, param) in enumerate(_members(group["params"])):
            name = name_of.get(id(param))
            where = f"param_groups[{index}] ({_label(group, index)!r})"
            if name is None:
                shown = given_name or f"params[{position}] of shape {tuple(param.shape)}"
                raise ConfigurationError(
                    f"{where} holds {shown}, which is no parameter of this model. Build param_groups from "
                    "model.named_parameters() after dedicate_params() and fully_shard()."
                )
            if name in group_of:
                other = group_of[name]
                raise ConfigurationError(
                    f"{where} holds {name!r}, which param_groups[{other}] ({_label(groups[other], other)!r}) holds too"
                )
            group_of[name] = index
    missing = [name for name in required if name not in group_of]
    if missing:
        raise ConfigurationError(f"param_groups leave out trainable parameters: {', '.join(map(repr, missing))}")
    members: list[list[str]] = [[] for _ in groups]
    for name in everything:
        if name in group_of:
            members[group_of[name]].append(name)
    return members


def _members(params: Any) -> list[tuple[str | None, Tensor]]:
    """``params`` as torch accepts it: a tensor, tensors, or ``(name, tensor)`` pairs."""
    if isinstance(params, Tensor):
        return [(None, params)]
    pairs: list[tuple[str | None, Tensor]] = []
    for item in params:
        if isinstance(item, Tensor):
            pairs.append((None, item))
        else:
            name, param = item
            pairs.append((name, param))
    return pairs


def forced_routes(model: nn.Module, groups: Sequence[Mapping[str, Any]] | None) -> dict[str, str]:
    """Canonical name to the route that its group sets by ``dmuon_route``, ``dmuon_optimizer`` or ``matrix_optimizer``.

    It holds for managed parameters, which are those that are dedicated or that Muon's predicate selects; what else is
    in the group trains with AdamW anyway.

    Raises:
        ConfigurationError: A group sets two routes, or one that does not exist.
        NotImplementedError: A group asks for a route that is not built.
    """
    names = {id(param): canonical_name(name, model) for name, param in model.named_parameters()}
    forced: dict[str, str] = {}
    for index, group in enumerate(groups or ()):
        route = _route_of(group, _label(group, index))
        if route is not None:
            members = (names.get(id(param)) for _, param in _members(group.get("params", ())))
            forced |= {name: route for name in members if name is not None}
    return forced


def _route_of(group: Mapping[str, Any], label: str) -> str | None:
    given = {key: group[key] for key in _ROUTE_KEYS if group.get(key) is not None}
    if len(set(map(str, given.values()))) > 1:
        raise ConfigurationError(f"group {label!r} asks for several routes: {given}")
    for key, route in given.items():
        return check_route(route, f"group {label!r} ({key})")
    if "route" in group:
        raise ConfigurationError(
            f"group {label!r} sets 'route', which follows from dedicate_params(): name it 'dmuon_route' to force it, "
            "or rename your own key"
        )
    return None


def _check_distinct(names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigurationError(f"param_groups repeat group_name {', '.join(map(repr, repeated))}: make them distinct")


def _check_options(options: Mapping[str, Any], where: str) -> None:
    """Ranges of the hyperparameters of one lowered group."""

    def require(condition: bool, key: str, wanted: str) -> None:
        if not condition:
            raise ConfigurationError(f"group {where!r}: {key} must be {wanted}, got {options[key]!r}")

    lr = options["lr"]
    if isinstance(lr, Tensor):
        require(lr.numel() == 1, "lr", "a number or a tensor of one element")
    else:
        require(lr >= 0.0, "lr", "at least 0")
    require(options["weight_decay"] >= 0.0, "weight_decay", "at least 0")
    if "momentum" in options:
        steps = options["ns_steps"]
        require(0.0 <= options["momentum"] < 1.0, "momentum", "in [0, 1)")
        require(isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1, "ns_steps", "an integer from 1")
        require(options["lr_scale"] in LR_SCALES, "lr_scale", f"one of {LR_SCALES}")
        require(options["update_rule"] in UPDATE_RULES, "update_rule", f"one of {UPDATE_RULES}")
        require(0.0 <= options["normuon_beta2"] < 1.0, "normuon_beta2", "in [0, 1)")
    else:
        betas = options["betas"]
        require(len(betas) == 2 and all(0.0 <= float(beta) < 1.0 for beta in betas), "betas", "two numbers in [0, 1)")
        require(options["eps"] >= 0.0, "eps", "at least 0")


def changed_update_rule(groups: Iterable[Mapping[str, Any]], rules: Iterable[str | None]) -> str:
    """What is wrong with the first group whose update rule is no longer what its state was made for; else nothing."""
    for group, rule in zip(groups, rules, strict=True):
        if group.get("update_rule") != rule:
            return (
                f"group {group['group_name']!r} has update_rule={group.get('update_rule')!r} now and was made with "
                f"{rule!r}, which keeps other state: set it in Muon(update_rule=...) or in its param_groups"
            )
    return ""


def scalar(value: float | Tensor) -> float:
    """A hyperparameter as a number; a tensor on an accelerator costs a synchronisation."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)
