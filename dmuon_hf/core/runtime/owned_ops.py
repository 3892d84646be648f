"""Which aten operators are right on a tensor that lies whole on one rank, and how their arguments are laid out.

Pure tables and predicates over ``torch._ops.OpOverload``; :mod:`.owned_dispatch` acts on them. The lists are
allow-lists: an operator in none of them is refused, because off the owner it would compute on zero rows and look as
if it had worked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = [
    "is_draw",
    "is_elementwise",
    "is_foreach",
    "is_owner_scalar",
    "is_random",
    "is_view",
    "mutated_arguments",
]

aten = torch.ops.aten

# Results share storage with the argument, hence its content.
_VIEWS = frozenset({aten.alias.default, aten.detach.default})

# Shape-preserving, decided element by element, but without torch's `pointwise` tag.
_UNTAGGED_ELEMENTWISE = frozenset(
    {
        aten._to_copy.default,
        aten.clone.default,
        aten.empty_like.default,
        aten.fill.Scalar,
        aten.fill.Tensor,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.full_like.default,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor,
        aten.ones_like.default,
        aten.zero.default,
        aten.zero_.default,
        aten.zeros_like.default,
    }
)

# Whole-tensor statistics: the owner computes them and broadcasts one element.
_OWNER_SCALARS = frozenset(
    {
        aten.all.default,
        aten.amax.default,
        aten.amin.default,
        aten.any.default,
        aten.count_nonzero.default,
        aten.max.default,
        aten.mean.default,
        aten.mean.dim,
        aten.median.default,
        aten.min.default,
        aten.prod.default,
        aten.std.correction,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.var.correction,
    }
)

# Random numbers in the shape of the argument, written into it or as a new tensor.
_DRAWS = frozenset(
    {
        aten.bernoulli_.float,
        aten.cauchy_.default,
        aten.exponential_.default,
        aten.geometric_.default,
        aten.log_normal_.default,
        aten.normal_.default,
        aten.rand_like.default,
        aten.randint_like.default,
        aten.randint_like.low_dtype,
        aten.randn_like.default,
        aten.random_.default,
        getattr(aten.random_, "from"),
        aten.random_.to,
        aten.uniform_.default,
    }
)

_FOREACH_REDUCTIONS = ("aten::_foreach_max", "aten::_foreach_norm", "aten::_foreach_powsum")
_FUSED_OPTIMIZERS = ("aten::_fused_adagrad_", "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_")


def is_view(func: OpOverload) -> bool:
    """Whether the result is the argument itself under another handle."""
    return func in _VIEWS


def is_elementwise(func: OpOverload) -> bool:
    """Whether every element of the result depends on the same element of the arguments only."""
    tagged = torch.Tag.pointwise in func.tags and not is_random(func)
    return tagged or func in _VIEWS or func in _UNTAGGED_ELEMENTWISE


def is_draw(func: OpOverload) -> bool:
    """Whether the operator fills a tensor of the argument's shape with random numbers."""
    return func in _DRAWS


def is_random(func: OpOverload) -> bool:
    """Whether the operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def is_owner_scalar(func: OpOverload) -> bool:
    """Whether the operator is a statistic of the whole tensor that the owner can compute alone."""
    return func in _OWNER_SCALARS


def is_foreach(func: OpOverload) -> bool:
    """Whether the operator treats the i-th tensors of its list arguments together, independently of other indices."""
    name = func._schema.name
    return name in _FUSED_OPTIMIZERS or (name.startswith("aten::_foreach_") and name not in _FOREACH_REDUCTIONS)


def mutated_arguments(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors, lists flattened, that ``func`` writes to according to its schema."""
    if not func._schema.is_mutable:
        return
    for position, declared in enumerate(func._schema.arguments):
        if declared.alias_info is None or not declared.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(declared.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))
