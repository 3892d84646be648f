"""Builds any class of the Auto mappings on the meta device, from its default configuration with few layers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

__all__ = ["MAPPINGS", "NotBuildableError", "build", "entries"]

MAPPINGS = {
    "causal LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq LM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked LM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "image classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
MOST_LAYERS = 8
"""Enough for one layer of every kind in each family that mixes kinds."""


class NotBuildableError(Exception):
    """The class needs what its default configuration does not say, or a package that is not here."""


def entries() -> Iterator[tuple[str, str, str]]:
    """`(mapping, model type, class name)` of every entry, one of several classes each by itself."""
    for mapping, attribute in MAPPINGS.items():
        for model_type, names in getattr(modeling_auto, attribute).items():
            for name in (names,) if isinstance(names, str) else names:
                yield mapping, model_type, name


def build(model_type: str, class_name: str) -> nn.Module:
    """The model on meta.

    Raises:
        NotBuildableError: with the reason.
    """
    try:
        package = configuration_auto.model_type_to_module_name(model_type)
        module = importlib.import_module(f"transformers.models.{package}")
        model_class = getattr(transformers, class_name, None) or getattr(module, class_name)
        with torch.device("meta"):
            return _instantiate(model_class, _config(model_type, class_name))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise NotBuildableError(f"{type(error).__name__}: {reason[:160]}") from error


def _instantiate(model_class: Any, config: PreTrainedConfig) -> nn.Module:
    """A model of a configuration, or of the part of it that speaks of text, where the class takes only that."""
    try:
        model: nn.Module = model_class(config)
    except (AttributeError, TypeError):
        text = config.get_text_config(decoder=True)
        if text is config:
            raise
        model = model_class(text)
    return model.eval()


def _config(model_type: str, class_name: str) -> PreTrainedConfig:
    config_class = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[model_type])
    config: PreTrainedConfig = config_class(**ARGUMENTS.get(model_type, {}))
    for part in _parts(config):
        for path, value in MISSING.get(part.model_type, {}).items():
            *owners, name = path.split(".")
            setattr(functools.reduce(getattr, owners, part), name, value)
        _shrink(part)
    if class_name == "ReformerModelWithLMHead":
        config.is_decoder = True
    return config


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """A configuration and those inside it, innermost first."""
    inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [*(part for value in inner for part in _parts(value)), config]


def _shrink(config: PreTrainedConfig) -> None:
    """Keep the first layers alone, and of lists with an item for each layer the items of these."""
    for name in LAYER_COUNTS:
        name = config.attribute_map.get(name, name)
        count = vars(config).get(name)
        if not isinstance(count, int) or isinstance(count, bool) or count <= MOST_LAYERS:
            continue
        setattr(config, name, MOST_LAYERS)
        for other, value in list(vars(config).items()):
            if isinstance(value, (list, tuple)) and len(value) == count:
                setattr(config, other, value[:MOST_LAYERS])


LAYER_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "depth",
    "num_decoder_layers",
    "num_encoder_layers",
)

MISSING: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config.num_attention_heads": 16},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "num_hidden_layers": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "esm": {"vocab_size": 33},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "4/8"},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl_text": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "ministral": {"head_dim": 128},
    "moonshine_streaming": {"num_key_value_heads": 8, "num_attention_heads": 8},
    "nemotron": {"num_key_value_heads": 8},
    "perceiver": {"num_cross_attention_heads": 1, "num_self_attention_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 1024,
        "indexer_compress_ratio": 4,
    },
}
"""What a default configuration leaves open and its model needs, by the model type of the part; dots lead to parts."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 6,
            "num_hidden_layers": 6,
        }
    },
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 0}},
}
"""What has to be said when a configuration is made, by model type."""
