"""The fused weights of transformers' model families: which layout the weight of which layer has.

Layers are named `Class.attribute`, by the class of the module that calls them, and found for its subclasses as well.
Layouts were read from what each model's own forward does with the output; a test follows that output through the
forward of every family and proves them so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from dmuon_hf import layouts
from dmuon_hf.core.plan import MatrixSpec
from dmuon_hf.layouts import Layout, Projection

__all__ = ["FUSED", "is_known", "layout_of"]


def is_known(module: nn.Module, leaf: str) -> bool:
    """Whether a family says the layout of a parameter that a module multiplies by itself."""
    return _layout(module, leaf) is not None


def layout_of(it: Projection) -> MatrixSpec | None:
    """The known layout of a weight, or None where no family says any."""
    for caller, layer in it.callers:
        layout = _layout(caller, layer)
        if layout is not None:
            return layout(it)
    return None


def _layout(caller: nn.Module, layer: str) -> Layout | None:
    known = (FUSED.get(f"{kind.__name__}.{layer}") for kind in type(caller).__mro__)
    return next((layout for layout in known if layout is not None), None)


def _falcon(it: Projection) -> MatrixSpec:
    """Per head of keys; multi-query has one of them, and without either it is per head."""
    if it.config.new_decoder_architecture:
        return layouts.qkv_per_key_value_head(it)
    return layouts.qkv_of_one_head(it) if it.config.multi_query else layouts.qkv_per_head(it)


def _big_code(it: Projection) -> MatrixSpec:
    """Rows of all queries and of one key and one value, or per head."""
    return layouts.qkv_of_one_head(it) if it.config.multi_query else layouts.qkv_per_head(it)


def _codegen(it: Projection) -> MatrixSpec:
    """Four groups of heads, one for each core it was first trained on, each `[query | value | key]`."""
    size = it.rows // 12
    return it.sections(size, size, size, groups=4)


def _levit_keys_values(it: Projection) -> MatrixSpec:
    """Rows `[key | value]` of head 0, then of head 1, ..."""
    key = it.number("key_dim")
    return it.sections(key, it.rows // it.heads - key, groups=it.heads)


def _levit_queries_keys_values(it: Projection) -> MatrixSpec:
    """Rows `[query | key | value]` of head 0, then of head 1, ..., values of another size."""
    key = it.number("key_dim")
    return it.sections(key, key, it.rows // it.heads - 2 * key, groups=it.heads)


def _focal_modulation(it: Projection) -> MatrixSpec:
    """Rows `[query | context | gates of the focal levels]`."""
    gates = it.number("focal_level") + 1
    return it.sections((it.rows - gates) // 2, (it.rows - gates) // 2, gates)


def _query_and_gate(it: Projection) -> MatrixSpec:
    """Rows `[query | output gate of the size of a value]` of head 0, then of head 1, ..."""
    gate = it.number("v_head_dim")
    return it.sections(it.rows // it.heads - gate, gate, groups=it.heads)


def _heads_of_queries(it: Projection) -> MatrixSpec:
    """One matrix in three dimensions `(in, heads, size of a head)`."""
    return MatrixSpec(folded=True, transposed=True)


def _heads_of_outputs(it: Projection) -> MatrixSpec:
    """One matrix in three dimensions `(out, heads, size of a head)`."""
    return MatrixSpec(folded=True)


def _expert_rows(it: Projection) -> MatrixSpec:
    """One matrix an expert, one below the other."""
    return it.sections(*[it.number("ffn_hidden_size")] * it.number("moe_num_experts"))


def _expert_rows_transposed(it: Projection) -> MatrixSpec:
    """One matrix an expert, one below the other, each stored `(in, out)`."""
    return replace(_expert_rows(it), sections_transposed=True)


def _indexer_query_key(it: Projection) -> MatrixSpec:
    """Rows `[all query heads | all key heads]`."""
    keys = it.number("index_kv_heads") * it.number("index_head_dim")
    return it.sections(it.rows - keys, keys)


_LAYERS: tuple[tuple[Layout, str], ...] = (
    (
        layouts.qkv,
        """
        Attention.c_attn Blip2Attention.qkv BlipAttention.qkv CohereCompassVisionAttention.qkv DbrxAttention.Wqkv
        DeepseekOcr2SamVisionAttention.qkv DeepseekOcr2SamVisionSdpaAttention.qkv Dots3NoteVisionAttention.qkv
        Ernie4_5_VLMoeVisionAttention.qkv Exaone4_5_VisionAttention.qkv Florence2VisionChannelAttention.qkv
        Florence2VisionWindowAttention.qkv GPT2Attention.c_attn Glm4vMoeVisionAttention.qkv Glm4vVisionAttention.qkv
        Glm5NextVisionAttention.qkv GlmOcrVisionAttention.qkv GotOcr2VisionAttention.qkv HieraMaskUnitAttention.qkv
        ImageGPTAttention.c_attn InstructBlipAttention.qkv InstructBlipVideoAttention.qkv ModernBertAttention.Wqkv
        MptAttention.Wqkv MultiheadAttention.in_proj_weight PPFormulaNetVisionAttention.qkv Phi3Attention.qkv_proj
        Phi4MultimodalAttention.qkv_proj Qwen2_5_VLVisionAttention.qkv Qwen3OmniMoeVisionAttention.qkv
        Qwen3VLMoeVisionAttention.qkv Qwen3VLVisionAttention.qkv Qwen3_5MoeVisionAttention.qkv
        Qwen3_5VisionAttention.qkv Qwen4ExpVisionAttention.qkv SamVisionAttention.qkv SamVisionSdpaAttention.qkv
        UnlimitedOcrSamVisionAttention.qkv UnlimitedOcrSamVisionSdpaAttention.qkv VisionAttention.qkv
        """,
    ),
    (
        layouts.qkv_per_head,
        """
        BloomAttention.query_key_value DisentangledSelfAttention.in_proj GPTNeoXAttention.query_key_value
        GPTNeoXJapaneseAttention.query_key_value MiniMaxLightningAttention.qkv_proj PersimmonAttention.query_key_value
        """,
    ),
    (
        layouts.halves,
        """
        DiaMLP.gate_up_proj Dots3NoteAudioMLP.gate_up_proj EvollaSequenceCompressorAttention.to_kv
        FalconMambaMixer.in_proj Glm4MLP.gate_up_proj Glm4vTextMLP.gate_up_proj GlmMLP.gate_up_proj
        GlmOcrTextMLP.gate_up_proj GraniteMoeHybridMLP.input_linear GraniteMoeSharedMLP.input_linear
        GraniteSpeechConformerAttention.to_kv GraniteSpeechPlusConformerAttention.to_kv JambaMambaMixer.in_proj
        JetMoeAttention.kv_proj MambaMixer.in_proj MiniMaxM3VLDenseMLP.gate_up_proj ModernBertDecoderMLP.Wi
        ModernBertMLP.Wi MoonshineDecoderMLP.fc1 MoonshineStreamingDecoderMLP.fc1 MoshiGatingMLP.fc1
        Phi3MLP.gate_up_proj Phi4MultimodalAudioMLP.gate_up_proj Phi4MultimodalMLP.gate_up_proj Zamba2MLP.gate_up_proj
        """,
    ),
    (
        layouts.thirds,
        """
        Lfm2MoeShortConv.in_proj Lfm2ShortConv.in_proj Lfm3ShortConv.in_proj Lfm3VlVisionShortConv.in_proj
        VibeVoiceDiffusionHeadAdaLayerNorm.linear
        """,
    ),
    (layouts.alternating, "ZambaMambaMixer.in_proj"),
    (
        layouts.halves_per_head,
        """
        Qwen3NextAttention.q_proj Qwen3_5Attention.q_proj Qwen3_5MoeAttention.q_proj Qwen4ExpTextAttention.q_proj
        """,
    ),
    (
        layouts.latent_and_rotary,
        """
        AXK1Attention.kv_a_proj_with_mqa AXK2Attention.kv_a_proj_with_mqa BailingHybridAttention.kv_a_proj_with_mqa
        DeepseekV2Attention.kv_a_proj_with_mqa DeepseekV32Attention.kv_a_proj_with_mqa
        DeepseekV3Attention.kv_a_proj_with_mqa Dots3NoteTextAttention.kv_a_proj_with_mqa
        Glm4MoeLiteAttention.kv_a_proj_with_mqa Glm5NextTextAttention.kv_a_proj_with_mqa
        GlmMoeDsaAttention.kv_a_proj_with_mqa HYV4Attention.kv_a_proj_with_mqa HYV4VLAttention.kv_a_proj_with_mqa
        KimiLinearAttention.kv_a_proj_with_mqa LongcatFlashMLA.kv_a_proj_with_mqa MiniCPM3Attention.kv_a_proj_with_mqa
        Mistral4Attention.kv_a_proj_with_mqa MistralLarge4TextAttention.kv_a_proj_with_mqa
        YoutuAttention.kv_a_proj_with_mqa
        """,
    ),
    (
        layouts.key_value_per_head,
        """
        AXK1Attention.kv_b_proj AXK2Attention.kv_b_proj BailingHybridAttention.kv_b_proj DeepseekV2Attention.kv_b_proj
        DeepseekV32Attention.kv_b_proj DeepseekV3Attention.kv_b_proj Dots3NoteTextAttention.kv_b_proj
        Glm4MoeLiteAttention.kv_b_proj Glm5NextTextAttention.kv_b_proj GlmMoeDsaAttention.kv_b_proj
        HYV4Attention.kv_b_proj HYV4VLAttention.kv_b_proj KimiLinearAttention.kv_b_proj LongcatFlashMLA.kv_b_proj
        MiniCPM3Attention.kv_b_proj Mistral4Attention.kv_b_proj MistralLarge4TextAttention.kv_b_proj
        YoutuAttention.kv_b_proj
        """,
    ),
    (
        layouts.gated_delta,
        """
        LaraMiniGatedDeltaNet.in_proj_qkv Qwen3_5GatedDeltaNet.in_proj_qkv Qwen3_5MoeGatedDeltaNet.in_proj_qkv
        Qwen4ExpTextGatedDeltaNet.in_proj_qkv
        """,
    ),
    (layouts.gated_delta_per_key_head, "Qwen3NextGatedDeltaNet.in_proj_qkvz"),
    (layouts.selective_scan_parameters, "FalconMambaMixer.x_proj JambaMambaMixer.x_proj MambaMixer.x_proj"),
    (
        layouts.state_space_input,
        """
        BambaMixer.in_proj FalconH1Mixer.in_proj GraniteMoeHybridMambaLayer.in_proj Mamba2Mixer.in_proj
        NemotronHMamba2Mixer.in_proj Zamba2MambaMixer.in_proj
        """,
    ),
    (_falcon, "FalconAttention.query_key_value"),
    (_big_code, "GPTBigCodeAttention.c_attn"),
    (_codegen, "CodeGenAttention.qkv_proj"),
    # Two heads of values are read side by side, each by its own queries: values all the same.
    (layouts.whole, "DiffLlamaAttention.v_proj"),
    (_indexer_query_key, "Qwen4ExpTextQSAIndexer.index_qk_proj"),
    (_expert_rows, "DbrxExpertGLU.v1 DbrxExpertGLU.w1"),
    (_expert_rows_transposed, "DbrxExpertGLU.w2"),
    (
        _heads_of_queries,
        """
        FunnelRelMultiheadAttention.r_kernel XLNetRelativeAttention.k XLNetRelativeAttention.q XLNetRelativeAttention.r
        XLNetRelativeAttention.v
        """,
    ),
    (_heads_of_outputs, "XLNetRelativeAttention.o"),
    (_focal_modulation, "FocalNetModulation.projection_in"),
    (_levit_keys_values, "LevitAttentionSubsample.keys_values"),
    (_levit_queries_keys_values, "LevitAttention.queries_keys_values"),
    (_query_and_gate, "AXK2Attention.q_gate_proj"),
)

FUSED: Mapping[str, Layout] = MappingProxyType({name: layout for layout, names in _LAYERS for name in names.split()})
"""`Class.attribute` of every layer whose weight is fused -> its layout."""
