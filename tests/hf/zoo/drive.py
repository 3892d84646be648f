"""Runs the forward of any model of the zoo on meta, or of its parts where the whole wants inputs with a meaning."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dmuon_hf.layouts import attribute_of
from dmuon_hf.linears import is_conv1d, is_linear
from dmuon_hf.survey import Survey
from tests.hf.zoo.tracer import RoleTracer

__all__ = ["traced_roles"]

TOKENS = 16
_HIDDEN = frozenset(
    {
        "condition", "current_states", "hidden_state", "hidden_states", "hidden_states_1", "input", "inputs",
        "inputs_embeds", "key", "latents", "queries", "query", "query_states", "value", "x",
    }
)  # fmt: skip
_NUMBERS = {
    "batch_size": 1,
    "height": 4,
    "layer_id": 0,
    "layer_idx": 0,
    "max_seqlen": TOKENS,
    "seq_len": TOKENS,
    "width": 4,
}
_MASK_NAMES = frozenset({"attention_mask", "mask"})
_MASKS: tuple[Tensor | None, ...] = (
    None,
    torch.ones(1, TOKENS, device="meta"),
    torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta"),
    torch.ones(1, 2 * TOKENS, device="meta"),
)
"""Of no use, of tokens, of pairs of tokens, of tokens and as many latents."""
_PAIRS = frozenset({"position_embedding", "position_embeddings", "rope_emb", "rotary_emb"})


def traced_roles(
    found: Survey, weights: Mapping[str, nn.Parameter], transposed: Callable[[str], bool], fused: Collection[str]
) -> dict[str, list[Tensor]]:
    """Roles of the rows of each weight that a forward has shown: of the model's own, then of the modules around it.

    `transposed` says which weights are stored `(in, out)`; `fused` names those that are not done with until something
    was made of their output.
    """
    for module in found.model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    tracer = RoleTracer(weights, transposed)
    with torch.no_grad(), tracer:
        _attempt(found.model, _model_inputs(found.model))
        for outwards in (1, 0, 2, 3):
            for name in weights:
                module = _around(found, name, outwards)
                if module is None or type(module).forward is nn.Module.forward:
                    continue
                is_done = tracer.has_read if name in fused else tracer.has_seen
                for inputs in _block_inputs(module):
                    if "condition" in inputs:
                        tracer.mark(inputs["condition"])
                    if is_done(name) or _attempt(module, inputs):
                        break
    return tracer.roles()


def _is_transposed(module: nn.Module) -> bool:
    return is_conv1d(module) or bool(getattr(module, "is_transposed", False))


def _around(found: Survey, name: str, outwards: int) -> nn.Module | None:
    """The layer of a weight (0), the module that calls it (1), or one further out."""
    path = name.split(".")[: -1 - outwards]
    return found.modules[".".join(path)] if path else None


def _attempt(module: nn.Module, inputs: dict[str, Any]) -> bool:
    """Call a module; what it did before it failed has been seen all the same."""
    try:
        module(**inputs)
    except Exception:  # guessed inputs fail in any way
        return False
    return True


def _meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


def _model_inputs(model: nn.Module) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    config = model.config
    inputs: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    if "input_ids" in names:
        inputs["input_ids"] = tokens
    elif "input_features" in names:
        inputs["input_features"] = _meta(1, getattr(config, "num_mel_bins", 80), 3000)
    elif "input_values" in names:
        inputs["input_values"] = _meta(1, 16000)
    elif "pixel_values" in names:
        size = getattr(config, "image_size", 224) or 224
        height, width = (size, size) if isinstance(size, int) else size
        inputs["pixel_values"] = _meta(1, getattr(config, "num_channels", 3) or 3, height, width)
    if "flattened_patches" in names:
        inputs["flattened_patches"] = _meta(1, TOKENS, 770)
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = tokens
    return inputs


def _block_inputs(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Guesses at what a block or a part of it is called with, by the names of its arguments."""
    width = _width(module)
    if width is None:
        return
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = [item for item in inspect.signature(module.forward).parameters.values() if item.kind not in kinds]
    head = _head_size(module, width)
    sequence, image = [(1, TOKENS, width), (TOKENS, width)], [(1, 4, 4, width), (1, width, 4, 4)]
    required = {item.name for item in parameters if item.default is item.empty}
    masks = _MASKS if required & _MASK_NAMES else _MASKS[:1]
    shapes = (*sequence, *image, (TOKENS, 1, width), (1, width, TOKENS))
    for shape, mask, rotary in itertools.product(shapes, masks, (head, head // 2, head // 4)):
        # One tensor for all of them, as where a module attends to itself.
        hidden = _meta(*shape)
        values = {item.name: _argument(item.name, hidden, rotary) for item in parameters}
        if parameters:
            values[parameters[0].name] = hidden
        values |= dict.fromkeys(required & _MASK_NAMES, mask)
        if "attention_dists" in values:
            context = _integer(module, "context_size") or TOKENS
            values["attention_dists"] = torch.zeros(context, context, dtype=torch.int64, device="meta")
        yield {name: value for name, value in values.items() if value is not None or name in required}


def _argument(name: str, hidden: Tensor, rotary: int) -> Any:
    if name in _HIDDEN:
        return hidden
    if name in _PAIRS:
        one = _meta(TOKENS, rotary) if hidden.ndim == 2 else _meta(1, TOKENS, rotary)
        return one, one
    if name == "rotary_pos_emb":
        return _meta(TOKENS, rotary)
    if name in ("cu_seqlens", "cu_seq_lens"):
        return torch.tensor([0, TOKENS], dtype=torch.int32)
    if name in ("position_ids", "cache_position"):
        return torch.arange(TOKENS)[None].to("meta")
    if name == "input_dimensions":
        return 4, 4
    if name == "grid_thw":
        return [[1, 4, 4]]
    return _NUMBERS.get(name)


def _width(module: nn.Module) -> int | None:
    """How many features the first projection in a module reads."""
    for part in module.modules():
        if is_linear(part):
            shape = part.get_parameter("weight").shape
            return int(shape[0] if is_conv1d(part) else shape[1])
        for leaf, parameter in part._parameters.items():
            if parameter is not None and parameter.ndim == 3 and "proj" in leaf:
                return int(parameter.shape[1 if _is_transposed(part) else 2])
    return None


def _head_size(module: nn.Module, width: int) -> int:
    heads = _integer(module, "num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
    return _integer(module, "head_dim", "head_size", "attention_head_size", "d_kv") or max(width // (heads or 1), 1)


def _integer(module: nn.Module, *names: str) -> int | None:
    owners = [*module.modules(), *(getattr(part, "config", None) for part in module.modules())]
    values = (attribute_of(owner, name) for owner in owners for name in names)
    return next((value for value in values if isinstance(value, int)), None)
