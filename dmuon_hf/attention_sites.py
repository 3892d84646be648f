"""Finds the attention of a model, and which rows of which weights make the queries and keys of which head.

[Note: what QK-clip multiplies] With `gamma = tau / S` of a query head whose largest logit `S` exceeds the threshold
`tau` (Kimi K2, arXiv 2507.20534, section 2.1), every product of its queries and keys has to shrink by `gamma`:

- multi-head attention: rows of its queries and of its keys by `sqrt(gamma)`;
- multi-head latent attention: rows of queries and keys without position by `sqrt(gamma)`, rows of the rotary query by
  `gamma`; the rotary key, which all heads share, stays;
- grouped and multi-query attention: the paper has no rule. A key is shared by several query heads there, like the
  rotary key above, so by the same principle it stays, and the rows of the queries are multiplied by `gamma`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dmuon_hf.attention_source import Reading, calls_interface, has_softmax, read
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.families import layout_of
from dmuon_hf.layouts import Projection, attribute_of, projection_of
from dmuon_hf.linears import is_linear
from dmuon_hf.survey import Survey

__all__ = ["AttentionSite", "Rows", "attention_sites"]

_QUERY = re.compile(r"^(q|query|Wq|linear_q|to_q)(_proj|_lin)?$")
_KEY = re.compile(r"^(k|key|Wk|linear_k|to_k)(_proj|_lin)?$")
_FUSED = re.compile(r"^(qkv|qkv_proj|query_key_value|c_attn|Wqkv)$")
_LATENT = ("q_b_proj", "q_proj"), "kv_b_proj"
_KEY_SECTION: Mapping[str, int] = {"CodeGenAttention.qkv_proj": 2}
"""Fused weights whose keys are not the second section."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one weight or bias, each with its query head and the power of gamma that it is multiplied by.

    Attributes:
        name: canonical name of the parameter.
        holder, attribute: where the model keeps it.
        dim: the dimension that counts rows, 1 for a weight that is stored `(in, out)`.
        head: query head of each row.
        power: power of each row; 0 for what stays.
    """

    name: str
    holder: nn.Module = field(repr=False)
    attribute: str
    dim: int
    head: Tensor = field(repr=False)
    power: Tensor = field(repr=False)

    @property
    def parameter(self) -> nn.Parameter:
        """What the model holds now; sharding replaces it."""
        found: nn.Parameter = getattr(self.holder, self.attribute)
        return found

    @property
    def trains(self) -> bool:
        """Whether it trains now; what is frozen may be unfrozen between steps."""
        return self.parameter.requires_grad


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """One attention module.

    Attributes:
        name: canonical name of the module.
        module: the module, first argument of the attention function.
        heads: query heads.
        shared: heads of keys that the attention function is given.
        rows: what is rescaled, while it trains.
    """

    name: str
    module: nn.Module = field(repr=False)
    heads: int
    shared: int
    rows: tuple[Rows, ...] = field(repr=False)


def attention_sites(found: Survey) -> tuple[list[AttentionSite], dict[str, str]]:
    """The attention modules whose logits rescaling can clip, and why others that train are left alone. Local.

    Returns:
        Sites in the order of the modules, also of frozen ones that could be clipped; and name -> reason of those that
        normalise their queries and keys, whose logits do not grow with the weights.

    Raises:
        ConfigurationError: attention of which it cannot be said, or done; all of it is named.
    """
    sites: list[AttentionSite] = []
    bounded: dict[str, str] = {}
    refused: dict[str, str] = {}
    seen: set[nn.Module] = set()
    for name, module in found.modules.items():
        if module in seen or not (calls_interface(module) or _attends_itself(module)):
            continue
        seen.add(module)
        try:
            site = _site(name, module, found)
        except _BoundedError as error:
            bounded[name] = str(error)
        except ConfigurationError as error:
            refused[name] = str(error)
        else:
            if site is not None:
                sites.append(site)
    _refuse_shared(sites, refused)
    if refused:
        shown = [f"{name}: {reason}" for name, reason in list(refused.items())[:4]]
        more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
        raise ConfigurationError(
            f"qk_clip cannot clip all attention that trains: {'; '.join(shown)}{more}. Leave qk_clip out, or freeze "
            "the queries and keys of these modules"
        )
    return sites, bounded


class _BoundedError(Exception):
    """Queries and keys are normalised behind their projections."""


def _attends_itself(module: nn.Module) -> bool:
    """Whether a module computes softmax attention of its own: not the linear attention of hybrid models.

    It has projections to queries and keys, or is called an attention and has several.
    """
    if isinstance(module, nn.MultiheadAttention):
        return True
    children = [name for name, _ in module.named_children()]
    linear = sum(map(is_linear, module.children()))
    named = "attention" in type(module).__name__.lower() and (linear >= 3 or "in_proj" in children)
    both = any(map(_QUERY.match, children)) and any(map(_KEY.match, children))
    return (named or both or any(map(_FUSED.match, children))) and has_softmax(module)


def _site(name: str, module: nn.Module, found: Survey) -> AttentionSite | None:
    """The site of a module; None where nothing of its queries and keys trains, nor could be clipped if it did."""
    children = dict(module.named_children())
    layers = [child for child in children if _is_projection(child)]
    holders = [children[layer] for layer in layers] or [module]
    if not any(parameter.requires_grad for holder in holders for parameter in holder.parameters()):
        return _frozen_site(name, module, layers, found)
    if any(hasattr(children[layer], "base_layer") for layer in layers):
        raise ConfigurationError("its queries or keys train through adapters, whose frozen weights would be rescaled")
    if not calls_interface(module):
        raise ConfigurationError(
            f"{type(module).__name__} does not attend through transformers' attention interface, so its logits cannot "
            "be seen"
        )
    site = _readable_site(name, module, layers, found)
    weights = [part for part in site.rows if part.attribute == "weight"]
    frozen = sorted({part.name for part in weights if not part.parameter.requires_grad})
    if frozen:
        raise ConfigurationError(f"{', '.join(frozen)} is frozen while others of its queries and keys train")
    return site


def _frozen_site(name: str, module: nn.Module, layers: list[str], found: Survey) -> AttentionSite | None:
    """The site of a module that is frozen, for when it is unfrozen; None where it could not be clipped."""
    try:
        return _readable_site(name, module, layers, found) if calls_interface(module) else None
    except (ConfigurationError, _BoundedError):
        return None


def _readable_site(name: str, module: nn.Module, layers: list[str], found: Survey) -> AttentionSite:
    rows, heads, shared = _rows(name, module, layers, found)
    _check_reading(read(module, layers), layers)
    return AttentionSite(name=name, module=module, heads=heads, shared=shared, rows=tuple(rows))


def _is_projection(child: str) -> bool:
    return any(pattern.match(child) for pattern in (_QUERY, _KEY, _FUSED)) or child in ("q_b_proj", "kv_b_proj")


def _check_reading(reading: Reading, layers: list[str]) -> None:
    if reading.problems:
        steps = ", ".join(sorted(reading.problems)[:3])
        if "norm" in steps.lower():
            raise _BoundedError(f"its queries and keys are normalised ({steps})")
        raise ConfigurationError(f"between projection and attention there is more than factors and rotations ({steps})")
    if (
        reading.calls == 0
        or not reading.queries
        or not reading.keys
        or not {*reading.queries, *reading.keys} <= {*layers}
    ):
        raise ConfigurationError("its code does not show how queries and keys come from their projections")


def _rows(name: str, module: nn.Module, layers: list[str], found: Survey) -> tuple[list[Rows], int, int]:
    """What is rescaled, the number of query heads, and that of key heads."""
    of = {layer: _projection(f"{name}.{layer}.weight", found) for layer in layers}
    if "kv_b_proj" in of:
        return _latent(of, found)
    fused = [layer for layer in layers if _FUSED.match(layer)]
    queries = [layer for layer in layers if _QUERY.match(layer)]
    keys = [layer for layer in layers if _KEY.match(layer)]
    if len(fused) == 1 and not queries and not keys:
        return _fused(of[fused[0]], module, fused[0], found)
    if len(queries) != 1 or len(keys) != 1 or fused:
        raise ConfigurationError(f"its queries and keys cannot be told apart ({', '.join(layers) or 'no layers'})")
    query, key = of[queries[0]], of[keys[0]]
    size, heads = _head_size(module, query)
    shared = _count(key.rows, size, key)
    powers = _powers(heads, shared)
    rows = [*_of(query, torch.arange(query.rows) // size, powers[0], found)]
    if powers[1]:
        rows += _of(key, torch.arange(key.rows) // size, powers[1], found)
    return rows, heads, shared


def _fused(it: Projection, module: nn.Module, layer: str, found: Survey) -> tuple[list[Rows], int, int]:
    spec = layout_of(it)
    if spec is None or spec.sections is None or len(spec.sections) != 3:
        raise ConfigurationError(f"which rows of its {layer} are queries and which keys is not known here")
    kinds = (f"{kind.__name__}.{layer}" for kind in type(module).__mro__)
    at = next((_KEY_SECTION[kind] for kind in kinds if kind in _KEY_SECTION), 1)
    block = torch.split(torch.arange(it.rows).view(spec.groups, -1), list(spec.sections), dim=1)
    queries, keys = block[0].flatten(), block[at].flatten()
    heads = it.heads
    size = _count(len(queries), heads, it)
    shared = _count(len(keys), size, it)
    powers = _powers(heads, shared)
    head, power = torch.zeros(it.rows, dtype=torch.long), torch.zeros(it.rows)
    head[queries], power[queries] = torch.arange(len(queries)) // size, powers[0]
    if powers[1]:
        head[keys], power[keys] = torch.arange(len(keys)) // size, powers[1]
    return [*_of(it, head, power, found)], heads, shared


def _latent(of: Mapping[str, Projection], found: Survey) -> tuple[list[Rows], int, int]:
    """Multi-head latent attention: per head rows `[without position | rotary]` of queries, `[key | value]` of both."""
    key = of["kv_b_proj"]
    query = next((of[layer] for layer in _LATENT[0] if layer in of), None)
    if query is None:
        raise ConfigurationError("it has latent keys without a projection of queries that is known here")
    plain, rotary, value = (key.number(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    heads = _count(query.rows, plain + rotary, query)
    if _count(key.rows, plain + value, key) != heads:
        raise ConfigurationError("its heads of queries and of latent keys differ in number")
    powers = torch.tensor([0.5] * plain + [1.0] * rotary).repeat(heads)
    rows = [*_of(query, torch.arange(query.rows) // (plain + rotary), powers, found)]
    powers = torch.tensor([0.5] * plain + [0.0] * value).repeat(heads)
    rows += _of(key, torch.arange(key.rows) // (plain + value), powers, found)
    return rows, heads, heads


def _projection(name: str, found: Survey) -> Projection:
    holder = found.modules[name.rpartition(".")[0]]
    weight = holder._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        raise ConfigurationError(f"{name} is no matrix")
    return projection_of(name, weight, found.modules)


def _head_size(module: nn.Module, query: Projection) -> tuple[int, int]:
    """Size and number of the heads of queries; the module says them, else its configuration."""
    for name in ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "attention_head_dim"):
        size = attribute_of(module, name)
        if isinstance(size, int):
            return size, _count(query.rows, size, query)
    heads = query.heads
    return _count(query.rows, heads, query), heads


def _count(rows: int, size: int, it: Projection) -> int:
    if size < 1 or rows % size:
        raise ConfigurationError(f"{rows} rows of {it.name} are not heads of equal size")
    return rows // size


def _powers(heads: int, shared: int) -> tuple[float, float]:
    """Powers of gamma for queries and keys; see [Note: what QK-clip multiplies]."""
    return (0.5, 0.5) if heads == shared else (1.0, 0.0)


def _of(it: Projection, head: Tensor, power: Tensor | float, found: Survey) -> Iterator[Rows]:
    """The weight of a projection and its bias, if it has one."""
    path = it.name.rpartition(".")[0]
    holder = found.modules[path]
    powers = power if isinstance(power, Tensor) else torch.full(head.shape, power)
    yield Rows(it.name, holder, "weight", int(it.transposed), head, powers)
    if holder._parameters.get("bias") is not None:
        yield Rows(f"{path}.bias", holder, "bias", 0, head, powers)


def _refuse_shared(sites: list[AttentionSite], refused: dict[str, str]) -> None:
    """A parameter in two sites, or in two roles of one, would be rescaled twice."""
    holder: dict[int, str] = {}
    for site in sites:
        for rows in site.rows:
            other = holder.setdefault(id(rows.parameter), rows.name)
            if other != rows.name:
                refused[site.name] = f"it shares {rows.name} with {other}"
