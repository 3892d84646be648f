"""What is a matrix: routes and logical matrices of real model families."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from dmuon_hf import ConfigurationError, create_optimizer, routes
from dmuon_hf.core import MatrixSpec

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SEQ2SEQ: dict[str, Any] = {
    "d_model": 64,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 128,
    "pad_token_id": 0,
}


# -- expert stacks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (tf.MixtralConfig(**SMALL, num_local_experts=4), tf.MixtralForCausalLM),
        (tf.Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4), tf.Qwen3MoeForCausalLM),
        (tf.GptOssConfig(**SMALL, head_dim=16, num_local_experts=4), tf.GptOssForCausalLM),
    ],
    ids=["mixtral", "qwen3_moe", "gpt_oss"],
)
def test_expert_stacks_are_matrices_of_each_expert_and_not_one_flat_matrix(
    config: Any, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    built = model(config)
    with caplog.at_level(logging.INFO, logger="dmuon_hf.presets"):
        table = routes(built)
    stacks = [name for name in table if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(stacks) == 4
    for name in stacks:
        shape = built.get_parameter(name).shape
        assert table[name].route == "muon" and shape[0] == 4
        logical = table[name].spec.logical_shapes(shape[1:])
        assert len(logical) == (1 if name.endswith("down_proj") else 2)
        hidden = 0 if name.endswith("down_proj") else 1
        assert {sides[hidden] for sides in logical} == {64}
    assert caplog.messages == []


def test_stack_of_unknown_layout_forced_to_muon_is_refused_until_its_layout_is_said() -> None:
    block = nn.Module()
    block.experts = nn.Module()
    block.experts.wi = nn.Parameter(torch.randn(4, 64, 64))
    block.proj = nn.Linear(64, 64)
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    with pytest.raises(ConfigurationError, match=r"experts\.wi.*\(4, 64, 64\).*layouts="):
        routes(model, overrides={"*.experts.wi": "muon"})
    spec = MatrixSpec(sections=(32, 32))
    assert routes(model, layouts={"*.experts.wi": spec})["layers.0.experts.wi"].spec == spec


# -- single rows and columns -------------------------------------------------------------------------------------------


def test_single_rows_and_columns_inside_a_block_are_on_adamw() -> None:
    block = nn.ModuleDict({"score": nn.Linear(8, 1), "spread": nn.Linear(1, 8), "whole": nn.Linear(8, 2)})
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    muon = {name for name, route in routes(model).items() if route.route == "muon"}
    assert muon == {"layers.0.whole.weight"}


@pytest.mark.parametrize("name", ["layers.0.score.weight", "layers.0.spread.weight"])
def test_single_row_or_column_forced_to_muon_is_refused(name: str) -> None:
    block = nn.ModuleDict({"score": nn.Linear(8, 1), "spread": nn.Linear(1, 8), "whole": nn.Linear(8, 2)})
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    with pytest.raises(ConfigurationError, match="at least two rows and two columns"):
        routes(model, overrides={name: "muon"})


# -- fused projections -------------------------------------------------------------------------------------------------


def test_fused_qkv_with_small_key_gradients_moves_every_part_alike() -> None:
    torch.manual_seed(0)
    model = tf.Phi3ForCausalLM(tf.Phi3Config(**SMALL))
    optimizer = create_optimizer(model, lr=1e-2)
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    parts = (64, 32, 32)
    gradient = torch.randn(weight.shape)
    gradient[64:] *= 1e-3
    weight.grad = gradient
    before = weight.detach().clone()
    optimizer.step()
    moved = (weight.detach() - before).split(parts)
    # The root mean square of an orthogonalised update is a fifth of the learning rate, for query, key and value.
    for part in moved:
        singular = torch.linalg.svdvals(part / (1e-2 * 0.2 * 64**0.5))
        assert singular.min() > 0.7 and singular.max() < 1.3


# -- names that lie ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "embeddings"),
    [
        (
            lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=128, n_positions=64)),
            {"transformer.wte.weight", "transformer.wpe.weight"},
        ),
        (
            lambda: tf.BartForConditionalGeneration(tf.BartConfig(**SEQ2SEQ)),
            {"model.shared.weight", "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"},
        ),
        (
            lambda: tf.T5ForConditionalGeneration(
                tf.T5Config(d_model=64, d_ff=96, num_layers=1, num_heads=4, d_kv=16, vocab_size=128)
            ),
            {
                "shared.weight",
                "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            },
        ),
        (
            lambda: tf.WhisperForConditionalGeneration(
                tf.WhisperConfig(**SEQ2SEQ, num_mel_bins=8, max_source_positions=16, max_target_positions=16)
            ),
            {
                "model.decoder.embed_tokens.weight",
                "model.decoder.embed_positions.weight",
                "model.encoder.conv1.weight",
                "model.encoder.conv2.weight",
            },
        ),
    ],
    ids=["gpt2", "bart", "t5", "whisper"],
)
def test_tables_and_convolutions_are_on_adamw_and_every_block_weight_on_muon(model: Any, embeddings: set[str]) -> None:
    built = model()
    table = routes(built)
    two_dimensional = {name for name, p in built.named_parameters() if p.ndim >= 2 and p.requires_grad}
    assert {name for name in two_dimensional if table[name].route == "adamw"} - {"lm_head.weight"} == embeddings


@pytest.mark.parametrize(
    ("model", "router"),
    [
        (lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SMALL, num_local_experts=4)), "mlp.gate.weight"),
        (lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**SMALL, head_dim=16, num_local_experts=4)), "mlp.router.weight"),
        (lambda: tf.OlmoeForCausalLM(tf.OlmoeConfig(**SMALL, num_experts=4)), "mlp.gate.weight"),
        (
            lambda: tf.GraniteMoeForCausalLM(tf.GraniteMoeConfig(**SMALL, num_local_experts=4)),
            "block_sparse_moe.router.weight",
        ),
        (
            lambda: tf.SwitchTransformersForConditionalGeneration(
                tf.SwitchTransformersConfig(
                    d_model=64, d_ff=96, d_kv=16, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4,
                    num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, vocab_size=128
                )
            ),
            "mlp.router.classifier.weight",
        ),
    ],
    ids=["mixtral", "gpt_oss", "olmoe", "granite_moe", "switch"],
)  # fmt: skip
def test_two_dimensional_router_is_on_adamw(model: Any, router: str) -> None:
    table = routes(model())
    routers = [name for name in table if name.endswith(router)]
    assert routers
    assert {table[name].route for name in routers} == {"adamw"}


def test_gated_mlp_whose_layer_is_called_gate_proj_is_no_router() -> None:
    table = routes(tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)))
    assert table["model.layers.0.mlp.gate_proj.weight"].route == "muon"


def test_conv1d_is_scaled_and_orthogonalised_as_out_by_in() -> None:
    torch.manual_seed(0)
    model = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=16))
    optimizer = create_optimizer(model, lr=1e-2, lr_scale="original", muon_lr=1e-2)
    weight = model.transformer.h[0].mlp.c_fc.weight
    assert tuple(weight.shape) == (32, 128)
    weight.grad = torch.randn(weight.shape)
    before = weight.detach().clone()
    optimizer.step()
    # sqrt(out / in) = sqrt(128 / 32): taken from the stored shape it would be 1.
    singular = torch.linalg.svdvals(before - weight.detach()) / (1e-2 * 2.0)
    assert singular.min() > 0.7 and singular.max() < 1.3


# -- tied weights ------------------------------------------------------------------------------------------------------


class _Recurrent(nn.Module):
    """One block that runs three times, as ALBERT's does."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"model_type": "recurrent"})()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False))])
        self.twin = self.layers[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(self.layers[0](x))
        return self.twin(x).square().mean()


def test_shared_block_is_counted_routed_and_stepped_once() -> None:
    torch.manual_seed(0)
    model = _Recurrent()
    assert list(routes(model)) == ["layers.0.0.weight", "layers.0.1.weight"]
    optimizer = create_optimizer(model, lr=1e-2, momentum=0.0, nesterov=False, lr_scale="none", muon_lr=1e-2)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
    model(torch.randn(5, 8)).backward()
    before = model.layers[0][0].weight.detach().clone()
    optimizer.step()
    assert optimizer.ns_matrices == 2
    singular = torch.linalg.svdvals(before - model.layers[0][0].weight.detach()) / 1e-2
    assert singular.max() < 1.3


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_no_factor_of_lora_meets_muon_unless_asked() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)), LoraConfig(target_modules=["q_proj"]))
    optimizer = create_optimizer(model, lr=1e-3)
    assert {group["route"] for group in optimizer.param_groups} == {"adamw"}


# -- GatedDeltaNet -----------------------------------------------------------------------------------------------------


def test_gated_delta_projections_of_unlike_rows_are_one_matrix_for_each_role() -> None:
    config = tf.Qwen3_5TextConfig(
        **SMALL, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"]
    )  # fmt: skip
    table = routes(tf.Qwen3_5ForCausalLM(config))
    assert table["model.layers.0.linear_attn.in_proj_qkv.weight"].spec == MatrixSpec(sections=(16, 16, 32))
    assert table["model.layers.0.linear_attn.in_proj_a.weight"].reason == "one value per head, not a matrix"
    assert table["model.layers.0.linear_attn.conv1d.weight"].route == "adamw"
    assert table["model.layers.1.self_attn.q_proj.weight"].spec == MatrixSpec(groups=4, sections=(16, 16))
