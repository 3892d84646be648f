"""The largest attention logit of every head, seen where a model calls its attention function.

Models of transformers ask `AttentionInterface.get_interface` for the function in every forward and call it with the
module, queries and keys as they are multiplied. While somebody watches modules, what they get notes the largest logits
before it calls the function itself. So the function, its masks and the configuration stay what they are, and `eager`,
`sdpa`, flash and flex attention are seen alike.

A logit is `scaling * <q, k>` of a pair that the mask lets meet, before softcapping, biases by position and sinks:
that is what rescaling weights rescales.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dmuon_hf.attention_pairs import Pairs, pairs_of
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.runtime.compiling import untraced_once_called

__all__ = ["HeadMaxima", "get_interface", "head_maxima", "stacked", "watch"]

BLOCK_NUMEL = 1 << 24
"""Logits that are held at once: 64 MiB in fp32, and twice that for an instant where a mask is applied."""


class HeadMaxima:
    """Largest logit of each head of one module since the last `take`, on this rank.

    Args:
        name: of the module, for messages.
        heads: query heads.
        shared: heads of keys.
        wanted: whether they are of use in this forward.
    """

    def __init__(self, name: str, heads: int, shared: int, wanted: Callable[[], bool]) -> None:
        self._name = name
        self.wanted = wanted
        self._heads, self._shared = heads, shared
        self._most: Tensor | None = None

    @torch.no_grad()
    def see(self, query: Tensor, key: Tensor, scaling: Any, pairs: Pairs) -> None:
        """Note the logits of one call: queries `(batch, heads, queries, size)`, keys `(batch, shared, keys, size)`.

        Raises:
            ConfigurationError: other numbers of heads than the weights have.
        """
        found = (query.shape[1], key.shape[1])
        if found != (self._heads, self._shared):
            raise ConfigurationError(
                f"{self._name} attends with {found[0]} heads of queries and {found[1]} of keys, but its weights have "
                f"{self._heads} and {self._shared}: qk_clip cannot tell which rows are whose; leave it out"
            )
        most = head_maxima(query, key, scaling, pairs)
        self._most = most if self._most is None else torch.maximum(self._most, most)

    def take(self) -> Tensor | None:
        """The maxima `(heads,)` in fp32, which are forgotten; None without a call."""
        most, self._most = self._most, None
        return most


_watched: WeakKeyDictionary[nn.Module, HeadMaxima] = WeakKeyDictionary()


def watch(module: nn.Module, name: str, heads: int, shared: int, wanted: Callable[[], bool]) -> HeadMaxima:
    """Note the logits of a module from now on; what watched it before sees no more."""
    _watched[module] = HeadMaxima(name, heads, shared, wanted)
    return _watched[module]


def get_interface(
    original: Callable[..., Callable[..., Any]], interface: Any, implementation: str | None, default: Any
) -> Callable[..., Any]:
    """`AttentionInterface.get_interface`: while modules are watched, a function that notes their logits first."""
    function = original(interface, implementation, default)
    if not _watched:
        return function

    @functools.wraps(function)
    def seen(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        _see(module, query, key, mask, implementation, kwargs)
        return function(module, query, key, *args, **kwargs)

    return seen


@untraced_once_called
def _see(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, implementation: str | None, arguments: Mapping[str, Any]
) -> None:
    """In training, and once: not again where checkpointing runs a forward anew inside of backward."""
    maxima = _watched.get(module)
    if maxima is None or not module.training or torch._C._current_graph_task_id() != -1 or not maxima.wanted():
        return
    pairs = pairs_of(module, query, key, mask, implementation, arguments)
    maxima.see(query, key, arguments.get("scaling"), pairs)


@torch.no_grad()
def head_maxima(query: Tensor, key: Tensor, scaling: Any, pairs: Pairs, block: int = BLOCK_NUMEL) -> Tensor:
    """Largest logit of each query head `(heads,)` in fp32, minus infinity for one without a pair; NaN stays NaN.

    As many products as the scores of attention once more, in the dtype of the queries, `block` logits at a time.

    Args:
        query: `(batch, heads, queries, size)`.
        key: `(batch, shared, keys, size)`; query head `h` meets key head `h // (heads / shared)`.
        scaling: what logits are multiplied by; None is `size ** -0.5`.
        pairs: of a range of queries.
        block: most logits at a time, but those of one query.
    """
    batch, heads, queries, size = query.shape
    shared, keys = key.shape[1], key.shape[2]
    scaling = size**-0.5 if scaling is None else scaling
    folded = query.reshape(batch, shared, heads // shared, queries, size)
    against = key.unsqueeze(2).mT
    most = torch.full((heads,), -math.inf, device=query.device)
    step = max(1, block // max(1, max(batch, key.shape[0]) * heads * keys))
    with torch.autocast(query.device.type, enabled=False):
        for start in range(0, queries, step):
            rows = slice(start, start + step)
            logits = (folded[..., rows, :] @ against).flatten(1, 2)
            if isinstance(scaling, Tensor):
                logits = logits * scaling
            allowed = pairs(rows)
            if allowed is not None:
                logits.masked_fill_(~allowed, -math.inf)
            most = torch.maximum(most, logits.amax((0, 2, 3)).float())
    return most if isinstance(scaling, Tensor) else most * scaling


def stacked(maxima: Sequence[HeadMaxima], heads: Sequence[int], device: torch.device) -> Tensor:
    """The maxima of several modules in one vector, which forget them; minus infinity for what had no call."""
    parts = (
        torch.full((count,), -math.inf, device=device) if most is None else most.to(device)
        for most, count in zip((each.take() for each in maxima), heads, strict=True)
    )
    return torch.cat(list(parts))
