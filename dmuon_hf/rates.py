"""Which parameter group a parameter is in, and with which rates: parts of the model, patterns, and weight decay.

Groups are named after what the caller said, never numbered, so a resumed run finds its groups whatever the launch:
`[<group>/][<part>/]decay` or `no_decay`, to which `Muon` adds the route.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import canonical_name
from dmuon_hf.survey import Survey

__all__ = ["Part", "RateGroup", "Rates", "lowered", "part_of", "rate_groups"]

Part = Literal["embedding", "head", "scalar"]

_SETTINGS = frozenset(
    {
        "lr", "muon_lr", "adamw_lr", "lr_factor", "weight_decay", "muon_weight_decay", "adamw_weight_decay",
        "momentum", "nesterov", "ns_steps", "lr_scale", "update_rule", "normuon_beta2",
        "betas", "adamw_betas", "eps", "adamw_eps",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class RateGroup:
    """Parameters that the caller chose by shell patterns on canonical names, and what holds for them."""

    name: str
    patterns: tuple[str, ...]
    settings: Mapping[str, Any]

    def matches(self, name: str) -> bool:
        return any(name == pattern or fnmatchcase(name, pattern) for pattern in self.patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates and decays of a model, before groups say otherwise. `parts` has those of the AdamW weights of a part."""

    muon_lr: float
    adamw_lr: float
    muon_weight_decay: float
    adamw_weight_decay: float
    parts: Mapping[Part, float] = field(default_factory=dict)


