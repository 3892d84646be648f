"""`describe`: what is updated how, and who owns it, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from dmuon_hf.core.plan import MatrixSpec, canonical_name, stored_matrices
from dmuon_hf.core.runtime import Runtime, runtime_of
from dmuon_hf.prepare import muon_of
from dmuon_hf.presets import Route, routes
from dmuon_hf.text_table import joined, text_table

__all__ = ["describe"]

_SHOWN_OWNERS = 32
_HEADER = ("parameter", "shape", "route", "group", "lr", "decay", "layout", "owner", "why")


def describe(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    overrides: Mapping[str, str] | None = None,
) -> str:
    """Table of every parameter: route, group, learning rate, weight decay, logical matrices, owner and reason.

    Local: any rank may call it, and all get the same text. Without an optimizer, or before `accelerator.prepare`, the
    columns that are not known yet stay empty. Parameters that differ only in the number of their layer share a row, and
    so do the like vectors of a layer; owners are listed as `shard` or `shard/replicate` coordinates. Learning rate and
    decay are those before any schedule. No line is longer than 120 characters: cells are wrapped in their column, and
    a name that is too long stands above its row.

    Args:
        model: the model, before or after it is prepared.
        optimizer: its optimizer, wrapped by accelerate or not.
        overrides: as `routes=` of `create`, for a model that has no owners yet.
    """
    table = routes(model, overrides=overrides)
    runtime = runtime_of(model)
    specs = _specs_in_use(runtime, optimizer)
    if specs is not None:
        table = {name: _as_used(route, specs.get(name)) for name, route in table.items()}
    groups = _groups(model, optimizer)
    rows: dict[tuple[str, ...], list[str]] = {}
    for raw_name, parameter in model.named_parameters():
        name = canonical_name(raw_name, model)
        owner = _owner(runtime, name)
        route, group = table[name], groups.get(name)
        cells = (
            _without_layer_number(name),
            "x".join(map(str, parameter.shape)),
            route.route,
            "" if group is None else str(group.get("group_name", "")),
            "" if group is None else f"{float(group.get('initial_lr', group['lr'])):.3g}",
            "" if group is None else f"{float(group.get('own_weight_decay', group.get('weight_decay', 0.0))):.3g}",
            _layout(route.spec, tuple(parameter.shape)),
            route.reason,
        )
        rows.setdefault(cells, []).append(owner)
    lines = [(*cells[:-1], _distinct(owners), cells[-1]) for cells, owners in rows.items()]
    return "\n".join([*_summary(model, table, runtime), *_normuon(groups), "", *text_table([_HEADER, *_folded(lines)])])


def _folded(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """`rows` with the vectors of one layer in one row, where names differ in one part and all else is the same."""
    folded: list[tuple[list[tuple[str, ...]], tuple[str, ...]]] = []
    for name, *cells in rows:
        parts: list[tuple[str, ...]] = [(part,) for part in name.split(".")]
        is_vector = "*" in name and "x" not in cells[0]
        for index, (others, same) in enumerate(folded if is_vector else ()):
            merged = _merged(others, parts) if same == tuple(cells) else None
            if merged is not None:
                folded[index] = (merged, same)
                break
        else:
            folded.append((parts, tuple(cells)))
    return [(".".join(map(_braced, parts)), *cells) for parts, cells in folded]


def _merged(first: list[tuple[str, ...]], second: list[tuple[str, ...]]) -> list[tuple[str, ...]] | None:
    """One name for two that differ in one part, None for others."""
    if len(first) != len(second):
        return None
    different = [index for index, (one, other) in enumerate(zip(first, second, strict=True)) if one != other]
    if len(different) != 1:
        return None
    (place,) = different
    return [*first[:place], first[place] + second[place], *first[place + 1 :]]


def _braced(part: tuple[str, ...]) -> str:
    return part[0] if len(part) == 1 else "{" + ",".join(part) + "}"


def _owner(runtime: Runtime | None, name: str) -> str:
    """Coordinate of the owner of a dedicated parameter; empty for others and in a single process."""
    if runtime is None or not runtime.topology.is_distributed or name not in runtime.dedicated:
        return ""
    dedicated = runtime.dedicated[name]
    return "all, rows" if dedicated.is_sharded else _coordinate(dedicated.owner_rank)


def _specs_in_use(runtime: Runtime | None, optimizer: torch.optim.Optimizer | None) -> dict[str, MatrixSpec] | None:
    """Logical matrices of what Muon really updates, by canonical name; None where nobody has chosen yet."""
    muon = muon_of(optimizer)
    if muon is not None:
        return {name: spec for source in muon.sources for name, spec in source.specs.items()}
    if runtime is None:
        return None
    owned = {name: matrix.spec for name, matrix in runtime.dedicated.items() if matrix.route == "muon"}
    return owned | dict(runtime.stacks)


def _as_used(route: Route, spec: MatrixSpec | None) -> Route:
    """What a parameter's route really is, which a predicate may have chosen against the presets."""
    if spec is not None:
        return Route("muon", spec, route.reason if route.route == "muon" else "chosen by the caller")
    return Route("adamw", None, "chosen by the caller") if route.route == "muon" else route


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Any]]:
    """Canonical parameter name -> its group in the optimizer."""
    if optimizer is None:
        return {}
    by_id = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    named = ((canonical_name(name, model), by_id.get(id(p))) for name, p in model.named_parameters())
    return {name: group for name, group in named if group is not None}


