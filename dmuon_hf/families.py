"""What the fused and heterogeneous weights of known model families contain.

One table per `config.model_type`. Keys are the last parts of a parameter name; a value is either a function from the
config to the `MatrixSpec` of the stored weight, or a string: the reason why the weight stays on AdamW. Weights that are
not listed follow the default rule by module type, which is right for every plain `(out, in)` projection. Layouts were
read from the forward of each model in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dmuon_hf.core.plan import MatrixSpec

__all__ = ["PRESETS", "Preset", "Rule", "rule_for"]

Rule = Callable[[Any], MatrixSpec] | str
Preset = Mapping[str, Rule]

_MIXED_PROJECTION = "rows of unlike roles share this projection"
_GATE_VECTOR = "one gate value per head, not a matrix"


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _qkv_rows(config: Any) -> MatrixSpec:
    """Rows `[all query heads | all key heads | all value heads]`."""
    query, kv = config.num_attention_heads * _head_dim(config), config.num_key_value_heads * _head_dim(config)
    return MatrixSpec(sections=(query, kv, kv))


def _gate_up_rows(config: Any) -> MatrixSpec:
    """Rows `[gate | up]`."""
    return MatrixSpec(sections=(config.intermediate_size, config.intermediate_size))


def _qkv_per_head(config: Any) -> MatrixSpec:
    """Rows `[query | key | value]` of head 0, then of head 1, ..."""
    head = config.hidden_size // config.num_attention_heads
    return MatrixSpec(groups=config.num_attention_heads, sections=(head, head, head))


def _falcon_qkv(config: Any) -> MatrixSpec:
    """Per KV group `[queries | key | value]`; with multi-query there is one group, without either it is per head."""
    head, heads = config.hidden_size // config.num_attention_heads, config.num_attention_heads
    if config.new_decoder_architecture:
        groups = config.num_kv_heads
    elif config.multi_query:
        groups = 1
    else:
        groups = heads
    return MatrixSpec(groups=groups, sections=(heads // groups * head, head, head))


def _query_gate_per_head(config: Any) -> MatrixSpec:
    """Rows `[query | output gate]` of head 0, then of head 1, ..."""
    return MatrixSpec(groups=config.num_attention_heads, sections=(_head_dim(config), _head_dim(config)))


def _gpt2_qkv(config: Any) -> MatrixSpec:
    """Stored `(in, out)` with output columns `[query | key | value]`."""
    return MatrixSpec(sections=(config.n_embd, config.n_embd, config.n_embd), transposed=True)


def _gpt2_cross_attention(config: Any) -> MatrixSpec:
    """Stored `(in, out)` with output columns `[key | value]`."""
    return MatrixSpec(sections=(config.n_embd, config.n_embd), transposed=True)


_PLAIN: Preset = {}

_GATED_DELTA: Preset = {
    "self_attn.q_proj.weight": _query_gate_per_head,
    "linear_attn.in_proj_qkvz.weight": _MIXED_PROJECTION,
    "linear_attn.in_proj_ba.weight": _GATE_VECTOR,
    "linear_attn.in_proj_qkv.weight": _MIXED_PROJECTION,
    "linear_attn.in_proj_a.weight": _GATE_VECTOR,
    "linear_attn.in_proj_b.weight": _GATE_VECTOR,
}

_PHI3: Preset = {"self_attn.qkv_proj.weight": _qkv_rows, "mlp.gate_up_proj.weight": _gate_up_rows}
_GLM: Preset = {"mlp.gate_up_proj.weight": _gate_up_rows}

PRESETS: Mapping[str, Preset] = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3_next": _GATED_DELTA,
    "qwen3_5": _GATED_DELTA,
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA,
    "phi3": _PHI3,
    "glm": _GLM,
    "glm4": _GLM,
    "bloom": {"self_attention.query_key_value.weight": _qkv_per_head},
    "gpt_neox": {"attention.query_key_value.weight": _qkv_per_head},
    "falcon": {"self_attention.query_key_value.weight": _falcon_qkv},
    "gpt2": {"attn.c_attn.weight": _gpt2_qkv, "crossattention.c_attn.weight": _gpt2_cross_attention},
}


def rule_for(model_type: str, parameter_name: str) -> Rule | None:
    """The rule of a family for a parameter, matched on whole name parts, or None."""
    for suffix, rule in PRESETS.get(model_type, _PLAIN).items():
        if parameter_name == suffix or parameter_name.endswith("." + suffix):
            return rule
    return None
