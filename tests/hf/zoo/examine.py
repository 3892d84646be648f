"""What is said of one model of the zoo, and whether its own forward agrees."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from dmuon_hf import families
from dmuon_hf.core.hook_boundaries import is_called
from dmuon_hf.core.plan import MatrixSpec, stored_matrices
from dmuon_hf.layouts import projection_of
from dmuon_hf.presets import Route, routes
from dmuon_hf.stacks import STACKS
from dmuon_hf.survey import Survey, survey
from tests.hf.zoo.build import build
from tests.hf.zoo.drive import traced_roles

__all__ = ["COMPUTED", "Finding", "examine"]


COMPUTED = frozenset({"DbrxExpertGLU.v1", "DbrxExpertGLU.w1", "DbrxExpertGLU.w2"})
"""Layers of which a test computes the output from the matrices of their layout: no rows come out of all of them."""

_STACK = "expert stack"


@dataclass(slots=True)
class Finding:
    """`faults` are what is wrong; `fused` names the layers that hold several matrices, `adamw_experts` expert
    weights that AdamW updates.

    `elements` counts all, `muon` those of Muon weights, `experts` those of expert stacks; `blocks` are class names.
    """

    class_name: str
    blocks: tuple[str, ...] = ()
    elements: int = 0
    muon: int = 0
    experts: int = 0
    matrices: int = 0
    adamw_experts: set[str] = field(default_factory=set)
    fused: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


def examine(model_type: str, class_name: str, known: set[str]) -> Finding:
    """Build a class, ask for its routes, and follow its forward.

    Args:
        known: layers (`Class.attribute`) that the forward of another model has shown, which are not followed again;
            those that this one shows are added.

    Raises:
        NotBuildableError: as `build`.
    """
    model = build(model_type, class_name)
    found = survey(model)
    finding = Finding(class_name, blocks=found.block_classes)
    table = routes(model, found=found)
    for name, parameter in model.named_parameters():
        finding.elements += parameter.numel()
        if table[name].route == "muon":
            finding.muon += parameter.numel()
            spec = _spec(table[name])
            finding.matrices += spec.count * stored_matrices(parameter.shape, spec)[0]
        if found.roles[name].kind == _STACK:
            finding.experts += parameter.numel()
            if table[name].route != "muon":
                finding.adamw_experts.add(_label(found, name))
    _check_blocks(found, finding)
    _check_routes(found, table, finding)
    _check_layouts(found, table, finding, known)
    return finding


def _check_blocks(found: Survey, finding: Finding) -> None:
    blocks = found.boundaries.blocks
    for name, block in blocks.items():
        if not is_called(block):
            finding.faults.append(f"block {name} is never called")
        if any(part is not block and part in set(blocks.values()) for part in block.modules()):
            finding.faults.append(f"block {name} has blocks inside")


def _check_routes(found: Survey, table: Mapping[str, Route], finding: Finding) -> None:
    for name, route in table.items():
        if route.route == "muon" and found.boundaries.block_name(name) is None and found.roles[name].kind != _STACK:
            finding.faults.append(f"{name} is on Muon outside the blocks")
        if "not known here" in route.reason:
            finding.faults.append(f"{name} is split in a way not known")
        # A layer that repeats is part of a block: one outside would train with AdamW, silently.
        repeated = re.search(r"\.(layers?|blocks?|h)\.\d+\.", name)
        if route.reason == "outside the transformer blocks" and repeated and _calls_linear(found, name):
            finding.faults.append(f"{name} repeats outside the blocks")


def _calls_linear(found: Survey, name: str) -> bool:
    path = name.split(".")
    return isinstance(found.module_of(name), nn.Linear) and any(part in ("mlp", "attention") for part in path)


def _check_layouts(found: Survey, table: Mapping[str, Route], finding: Finding, known: set[str]) -> None:
    """Compare the logical matrices of one weight of every layer with the rows that arrive together."""
    first: dict[str, str] = {}
    for name, route in table.items():
        if route.route == "muon":
            first.setdefault(_label(found, name), name)
    finding.fused = {label for label, name in first.items() if _spec(table[name]).count > 1}
    known |= COMPUTED & finding.fused
    weights = {
        name: found.model.get_parameter(name)
        for label, name in first.items()
        if label not in known and not _spec(table[name]).folded
    }
    _follow(found, table, finding, known, weights)
    # Beside the output of another weight, as an adapter's, that of a fused one is followed by itself.
    for name, weight in weights.items():
        if _spec(table[name]).count > 1 and _label(found, name) not in known:
            _follow(found, table, finding, known, {name: weight})


def _follow(
    found: Survey,
    table: Mapping[str, Route],
    finding: Finding,
    known: set[str],
    weights: Mapping[str, nn.Parameter],
) -> None:
    fused = {name for name in weights if _spec(table[name]).count > 1}
    seen = traced_roles(found, weights, lambda name: _spec(table[name]).transposed, fused) if weights else {}
    for name in weights:
        if name not in seen:
            continue
        label = _label(found, name)
        spec, shown = _spec(table[name]), [set(rows.tolist()) for rows in seen[name]]
        rows = weights[name].shape[-1 if spec.transposed else -2]
        said = _matrices_of_rows(spec, rows)
        whole = len(shown) == 1 and len(next(iter(shown))) == rows
        if spec.count == 1 and len(shown) > 1 and label not in families.FUSED:
            finding.faults.append(f"{name}: one matrix, but its rows go {len(shown)} ways")
        elif not whole and not all(any(part <= matrix for matrix in said) for part in shown):
            finding.faults.append(f"{name}: {spec}, but rows of two of its matrices arrive together")
        elif len(shown) >= len(said):
            known.add(label)


def _label(found: Survey, name: str) -> str:
    """`Class.attribute` of the layer, by the class that the table of families knows where it knows any."""
    callers = projection_of(name, found.model.get_parameter(name), found.modules).callers
    labels = [f"{kind.__name__}.{layer}" for caller, layer in callers for kind in type(caller).__mro__]
    caller, layer = callers[-1]
    return next(
        (label for label in labels if label in families.FUSED or label in STACKS), f"{type(caller).__name__}.{layer}"
    )


def _matrices_of_rows(spec: MatrixSpec, rows: int) -> list[set[int]]:
    index = torch.arange(rows)[:, None]
    return [set(part.flatten().tolist()) for part in replace(spec, transposed=False).split(index)]


def _spec(route: Route) -> MatrixSpec:
    assert route.spec is not None
    return route.spec
