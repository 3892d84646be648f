"""Whether the optimizer's groups hold what the model trains: by identity, at construction and in every step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from dmuon_hf.core.errors import ConfigurationError, LockstepError
from dmuon_hf.core.optim.interfaces import OptimizerRuntime
from dmuon_hf.core.runtime import require_runtime, runtime_of
from dmuon_hf.core.runtime.fingerprint import Fingerprint, Place, places_of
from dmuon_hf.core.runtime.integrity import raise_first, raise_together, shown
from dmuon_hf.core.runtime.replica_check import check_equal_start, check_replicas, debug_enabled

__all__ = [
    "Binding",
    "check_equal_start",
    "check_rebindable",
    "check_replicas",
    "debug_enabled",
    "is_dedicated",
    "runtime_with_matrices",
]


def is_dedicated(model: nn.Module) -> bool:
    """Whether ``dedicate_params`` was called on the model."""
    return runtime_of(model) is not None


def runtime_with_matrices(model: nn.Module) -> OptimizerRuntime:
    """The runtime of a model with at least one dedicated matrix, or stack, that the model still uses.

    Collective.

    Raises:
        ConfigurationError: There is none, or the model was edited after ``dedicate_params``: on every rank.
    """
    runtime: OptimizerRuntime = require_runtime(model)
    if not runtime.dedicated and not runtime.stacks:
        raise ConfigurationError(
            "dedicate_params() selected no matrix, so Muon would update none: widen its predicate, or use AdamW"
        )
    raise_together(runtime, runtime.misplaced(model))
    return runtime


def check_rebindable(
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    by_name: Mapping[str, nn.Parameter],
    muon_names: Collection[str],
) -> None:
    """Raise ``ConfigurationError`` unless groups of ``names`` fit a model with trainable parameters ``by_name``."""
    grouped = {name for group_names in names for name in group_names}
    gone = sorted(grouped - by_name.keys())
    loose = sorted(by_name.keys() - grouped)
    if gone or loose:
        raise ConfigurationError(
            f"the model's trainable parameters changed: not found {gone}, in no group {loose}. Build a new Muon for it."
        )
    moved = [
        name
        for group, group_names in zip(groups, names, strict=True)
        for name in group_names
        if (name in muon_names) != (group["route"] == "muon")
    ]
    if moved:
        raise ConfigurationError(
            f"parameters changed their route: {moved}. Dedicate the model with the predicate that the optimizer was "
            "built with."
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """What a rank found out about its model before a step."""

    problems: Mapping[str, str] = field(default_factory=dict)
    """Why the step must not run, by parameter."""
    trainable: tuple[str, ...] = ()
    """Names of what trains on this rank."""
    joined: tuple[nn.Parameter, ...] = ()
    """Parameters that were put into a group just now."""
    changed: str = ""
    """Why the step must not run with the groups as they are."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing speaks against the step on this rank."""
        return not self.problems and not self.changed

    @property
    def digest(self) -> tuple[int, int]:
        """Two numbers that fp32 holds exactly; equal where the same parameters train."""
        high, low = divmod(zlib.crc32("\n".join(self.trainable).encode()), 1 << 16)
        return high, low


