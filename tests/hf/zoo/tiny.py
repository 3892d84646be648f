"""Families of the six Auto mappings, with weights and batches so small that they train in a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

__all__ = ["BATCH", "FAMILIES", "Family"]

BATCH = 4
"""Rows of a batch, which the ranks share."""
_WORDS = 96
_LENGTH = 8
_IMAGE = 32


@dataclass(frozen=True, slots=True)
class Family:
    """How to build a model of `mapping`, and what kind of batch it takes."""

    mapping: str
    model_class: Any
    config: Callable[[], Any]
    kind: str = "text"

    def build(self) -> nn.Module:
        """The model with fixed fp32 weights, without dropout."""
        torch.manual_seed(0)
        model: nn.Module = self.model_class(self.config())
        return model.eval()

    def batch(self, step: int) -> dict[str, Tensor]:
        """The whole batch of a step, equal in every process."""
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(4, _WORDS, (BATCH, _LENGTH), generator=generator)
        labels = torch.randint(0, 3, (BATCH,), generator=generator)
        images = torch.randn(BATCH, 3, _IMAGE, _IMAGE, generator=generator)
        sound = torch.randn(BATCH, 16, 32, generator=generator)
        if self.kind == "text":
            return {"input_ids": words, "labels": words}
        if self.kind == "image":
            return {"pixel_values": images, "labels": labels}
        if self.kind == "mel":
            return {"input_features": sound, "labels": words}
        if self.kind == "frames":
            return {"input_features": sound.transpose(1, 2), "labels": words}
        if self.kind == "waves":
            return {"input_values": torch.randn(BATCH, 2000, generator=generator), "labels": words}
        assert self.kind == "image and text"
        places = torch.full((BATCH, (_IMAGE // 8) ** 2), _IMAGE_WORD)
        words = torch.cat([places, words], dim=1)
        return {"input_ids": words, "pixel_values": images, "labels": words.masked_fill(words == _IMAGE_WORD, -100)}


_IMAGE_WORD = 3
_DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": _WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _DECODER | {"num_key_value_heads": 2}
_HEADS_OF_8 = _GROUPED | {"head_dim": 8}
_SEQ2SEQ: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": _WORDS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": _IMAGE,
    "patch_size": 8,
}
_ENCODER = _DECODER | {"max_position_embeddings": 64}
_STAGES: dict[str, Any] = {"image_size": _IMAGE, "num_labels": 3}


def _llava() -> Any:
    vision = tf.CLIPVisionConfig(**_VISION, projection_dim=32)
    return tf.LlavaConfig(
        vision_config=vision,
        text_config=tf.LlamaConfig(**_GROUPED),
        image_token_index=_IMAGE_WORD,
        image_seq_length=(_IMAGE // 8) ** 2,
        vision_feature_layer=-1,
    )


def _paligemma() -> Any:
    return tf.PaliGemmaConfig(
        vision_config=tf.SiglipVisionConfig(**_VISION, projection_dim=32, vision_use_head=False).to_dict(),
        text_config=tf.GemmaConfig(**_HEADS_OF_8).to_dict(),
        image_token_index=_IMAGE_WORD,
        projection_dim=32,
        hidden_size=32,
    )


FAMILIES: dict[str, Family] = {
    # causal LM
    "llama": Family("causal LM", tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**_GROUPED)),
    "gpt2": Family(
        "causal LM",
        tf.GPT2LMHeadModel,
        lambda: tf.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=_WORDS, n_positions=64, bos_token_id=1, eos_token_id=2
        ),
    ),
    "gpt_neox": Family("causal LM", tf.GPTNeoXForCausalLM, lambda: tf.GPTNeoXConfig(**_DECODER)),
    "bloom": Family(
        "causal LM",
        tf.BloomForCausalLM,
        lambda: tf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=_WORDS, bos_token_id=1, eos_token_id=2),
    ),
    "falcon": Family(
        "causal LM",
        tf.FalconForCausalLM,
        lambda: tf.FalconConfig(**_DECODER, new_decoder_architecture=True, num_kv_heads=2),
    ),
    "phi3": Family("causal LM", tf.Phi3ForCausalLM, lambda: tf.Phi3Config(**_GROUPED)),
    "gemma3": Family("causal LM", tf.Gemma3ForCausalLM, lambda: tf.Gemma3TextConfig(**_HEADS_OF_8)),
    "opt": Family(
        "causal LM",
        tf.OPTForCausalLM,
        lambda: tf.OPTConfig(
            hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=_WORDS,
            max_position_embeddings=64, word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ),
    ),
    "mamba": Family(
        "causal LM",
        tf.MambaForCausalLM,
        lambda: tf.MambaConfig(hidden_size=32, state_size=4, num_hidden_layers=2, vocab_size=_WORDS, pad_token_id=0),
    ),
    "mixtral": Family("causal LM", tf.MixtralForCausalLM, lambda: tf.MixtralConfig(**_GROUPED, num_local_experts=4)),
    "deepseek_v3": Family(
        "causal LM",
        tf.DeepseekV3ForCausalLM,
        lambda: tf.DeepseekV3Config(
            **_DECODER, moe_intermediate_size=16, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
            first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=8, num_key_value_heads=4,
        ),
    ),
    # Two of its layers share all weights of a block.
    "zamba": Family(
        "causal LM",
        tf.ZambaForCausalLM,
        lambda: tf.ZambaConfig(
            **_GROUPED | {"num_hidden_layers": 4}, attention_hidden_size=64, attention_head_dim=16,
            n_mamba_heads=2, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
            layers_block_type=["hybrid", "mamba", "hybrid", "mamba"],
        ),
    ),
    # Its projections have three dimensions.
    "xlnet": Family(
        "causal LM",
        tf.XLNetLMHeadModel,
        lambda: tf.XLNetConfig(vocab_size=_WORDS, d_model=32, n_layer=2, n_head=4, d_inner=48),
    ),
    # Its experts are stored one below the other.
    "dbrx": Family(
        "causal LM",
        tf.DbrxForCausalLM,
        lambda: tf.DbrxConfig(
            d_model=32, n_heads=4, n_layers=2, vocab_size=_WORDS, max_seq_len=64, pad_token_id=0,
            attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            ffn_config={"ffn_hidden_size": 12, "moe_num_experts": 3, "moe_top_k": 2},
        ),
    ),
    "persimmon": Family("causal LM", tf.PersimmonForCausalLM, lambda: tf.PersimmonConfig(**_DECODER)),
    # seq2seq LM
    "t5": Family(
        "seq2seq LM",
        tf.T5ForConditionalGeneration,
        lambda: tf.T5Config(
            d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=_WORDS, decoder_start_token_id=0
        ),
    ),
    "bart": Family("seq2seq LM", tf.BartForConditionalGeneration, lambda: tf.BartConfig(**_SEQ2SEQ)),
    "mbart": Family("seq2seq LM", tf.MBartForConditionalGeneration, lambda: tf.MBartConfig(**_SEQ2SEQ)),
    "pegasus": Family("seq2seq LM", tf.PegasusForConditionalGeneration, lambda: tf.PegasusConfig(**_SEQ2SEQ)),
    "marian": Family("seq2seq LM", tf.MarianMTModel, lambda: tf.MarianConfig(**_SEQ2SEQ)),
    "m2m_100": Family("seq2seq LM", tf.M2M100ForConditionalGeneration, lambda: tf.M2M100Config(**_SEQ2SEQ)),
    # masked LM
    "bert": Family("masked LM", tf.BertForMaskedLM, lambda: tf.BertConfig(**_ENCODER)),
    "roberta": Family("masked LM", tf.RobertaForMaskedLM, lambda: tf.RobertaConfig(**_ENCODER)),
    "albert": Family("masked LM", tf.AlbertForMaskedLM, lambda: tf.AlbertConfig(**_ENCODER, embedding_size=16)),
    "distilbert": Family(
        "masked LM",
        tf.DistilBertForMaskedLM,
        lambda: tf.DistilBertConfig(
            dim=32, hidden_dim=48, n_layers=2, n_heads=4, vocab_size=_WORDS, max_position_embeddings=64
        ),
    ),
    "modernbert": Family(
        "masked LM", tf.ModernBertForMaskedLM, lambda: tf.ModernBertConfig(**_DECODER, cls_token_id=1, sep_token_id=2)
    ),
    # image-text-to-text
    "llava": Family("image-text-to-text", tf.LlavaForConditionalGeneration, _llava, "image and text"),
    "paligemma": Family("image-text-to-text", tf.PaliGemmaForConditionalGeneration, _paligemma, "image and text"),
    # image classification
    "vit": Family(
        "image classification", tf.ViTForImageClassification, lambda: tf.ViTConfig(**_VISION, num_labels=3), "image"
    ),
    "swin": Family(
        "image classification",
        tf.SwinForImageClassification,
        lambda: tf.SwinConfig(**_STAGES, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
        "image",
    ),
    "segformer": Family(
        "image classification",
        tf.SegformerForImageClassification,
        lambda: tf.SegformerConfig(
            num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3],
            strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2], num_labels=3,
        ),
        "image",
    ),
    # speech seq2seq
    "whisper": Family(
        "speech seq2seq",
        tf.WhisperForConditionalGeneration,
        lambda: tf.WhisperConfig(
            **{k: v for k, v in _SEQ2SEQ.items() if k != "max_position_embeddings"}, num_mel_bins=16,
            max_source_positions=16, max_target_positions=16, suppress_tokens=None, begin_suppress_tokens=None,
        ),
        "mel",
    ),
    "speech_to_text": Family(
        "speech seq2seq",
        tf.Speech2TextForConditionalGeneration,
        lambda: tf.Speech2TextConfig(
            **{k: v for k, v in _SEQ2SEQ.items() if k != "max_position_embeddings"}, input_feat_per_channel=16,
            max_source_positions=64, max_target_positions=64, conv_channels=16,
        ),
        "frames",
    ),
    "moonshine": Family(
        "speech seq2seq",
        tf.MoonshineForConditionalGeneration,
        lambda: tf.MoonshineConfig(
            hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
            encoder_num_attention_heads=4, decoder_num_attention_heads=4, vocab_size=_WORDS,
            max_position_embeddings=64, decoder_start_token_id=1, bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        ),
        "waves",
    ),
}  # fmt: skip
"""By a name of the family."""