def _summary(model: nn.Module, table: dict[str, Route], runtime: Any) -> list[str]:
    sizes = {canonical_name(name, model): parameter.numel() for name, parameter in model.named_parameters()}
    everything = max(1, sum(sizes.values()))
    counts, shares = [], []
    for route in ("muon", "adamw", "frozen"):
        names = [name for name, entry in table.items() if entry.route == route]
        if names:
            elements = sum(sizes[name] for name in names)
            counts.append(f"{route} {len(names)} parameters ({elements:,} elements)")
            shares.append(f"{route} {100 * elements / everything:.1f} %")
    lines = [*joined(f"{type(model).__name__}: ", counts), *joined("of the elements: ", shares)]
    return lines if runtime is None or not runtime.topology.is_distributed else [*lines, *_owned(runtime)]


def _normuon(groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The groups that NorMuon updates, if any."""
    names = [str(group["group_name"]) for group in groups.values() if group.get("update_rule") == "normuon"]
    return joined("updated by NorMuon: ", dict.fromkeys(names)) if names else []


def _owned(runtime: Runtime) -> list[str]:
    """What each owner has; of many owners only the least and the most."""
    topology = runtime.topology
    loads: dict[Any, int] = {}
    for dedicated in (matrix for matrix in runtime.dedicated.values() if not matrix.is_sharded):
        loads[dedicated.owner_rank] = loads.get(dedicated.owner_rank, 0) + dedicated.numel
    if len(loads) > _SHOWN_OWNERS:
        owned = [f"{min(loads.values()):,} to {max(loads.values()):,} on {len(loads)} owners"]
    else:
        owned = [f"{_coordinate(owner)}: {loads[owner]:,}" for owner in sorted(loads)]
    head = f"owners on {topology.shard_size} shards x {topology.replicate_size} replicas, elements each: "
    return joined(head, owned)


def _layout(spec: MatrixSpec | None, shape: tuple[int, ...]) -> str:
    """`2 of 64x64, 1 of 32x64`, or empty for a plain matrix."""
    if spec is None or (spec.sections is None and not spec.transposed and len(shape) == 2):
        return ""
    members, stored = stored_matrices(shape, spec)
    counts: dict[tuple[int, int], int] = {}
    for logical in spec.logical_shapes(stored):
        counts[logical] = counts.get(logical, 0) + members
    text = ", ".join(f"{count} of {rows}x{columns}" for (rows, columns), count in counts.items())
    return text + (" (stored transposed)" if spec.transposed or spec.sections_transposed else "")


def _without_layer_number(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _coordinate(owner: int | tuple[int, int]) -> str:
    return str(owner) if isinstance(owner, int) else "/".join(map(str, owner))


def _distinct(owners: Iterable[str]) -> str:
    """Distinct owners in order of appearance, at most six of them."""
    distinct = list(dict.fromkeys(owner for owner in owners if owner))
    return " ".join(distinct[:6]) + (" ..." if len(distinct) > 6 else "")