class Binding:
    """The model that an optimizer belongs to, as it was when the groups were made for it.

    Made on every rank at construction and by ``rebind``; no method communicates but :meth:`explain`.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: OptimizerRuntime,
        waiting: Sequence[Collection[str]],
        muon: Collection[int],
        predicate: Callable[[str, nn.Parameter], bool] | None = None,
    ) -> None:
        self._model, self._runtime, self._waiting = model, runtime, waiting
        self._muon = frozenset(muon)
        # Matrices that Muon updates where they are, or would if they had not been frozen.
        frozen = ((found[0].name, found[0].param) for found in places_of(model).values())
        self._left_frozen = set(runtime.left_frozen) | {
            name for name, param in frozen if predicate and not param.requires_grad and predicate(name, param)
        }
        # Strong references, so that no other parameter can take over an id.
        self._at_start = Fingerprint(model)
        self._attributes = {key: _attributes(found) for key, found in places_of(model).items()}
        self._dtypes = {id(param): param.dtype for param in self._at_start.params}
        self._latest: Fingerprint | None = None
        self._findings = Findings()

    def inspect(self, groups: Sequence[Mapping[str, Any]], names: Sequence[list[str]], changed: str = "") -> Findings:
        """What is wrong with the model now; puts parameters that were unfrozen since into their groups.

        Cheap while nothing changes: [Note: cost of the fingerprint].

        Args:
            groups: The optimizer's groups.
            names: Canonical names of their parameters.
            changed: What is wrong with the groups themselves, if anything.
        """
        if changed:
            self._latest, self._findings = None, Findings(changed=changed)
            return self._findings
        if self._latest is not None and self._latest.is_current():
            return self._findings
        found, unfrozen = self._look(groups, names)
        self._latest, self._findings = Fingerprint(self._model), found
        if found.problems or not unfrozen:
            return found
        joined = [self._join(groups, names, name, param, index) for name, (param, index) in unfrozen.items()]
        return replace(found, joined=tuple(joined))

    def _join(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[list[str]], name: str, param: nn.Parameter, i: int
    ) -> nn.Parameter:
        """Put a parameter where it would be had it been trainable from the start: state dicts go by the position."""
        order = {found[0].name: position for position, found in enumerate(places_of(self._model).values())}
        before = sum(order.get(other, -1) < order[name] for other in names[i])
        names[i].insert(before, name)
        groups[i]["params"].insert(before, param)
        return param

    def _look(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
    ) -> tuple[Findings, dict[str, tuple[nn.Parameter, int]]]:
        """What is wrong, and what was unfrozen, by name, with the index of its group."""
        runtime = self._runtime
        problems = dict(runtime.misplaced(self._model))
        owned = {id(matrix.param) for matrix in runtime.dedicated.values()}
        held = {id(param) for group in groups for param in group["params"]}
        places = places_of(self._model)
        for group, group_names in zip(groups, names, strict=True):
            for param, name in zip(group["params"], group_names, strict=True):
                if param.requires_grad and id(param) not in places and id(param) not in owned:
                    problems.setdefault(name, "the parameter that the optimizer holds is no longer in the model")
        trainable = []
        unfrozen: dict[str, tuple[nn.Parameter, int]] = {}
        for key, found in places.items():
            param, name = found[0].param, found[0].name
            if not param.requires_grad:
                continue
            trainable.append(name)
            problem = runtime.unsynchronised(param) or self._problem(found, held, is_owned=key in owned)
            if problem is None and key not in held:
                route = "muon" if key in self._muon else "adamw"
                index = self._group_of(groups, name, route)
                if index is None:
                    problem = f"it was unfrozen, and no group of the {route} route lists it: name it in param_groups"
                else:
                    unfrozen[name] = (param, index)
            if problem is not None:
                problems.setdefault(name, problem)
        return Findings(problems, tuple(trainable)), unfrozen

    def _group_of(self, groups: Sequence[Mapping[str, Any]], name: str, route: str) -> int | None:
        """Index of the group that a frozen parameter waits for."""
        fitting = (i for i, group in enumerate(groups) if group["route"] == route and name in self._waiting[i])
        return next(fitting, None)

    def _problem(self, found: list[Place], held: Collection[int], *, is_owned: bool) -> str | None:
        """Why a trainable parameter would not train, or not as the optimizer was told."""
        key = id(found[0].param)
        if key not in self._attributes:
            return "it was added to the model after the optimizer was created, so that no group holds it"
        if is_owned:
            return None
        if found[0].name in self._left_frozen and id(found[0].param) not in held:
            return (
                "it was frozen when the predicate selected it, so that it would train with AdamW instead of Muon: "
                "freeze it after dedicate_params() and the optimizer, or leave it out of the predicate"
            )
        if _attributes(found) != self._attributes[key]:
            return "the modules that use it, or how they do, changed after the optimizer was created"
        if found[0].param.dtype is not self._dtypes[key]:
            return (
                f"it was cast from {self._dtypes[key]} to {found[0].param.dtype} after the optimizer was created: cast "
                "the model before dedicate_params()"
            )
        return None

    def explain(self) -> None:
        """Raise what is wrong on some rank. Collective, called on all ranks once one of them found something.

        Raises:
            ConfigurationError: The model or a group of some rank was edited.
            LockstepError: Other parameters train on some rank than on another.
        """
        findings = self._findings
        if changed := next(filter(None, self._runtime.exchange(findings.changed)), ""):
            raise ConfigurationError(changed)
        raise_first(self._runtime.exchange(shown(findings.problems)))
        everywhere = self._runtime.exchange(findings.trainable)
        for rank, theirs in enumerate(everywhere[1:], start=1):
            difference = sorted(set(everywhere[0]).symmetric_difference(theirs))
            if difference:
                here, there = (0, rank) if difference[0] in everywhere[0] else (rank, 0)
                raise LockstepError(
                    f"{difference[0]} is trainable on data-parallel rank {here} and not on rank {there}: freeze and "
                    "unfreeze parameters on every rank alike, before the forward of the same step"
                )


def _attributes(found: Sequence[Place]) -> list[str]:
    return sorted(place.attribute for place in found)