def rate_groups(given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> tuple[RateGroup, ...]:
    """The groups that a caller described: `{pattern: settings}`, or dicts with the pattern or patterns in `params`.

    Raises:
        ConfigurationError: a group without patterns, with a setting that does not exist, or with a name that is taken.
    """
    described = (
        [{"params": pattern, **_mapping(pattern, value)} for pattern, value in given.items()]
        if isinstance(given, Mapping)
        else [_mapping(f"param_groups[{index}]", value) for index, value in enumerate(given)]
    )
    groups = tuple(_rate_group(index, dict(settings)) for index, settings in enumerate(described))
    names = [group.name for group in groups]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigurationError(f"param_groups repeat the names {repeated}: set group_name, each to another one")
    return groups


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{where} of param_groups is a dict of settings such as {{'lr': 1e-5}}, not {value!r}")
    return value


def _rate_group(index: int, settings: dict[str, Any]) -> RateGroup:
    params = settings.pop("params", ())
    patterns = (params,) if isinstance(params, str) else tuple(params)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigurationError(
            f"param_groups[{index}] needs 'params': a name or shell pattern of parameters, or a list of them"
        )
    name = str(settings.pop("group_name", patterns[0]))
    unknown = sorted(set(settings) - _SETTINGS)
    if unknown:
        raise ConfigurationError(f"group {name!r} sets unknown {unknown}; a group takes {sorted(_SETTINGS)}")
    if not settings:
        raise ConfigurationError(f"group {name!r} sets nothing; a group takes {sorted(_SETTINGS)}")
    if "lr_scale" in settings and settings["lr_scale"] != "match_rms_adamw" and "muon_lr" not in settings:
        raise ConfigurationError(
            f"group {name!r} sets lr_scale={settings['lr_scale']!r}, which is on another scale than AdamW's: "
            "it needs muon_lr"
        )
    return RateGroup(name, patterns, settings)


def part_of(name: str, parameter: nn.Parameter, found: Survey) -> Part | None:
    """The part of the model that a parameter belongs to; None for what has no rate of its own.

    `"embedding"`: embeddings, also where they are tied to the head. `"head"`: the output embedding, and whatever the
    class for a task adds around the base model. `"scalar"`: norms, biases and other vectors elsewhere.
    """
    role = found.roles[name]
    if role.kind == "embedding":
        return "embedding"
    if role.reason == "output embedding" or _is_outside_base_model(name, found):
        return "head"
    return "scalar" if parameter.numel() == max(parameter.shape, default=1) else None


def _is_outside_base_model(name: str, found: Survey) -> bool:
    """Whether a parameter is outside the base model of the class for a task, which adapters may have wrapped."""
    for path, module in found.modules.items():
        prefix = getattr(module, "base_model_prefix", "") if isinstance(module, PreTrainedModel) else ""
        if prefix and prefix in module._modules:
            return not name.startswith(f"{path}.{prefix}." if path else f"{prefix}.")
    return False


@dataclass(slots=True)
class _Members:
    """Parameters that share every rate."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    group: RateGroup | None = None
    part: Part | None = None
    decays: bool = False

    @property
    def name(self) -> str:
        group = () if self.group is None else (self.group.name,)
        part = () if self.part is None else (self.part,)
        return "/".join((*group, *part, "decay" if self.decays else "no_decay"))


def lowered(
    model: nn.Module,
    rates: Rates,
    groups: Sequence[RateGroup],
    *,
    decay_names: Collection[str],
    muon_names: Collection[str],
    found: Callable[[], Survey],
) -> list[dict[str, Any]]:
    """The `param_groups` of `Muon`: the Trainer's two, decayed and not, apart by the caller's groups and parts.

    Frozen parameters are in them as well, and join when they are unfrozen.

    Args:
        decay_names: names of the parameters that are decayed.
        muon_names: canonical names of the parameters on the muon route, which parts leave alone.
        found: makes the survey of the model, which parts need.

    Raises:
        ConfigurationError: a rate or a group that no trainable parameter is in.
    """
    decayed = {canonical_name(name, model) for name in decay_names}
    survey = found() if rates.parts else None
    members: dict[tuple[Any, ...], _Members] = {}
    used_parts: set[Part | None] = set()
    used_groups: set[RateGroup | None] = set()
    for raw_name, parameter in model.named_parameters():
        name = canonical_name(raw_name, model)
        # The last one that matches, as in routes= and layouts=.
        group = next((group for group in reversed(groups) if group.matches(name)), None)
        part = None if survey is None or name in muon_names else part_of(name, parameter, survey)
        part = part if part in rates.parts else None
        if parameter.requires_grad:
            used_parts.add(part)
            used_groups.add(group)
        key = (None if group is None else groups.index(group), part, name not in decayed)
        entry = members.setdefault(key, _Members(group=group, part=part, decays=name in decayed))
        entry.parameters.append(parameter)
    _check_used([part for part in rates.parts if part not in used_parts], [g for g in groups if g not in used_groups])
    trained = [entry for entry in members.values() if any(parameter.requires_grad for parameter in entry.parameters)]
    return [_as_param_group(entry, rates) for entry in sorted(trained, key=_order(groups))]


def _order(groups: Sequence[RateGroup]) -> Callable[[_Members], tuple[Any, ...]]:
    """What no group chose comes first, since the Trainer logs the rate of the first group."""

    def order(entry: _Members) -> tuple[Any, ...]:
        place = -1 if entry.group is None else groups.index(entry.group)
        return place, entry.part or "", not entry.decays

    return order


def _check_used(parts: Sequence[Part], groups: Sequence[RateGroup]) -> None:
    if parts:
        names = ", ".join(f"{part}_lr" for part in parts)
        raise ConfigurationError(
            f"{names} would have no effect: no weight that AdamW trains is of that part (a head that is "
            "tied to the embedding counts as embedding); leave it out"
        )
    if groups:
        raise ConfigurationError(
            f"these param_groups hold no trainable parameter of the model: {[group.name for group in groups]}; "
            "patterns are matched against names as dmuon_hf.routes(model) lists them, and where several match a name "
            "the last one counts"
        )


def _as_param_group(entry: _Members, rates: Rates) -> dict[str, Any]:
    said = {} if entry.group is None else dict(entry.group.settings)
    factor = said.pop("lr_factor", 1.0)
    part_lr = None if entry.part is None else rates.parts[entry.part]
    options = {key: value for key, value in said.items() if not key.endswith("lr") and "decay" not in key}
    return {
        "params": entry.parameters,
        "group_name": entry.name,
        **options,
        "muon_lr": factor * _first(said.get("muon_lr"), said.get("lr"), rates.muon_lr),
        "adamw_lr": factor * _first(said.get("adamw_lr"), said.get("lr"), part_lr, rates.adamw_lr),
        **dict(_decays(said, rates, decays=entry.decays)),
    }


def _decays(said: Mapping[str, Any], rates: Rates, *, decays: bool) -> Iterator[tuple[str, float]]:
    for key in ("muon_weight_decay", "adamw_weight_decay"):
        yield key, _first(said.get(key), said.get("weight_decay"), getattr(rates, key)) if decays else 0.0


def _first(*candidates: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in candidates if value is not None), None)
