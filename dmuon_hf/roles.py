"""The role of a parameter in its model: what it is used for, which decides who updates it.

A role follows from the module that holds the parameter, its place in the model and the shape of what comes out of it;
names are asked only where modules of unlike use are built alike (a router is a linear layer).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from dmuon_hf.boundaries import HookBoundaries
from dmuon_hf.core.hook_boundaries import ancestors
from dmuon_hf.families import is_known
from dmuon_hf.layouts import config_around
from dmuon_hf.linears import is_linear

__all__ = ["EXPERTS", "Role", "RoleKind", "role_of"]

RoleKind = Literal["projection", "expert stack", "router", "embedding", "other"]


@dataclass(frozen=True, slots=True)
class Role:
    """`kind` decides the route; `reason` says the role in one clause for people."""

    kind: RoleKind
    reason: str


_PROJECTION = Role("projection", "linear weight in a block")
EXPERTS = "stack of matrices (experts)"
_EXPERTS = Role("expert stack", EXPERTS)

_ROUTER_NAMES = frozenset({"gate", "shared_expert_gate", "router", "classifier_gate"})
_HEAD_COUNT = re.compile(r"^(n|num)_(\w+_)?heads?$|^heads$")
_HEAD_SIZE = re.compile(r"head_(\w_)?(dim|size)|(dim|size)_(per_)?head")
_POSITION_BIAS = re.compile(
    r"(relative|rel|continuous|position)_?(pos|position|attention)?\w*_?(bias|embeddings?|table)|^cpb"
)


def role_of(
    names: Sequence[str],
    parameter: nn.Parameter,
    modules: Mapping[str, nn.Module],
    boundaries: HookBoundaries,
    heads: tuple[nn.Module | None, nn.Module | None],
) -> Role:
    """Role of a parameter that the model holds under `names`, the first of them the canonical one."""
    holders = [modules[name.rpartition(".")[0]] for name in names]
    leaf = names[0].rpartition(".")[2]
    if any(holder is heads[0] or _is_embedding(holder) for holder in holders):
        return Role("embedding", "embedding")
    if heads[1] is not None and any(holder in heads[1].modules() for holder in holders):
        return Role("other", "output embedding")
    if parameter.ndim == 3 and not _is_convolution(holders[0]):
        return _stack_role(names[0], leaf, modules, boundaries)
    if parameter.ndim != 2 or min(parameter.shape) == 1:
        return Role("other", "not a matrix")
    if _is_router(names[0], modules):
        return Role("router", "router")
    if boundaries.block_name(names[0]) is None:
        return Role("other", "outside the transformer blocks")
    return _matrix_role(names[0], leaf, parameter, modules)


def _matrix_role(name: str, leaf: str, parameter: nn.Parameter, modules: Mapping[str, nn.Module]) -> Role:
    holder_name = name.rpartition(".")[0]
    holder = modules[holder_name]
    if any(_POSITION_BIAS.search(part) for part in holder_name.split(".")[-2:]):
        return Role("other", "position bias")
    if _is_expert(holder_name, modules) and not is_linear(holder):
        return Role("other", f"{leaf} of experts") if leaf.endswith("bias") else _EXPERTS
    if leaf == "in_proj_weight" and hasattr(holder, "out_proj"):
        return _PROJECTION
    if leaf != "weight" or not is_linear(holder):
        return Role("other", f"{leaf} of a {type(holder).__name__}")
    if _is_value_per_head(holder_name, parameter, modules):
        return Role("other", "one value per head, not a matrix")
    return _PROJECTION


def _stack_role(name: str, leaf: str, modules: Mapping[str, nn.Module], boundaries: HookBoundaries) -> Role:
    holder_name = name.rpartition(".")[0]
    if _is_expert(holder_name, modules):
        return _EXPERTS
    if is_known(modules[holder_name], leaf) and boundaries.block_name(name) is not None:
        return _PROJECTION
    return Role("other", f"3-D {leaf} of a {type(modules[holder_name]).__name__}")


def _is_expert(holder_name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module holds experts, or one of them: said by its name or its class, or by a router beside it."""
    around = [holder_name, *ancestors(holder_name)][:3]
    return any("expert" in (name.rpartition(".")[2] + type(modules[name]).__name__).lower() for name in around)


def _is_router(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the module that holds a parameter, or one around it, chooses what its input is sent to."""
    around = ancestors(name)
    own = around[0].rpartition(".")[2]
    if own in _ROUTER_NAMES or type(modules[around[0]]).__name__.endswith("Gate"):
        return True
    return any(
        path.rpartition(".")[2].endswith("router") or type(modules[path]).__name__.endswith("Router") for path in around
    )


def _is_value_per_head(holder_name: str, weight: nn.Parameter, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a projection puts out one number per head, or two: a gate, a decay, the weight of an indexer's head.

    Its rows are as many as the heads of the attention around it, or twice as many and few beside its columns; no head
    is that small, and no layer beside it reads them as features.
    """
    rows = weight.shape[0]
    parent = modules.get(holder_name.rpartition(".")[0])
    if parent is None:
        return False
    config = next(config_around(holder_name, modules), None)
    counts = {value for owner in (parent, config) for name, value in _integers(owner) if _HEAD_COUNT.search(name)}
    two_each = rows % 2 == 0 and rows // 2 in counts and 8 * rows <= weight.shape[1]
    if rows not in counts and not two_each:
        return False
    sizes = {value for name, value in _integers(parent) if _HEAD_SIZE.search(name)}
    shared = {value for name, value in _integers(parent) if "key_value_heads" in name or "kv_heads" in name}
    as_heads = {size * heads for size in sizes for heads in shared or counts}
    readers = {child.get_parameter("weight").shape[1] for child in parent.children() if is_linear(child)}
    return rows not in as_heads and rows not in readers


def _integers(owner: Any) -> Iterator[tuple[str, int]]:
    for name, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in type(module).__name__


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d))
