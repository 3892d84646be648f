"""Layouts of fused weights: which rows of one stored projection belong to which logical matrix.

A layout is a function of a `Projection`, the stored rows and the module around them, to a `MatrixSpec`. Head counts and
sizes are read from that module, else from the nearest configuration. `NAMED` are those that a user can ask for by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.hook_boundaries import ancestors
from dmuon_hf.core.plan import MatrixSpec, stored_matrices
from dmuon_hf.linears import is_conv1d

__all__ = [
    "NAMED",
    "Layout",
    "Projection",
    "attribute_of",
    "config_around",
    "each_head",
    "named_layout",
    "projection_of",
]


def config_around(name: str, modules: Mapping[str, nn.Module]) -> Iterator[Any]:
    """Configurations of the modules around a parameter, innermost first."""
    for path in (*ancestors(name), ""):
        config = getattr(modules.get(path), "config", None)
        if config is not None:
            yield config


def attribute_of(owner: Any, name: str) -> Any:
    """An attribute of a module or configuration, None without one, or where it differs from layer to layer."""
    try:
        return getattr(owner, name, None)
    except RuntimeError:  # what a configuration of unlike layers raises
        return None


@dataclass(frozen=True, slots=True)
class Projection:
    """One stored weight: its name, output rows, whether it is stored `(in, out)`, and who uses it.

    `callers` are the modules that call its layer, each with the attribute by which it knows the layer (`qkv_proj`),
    innermost first: those that only wrap the layer, which then is their `linear`, and the one that uses what comes out.
    A weight that a module multiplies by itself, like `in_proj_weight`, is its own layer. `shape` is the stored one.
    """

    name: str
    rows: int
    transposed: bool
    callers: tuple[tuple[nn.Module, str], ...]
    config: Any
    shape: tuple[int, ...] = ()

    @property
    def layer(self) -> str:
        """What the user of the output calls the layer."""
        return self.callers[-1][1] if self.callers else ""

    def number(self, *names: str) -> int:
        """The first of these attributes that the module around the weight has, else its configuration.

        Raises:
            ConfigurationError: neither has any of them.
        """
        for name in names:
            for owner in (*(caller for caller, _ in reversed(self.callers)), self.config):
                value = attribute_of(owner, name)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        raise ConfigurationError(
            f"the layout of {self.name!r} needs one of {', '.join(names)}, which the module around it and its "
            "configuration do not have: give the layout as a MatrixSpec"
        )

    @property
    def heads(self) -> int:
        return self.number("num_heads", "num_attention_heads", "n_heads", "n_head")

    @property
    def key_value_heads(self) -> int:
        try:
            return self.number("num_key_value_heads", "num_kv_heads", "n_kv_heads")
        except ConfigurationError:
            return self.heads

    def sections(self, *sections: int, groups: int = 1) -> MatrixSpec:
        """A spec of these rows. Sections without rows are left out."""
        present = tuple(rows for rows in sections if rows > 0)
        return MatrixSpec(groups=groups, sections=present, transposed=self.transposed)


def projection_of(name: str, parameter: nn.Parameter, modules: Mapping[str, nn.Module]) -> Projection:
    """What the layouts need to know about a weight. `modules` are those of the model, by canonical name."""
    path, _, leaf = name.rpartition(".")
    holder = modules[path]
    transposed = is_conv1d(holder)
    return Projection(
        name=name,
        rows=parameter.shape[-1 if transposed else 0],
        transposed=transposed,
        callers=tuple(_callers(path, leaf, modules)),
        config=next(config_around(name, modules), None),
        shape=tuple(parameter.shape),
    )


def _callers(path: str, leaf: str, modules: Mapping[str, nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    if leaf != "weight":
        yield modules[path], leaf
        return
    layer = "linear"
    while layer == "linear" and path:
        path, _, layer = path.rpartition(".")
        yield modules[path], layer


Layout = Callable[[Projection], MatrixSpec]


def whole(it: Projection) -> MatrixSpec:
    """One matrix."""
    return MatrixSpec(transposed=it.transposed)


def halves(it: Projection) -> MatrixSpec:
    """Rows `[gate | up]`, `[key | value]`, or any other two of one size."""
    return it.sections(it.rows // 2, it.rows // 2)


def thirds(it: Projection) -> MatrixSpec:
    """Rows of three roles of one size."""
    return it.sections(*[it.rows // 3] * 3)


def alternating(it: Projection) -> MatrixSpec:
    """Rows of two roles in turn: gate, up, gate, up, ..."""
    return it.sections(1, 1, groups=it.rows // 2)


def qkv(it: Projection) -> MatrixSpec:
    """Rows `[all query heads | all key heads | all value heads]`."""
    try:
        heads, shared = it.heads, it.key_value_heads
    except ConfigurationError:
        return thirds(it)
    if heads == shared or it.rows % (heads + 2 * shared):
        return thirds(it)
    size = it.rows // (heads + 2 * shared)
    return it.sections(heads * size, shared * size, shared * size)


def qkv_per_head(it: Projection) -> MatrixSpec:
    """Rows `[query | key | value]` of head 0, then of head 1, ..."""
    size = it.rows // (3 * it.heads)
    return it.sections(size, size, size, groups=it.heads)


def qkv_of_one_head(it: Projection) -> MatrixSpec:
    """Rows `[all query heads | key | value]`, with one head of keys for all queries."""
    size = it.rows // (it.heads + 2)
    return it.sections(it.heads * size, size, size)


def qkv_per_key_value_head(it: Projection) -> MatrixSpec:
    """Per head of keys `[its queries | key | value]`."""
    heads, shared = it.heads, it.key_value_heads
    size = it.rows // (heads + 2 * shared)
    return it.sections(heads // shared * size, size, size, groups=shared)


def halves_per_head(it: Projection) -> MatrixSpec:
    """Rows `[query | output gate]` of head 0, then of head 1, ..."""
    size = it.rows // (2 * it.heads)
    return it.sections(size, size, groups=it.heads)


def latent_and_rotary(it: Projection) -> MatrixSpec:
    """Multi-head latent attention: rows `[compressed keys and values | rotary key]`."""
    rotary = it.number("qk_rope_head_dim")
    return it.sections(it.rows - rotary, rotary)


def key_value_per_head(it: Projection) -> MatrixSpec:
    """Multi-head latent attention: rows `[key without position | value]` of head 0, then of head 1, ..."""
    key, value = it.number("qk_nope_head_dim"), it.number("v_head_dim")
    return it.sections(key, value, groups=it.rows // (key + value))


def selective_scan_parameters(it: Projection) -> MatrixSpec:
    """Mamba: rows `[step size, low-rank | B | C]`."""
    state = it.number("ssm_state_size")
    return it.sections(it.rows - 2 * state, state, state)


def state_space_input(it: Projection) -> MatrixSpec:
    """Mamba 2: rows `[gate | input | B | C | step size, one per head]`."""
    inner = it.number("intermediate_size", "mamba_intermediate")
    state = it.number("n_groups") * it.number("ssm_state_size")
    return it.sections(inner, inner, state, state, it.rows - 2 * inner - 2 * state)


def gated_delta(it: Projection) -> MatrixSpec:
    """Rows `[all query heads | all key heads | all value heads]` of a gated delta rule."""
    key = it.number("key_dim")
    return it.sections(key, key, it.rows - 2 * key)


def gated_delta_per_key_head(it: Projection) -> MatrixSpec:
    """Per head of keys `[query | key | its values | their output gates]`."""
    groups, key = it.number("num_k_heads"), it.number("head_k_dim")
    value = (it.rows // groups - 2 * key) // 2
    return it.sections(key, key, value, value, groups=groups)


_ATTENTION = re.compile(r"^(q|k|v|query|key|value|qkv|c_attn|Wqkv|query_key_value|in_proj_weight)(_proj|_lin|_head)?$")


def each_head(it: Projection, spec: MatrixSpec) -> MatrixSpec:
    """The layout of a projection to queries, keys or values with every head a matrix; any other's as it is.

    Heads follow one another in every known layout, so cutting the rows by the size of a head serves fused and plain
    projections alike.
    """
    if not _ATTENTION.match(it.layer):
        return spec
    try:
        size = it.number("head_dim", "head_size", "attention_head_size", "d_kv", "key_value_proj_dim")
    except ConfigurationError:
        size = it.number("hidden_size", "d_model", "embed_dim", "n_embd") // it.heads
    rows = stored_matrices(it.shape, spec)[1][-1 if spec.transposed else 0] if spec.folded else it.rows
    if rows % size:
        raise ConfigurationError(f"per_head: {rows} rows of {it.name!r} are not heads of {size}")
    return MatrixSpec(sections=(size,) * (rows // size), transposed=spec.transposed, folded=spec.folded)


NAMED: Mapping[str, Layout] = {
    "whole": whole,
    "qkv": qkv,
    "qkv_per_head": qkv_per_head,
    "qkv_per_key_value_head": qkv_per_key_value_head,
    "kv": halves,
    "gate_up": halves,
    "gate_up_alternating": alternating,
    "query_gate_per_head": halves_per_head,
}
"""What `layouts={pattern: name}` understands."""


def named_layout(name: str) -> Layout:
    """The layout that a user names.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if name not in NAMED:
        raise ConfigurationError(f"unknown layout {name!r}; give a MatrixSpec or one of {', '.join(NAMED)}")
    return NAMED[name]
