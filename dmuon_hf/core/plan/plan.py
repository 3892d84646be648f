"""The frozen plan of a model: every dedicated parameter with its logical matrices, its unit and its owner."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeAlias

import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan.cost import CostModel, elementwise_cost, matrix_cost
from dmuon_hf.core.plan.matrices import MatrixSpec, stored_matrices
from dmuon_hf.core.plan.partition import OwnerStrategy, Slot, WorkItem, assign_owners, imbalance

__all__ = ["SHARDED", "Candidate", "ParamEntry", "Plan", "Setting", "make_plan"]

SHARDED: Final = "sharded_adamw"
"""The route of parameters that nobody owns."""

Setting: TypeAlias = "str | int | float | bool | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A parameter to be dedicated, before it has an owner.

    Attributes:
        name: canonical name.
        aliases: other canonical names of the same parameter (tied weights).
        shape: stored shape.
        dtype: stored dtype.
        spec: its logical matrices.
        unit: name of the unit (hook boundary) that gathers it.
        group: assignment group, within which small parameters are packed and owners capped; the unit unless given.
        route: ``"muon"``, or ``"adamw"`` for a parameter of any shape whose owner updates it elementwise, or
            ``"sharded_adamw"`` for one that every rank has some rows of.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    spec: MatrixSpec = field(default_factory=MatrixSpec)
    aliases: tuple[str, ...] = ()
    group: str | None = None
    route: str = "muon"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamEntry:
    """One dedicated parameter of the plan: ``owner`` is (shard rank, replicate rank), ``cost`` in the plan's model.

    On the route ``"sharded_adamw"`` nobody is the owner, whose place is then that of the first rank, and the cost 0.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: MatrixSpec
    unit: str
    owner: Slot
    cost: int
    route: str = "muon"

    @property
    def numel(self) -> int:
        """Elements of the stored parameter."""
        return math.prod(self.shape)

    @property
    def logical_shapes(self) -> list[tuple[int, int]]:
        """The ``(out, in)`` shape of each logical matrix, of a stack member by member; none on the adamw route."""
        count, stored = stored_matrices(self.shape, self.spec)
        return self.spec.logical_shapes(stored) * count if self.route == "muon" else []

    def to_json(self) -> dict[str, Any]:
        """JSON form, read back by :meth:`from_json`."""
        return {
            "name": self.name,
            "aliases": list(self.aliases),
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "spec": self.spec.to_json(),
            "unit": self.unit,
            "owner": list(self.owner),
            "cost": self.cost,
            "route": self.route,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ParamEntry:
        """Inverse of :meth:`to_json`."""
        shard, replicate = data["owner"]
        return cls(
            name=data["name"],
            aliases=tuple(data["aliases"]),
            shape=tuple(data["shape"]),
            dtype=_dtype(data["dtype"]),
            spec=MatrixSpec.from_json(data["spec"]),
            unit=data["unit"],
            owner=(shard, replicate),
            cost=data["cost"],
            route=data.get("route", "muon"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank must agree on before the first step; equal exactly if the digests are equal.

    Attributes:
        entries: dedicated parameters, in model order.
        units: names of all units in execution order; every entry's unit is one of them.
        shard_size: ranks G of the shard dimension.
        replicate_size: ranks R of the replicate dimension, 1 without HSDP.
        settings: further options that decide which collectives run, as sorted pairs.
    """

    entries: tuple[ParamEntry, ...]
    units: tuple[str, ...]
    shard_size: int
    replicate_size: int = 1
    settings: tuple[tuple[str, Setting], ...] = ()

    def __post_init__(self) -> None:
        names = [name for entry in self.entries for name in (entry.name, *entry.aliases)]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) != len(names) else []
        if twice:
            raise ConfigurationError(f"parameter names occur twice in the plan: {twice}")
        if len(set(self.units)) != len(self.units):
            raise ConfigurationError(f"unit names must be unique, got {self.units}")
        known = set(self.units)
        for entry in self.entries:
            if entry.route == "muon":
                entry.spec.validate(stored_matrices(entry.shape, entry.spec)[1])
            if entry.unit not in known:
                raise ConfigurationError(
                    f"{entry.name} belongs to unit {entry.unit!r}, which is not among {self.units}"
                )
            shard, replicate = entry.owner
            if not (0 <= shard < self.shard_size and 0 <= replicate < self.replicate_size):
                raise ConfigurationError(
                    f"{entry.name}: owner {entry.owner} is outside a mesh of {self.shard_size} x {self.replicate_size}"
                )

    def entry(self, name: str) -> ParamEntry:
        """The entry of a canonical name or alias. Raises KeyError for a parameter that is not dedicated."""
        for entry in self.entries:
            if name == entry.name or name in entry.aliases:
                return entry
        raise KeyError(f"{name} is not a dedicated parameter")

    def unit_entries(self, unit: str) -> tuple[ParamEntry, ...]:
        """The entries of one unit, in model order."""
        return tuple(entry for entry in self.entries if entry.unit == unit)

    def flat_owner(self, entry: ParamEntry) -> int:
        """Owner's rank in the flattened (replicate, shard) mesh: ``replicate * shard_size + shard``."""
        shard, replicate = entry.owner
        return replicate * self.shard_size + shard

    def loads(self) -> list[int]:
        """Total cost per owner, by flat rank."""
        loads = [0] * (self.shard_size * self.replicate_size)
        for entry in self.entries:
            loads[self.flat_owner(entry)] += entry.cost
        return loads

    def imbalance(self) -> float:
        """How much the most loaded owner exceeds the mean, ``max / mean - 1``."""
        return imbalance(self.loads())

    def to_json(self) -> dict[str, Any]:
        """JSON form, read back by :meth:`from_json`."""
        return {
            "version": 1,
            "shard_size": self.shard_size,
            "replicate_size": self.replicate_size,
            "settings": dict(self.settings),
            "units": list(self.units),
            "entries": [entry.to_json() for entry in self.entries],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of :meth:`to_json`. Raises ConfigurationError for a format of another version."""
        if data.get("version") != 1:
            raise ConfigurationError(
                f"a plan of format version {data.get('version')} cannot be read: this release reads 1"
            )
        return cls(
            entries=tuple(ParamEntry.from_json(entry) for entry in data["entries"]),
            units=tuple(data["units"]),
            shard_size=data["shard_size"],
            replicate_size=data["replicate_size"],
            settings=tuple(sorted(data["settings"].items())),
        )

    def digest(self) -> str:
        """SHA-256 of the JSON form, in hex: equal plans have equal digests in every process."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def difference(self, other: Plan) -> str | None:
        """The first thing in which two plans differ, in words, or None if they are equal."""
        for name in ("shard_size", "replicate_size", "settings", "units"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine} here, {theirs} there"
        for mine, theirs in zip(self.entries, other.entries, strict=False):
            if mine.name != theirs.name:
                return f"order of parameters: {mine.name} here, {theirs.name} there"
            for attribute in fields(ParamEntry):
                here, there = getattr(mine, attribute.name), getattr(theirs, attribute.name)
                if here != there:
                    return f"{attribute.name} of {mine.name}: {here} here, {there} there"
        if len(self.entries) != len(other.entries):
            longer = max(self, other, key=lambda plan: len(plan.entries))
            extra = longer.entries[min(len(self.entries), len(other.entries))].name
            return f"{extra} is dedicated {'here' if longer is self else 'there'} only"
        return None


def make_plan(
    candidates: Sequence[Candidate],
    *,
    units: Sequence[str],
    shard_size: int,
    replicate_size: int = 1,
    owner_strategy: OwnerStrategy = "lpt",
    owner_cost_model: CostModel = "optimizer",
    hsdp_column_balance: bool = True,
    pack_small_params: bool = True,
    max_owners_per_group: int | None = None,
    settings: Mapping[str, Setting] | None = None,
) -> Plan:
    """Cost, place and freeze. Pure: the same arguments give the same plan on every rank.

    Args:
        candidates: the parameters to dedicate, in model order.
        units: all unit names in execution order.
        shard_size: ranks of the shard dimension.
        replicate_size: ranks of the replicate dimension, 1 without HSDP.
        owner_strategy, hsdp_column_balance, pack_small_params, max_owners_per_group: see :func:`assign_owners`.
        owner_cost_model: see :func:`matrix_cost`.
        settings: further options on which the ranks must agree; they enter the digest.

    Raises:
        ConfigurationError: for a candidate that is no matrix (the message names it), or invalid options.
    """
    items = [
        WorkItem(
            name=candidate.name,
            cost=_cost(candidate, owner_cost_model),
            numel=math.prod(candidate.shape),
            group=candidate.unit if candidate.group is None else candidate.group,
        )
        for candidate in candidates
        if candidate.route != SHARDED
    ]
    costs = {item.name: item.cost for item in items}
    owners = assign_owners(
        items,
        shard_size=shard_size,
        replicate_size=replicate_size,
        strategy=owner_strategy,
        column_balance=hsdp_column_balance,
        pack_small=pack_small_params,
        max_owners_per_group=max_owners_per_group,
    )
    entries = tuple(
        ParamEntry(
            name=candidate.name,
            aliases=candidate.aliases,
            shape=tuple(candidate.shape),
            dtype=candidate.dtype,
            spec=candidate.spec,
            unit=candidate.unit,
            owner=owners.get(candidate.name, (0, 0)),
            cost=costs.get(candidate.name, 0),
            route=candidate.route,
        )
        for candidate in candidates
    )
    return Plan(
        entries=entries,
        units=tuple(units),
        shard_size=shard_size,
        replicate_size=replicate_size,
        settings=tuple(sorted((settings or {}).items())),
    )


def _cost(candidate: Candidate, model: CostModel) -> int:
    if candidate.route != "muon":
        return elementwise_cost(math.prod(candidate.shape), model=model)
    try:
        return matrix_cost(candidate.shape, candidate.spec, model=model)
    except (ConfigurationError, NotImplementedError) as error:
        raise type(error)(f"{candidate.name}: {error}") from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"unknown dtype {name!r} in a plan")
    return dtype
