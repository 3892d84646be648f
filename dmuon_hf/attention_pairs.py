"""Which pairs of a query and a key an attention function lets meet: the masks it is given, as booleans.

The same as the function's own reading of them, so that a logit that no softmax sees counts for nothing. What is added
to logits (a bias by position) is no part of what queries and keys make, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Pairs", "pairs_of"]

Pairs = Callable[[slice], Tensor | None]
"""Pairs of a range of queries, boolean and broadcastable to `(batch, heads, queries, keys)`; None for all."""

_EXPLICIT = ("eager", "flex_attention", None)
"""Implementations that leave out nothing but what the mask says."""


def pairs_of(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    implementation: str | None,
    arguments: Mapping[str, Any],
) -> Pairs:
    """The pairs of one call.

    Args:
        module: the attention module, whose `is_causal` counts where the call says nothing.
        query, key: `(batch, heads, queries or keys, size)`.
        mask: the mask of the call: None, boolean or additive `(batch, 1 or heads, queries, keys)`, padding
            `(batch, keys)`, or a `BlockMask`.
        implementation: name of the attention function.
        arguments: the further arguments of the call.

    Raises:
        NotImplementedError: a mask of another kind.
    """
    if hasattr(mask, "mask_mod"):
        return _of_block_mask(mask.mask_mod, query, key)
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return _of_whole_mask(mask, key.shape[-2])
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        raise NotImplementedError(
            f"qk_clip does not know the attention mask of {type(module).__name__}, a {type(mask).__name__}: leave "
            "qk_clip out"
        )
    if implementation in _EXPLICIT and mask is None:
        return lambda rows: None
    return _of_lengths(module, query, key, mask, implementation, arguments)


def _of_whole_mask(mask: Tensor, keys: int) -> Pairs:
    mask = mask[..., :keys]
    # Additive masks hold the least number of their dtype, or of a narrower one, or minus infinity.
    allowed = mask if mask.dtype is torch.bool else mask > torch.finfo(torch.float16).min / 2
    return lambda rows: allowed if allowed.shape[-2] == 1 else allowed[..., rows, :]


def _of_block_mask(mask_mod: Callable[..., Tensor], query: Tensor, key: Tensor) -> Pairs:
    batch, heads, queries, _ = query.shape
    device = query.device
    at_batch = torch.arange(batch, device=device)[:, None, None, None]
    at_head = torch.arange(heads, device=device)[None, :, None, None]
    at_query = torch.arange(queries, device=device)[None, None, :, None]
    at_key = torch.arange(key.shape[-2], device=device)[None, None, None, :]
    return lambda rows: mask_mod(at_batch, at_head, at_query[:, :, rows], at_key)


def _of_lengths(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    implementation: str | None,
    arguments: Mapping[str, Any],
) -> Pairs:
    """What functions that are given no whole mask make of lengths, padding and a window."""
    queries, keys, device = query.shape[-2], key.shape[-2], query.device
    said = arguments.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if said is None else said) and queries > 1
    # Flash attention aligns the last query with the last key, PyTorch's own the first with the first.
    offset = 0 if implementation == "sdpa" else keys - queries
    window = None if implementation == "sdpa" else arguments.get("sliding_window")
    documents = None if implementation == "sdpa" or mask is not None else _documents(query, arguments)
    at_query = torch.arange(queries, device=device)[:, None] + offset
    at_key = torch.arange(keys, device=device)[None, :]
    present = None if mask is None else mask[:, None, None, :keys].bool()

    def pairs(rows: slice) -> Tensor | None:
        allowed = present
        for condition in (
            at_query[rows] >= at_key if causal else None,
            (at_query[rows] - at_key < window) & (at_key - at_query[rows] < window) if window is not None else None,
            documents[rows, None] == documents[None, :] if documents is not None else None,
        ):
            if condition is not None:
                allowed = condition if allowed is None else allowed & condition
        return allowed

    return pairs


def _documents(query: Tensor, arguments: Mapping[str, Any]) -> Tensor | None:
    """The packed sequence that each place of a batch of one belongs to; None where nothing is packed."""
    length = query.shape[-2]
    starts, positions = arguments.get("cu_seq_lens_q"), arguments.get("position_ids")
    if starts is not None:
        return torch.searchsorted(starts, torch.arange(length, device=query.device, dtype=starts.dtype), right=True)
    if query.shape[0] == 1 and isinstance(positions, Tensor) and positions.shape == (1, length):
        return (positions[0] == 0).cumsum(0)
    return None
