"""Routes and matrix layouts follow from the role of a parameter, over model families."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from dmuon_hf import ConfigurationError, routes
from dmuon_hf.core import MatrixSpec
from dmuon_hf.layouts import Projection
from tests.hf.support import tiny_llama

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _qwen3_next() -> nn.Module:
    config = tf.Qwen3NextConfig(
        **SMALL,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )
    return tf.Qwen3NextForCausalLM(config)


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (tf.LlamaConfig, tf.LlamaForCausalLM),
        (tf.MistralConfig, tf.MistralForCausalLM),
        (tf.Qwen2Config, tf.Qwen2ForCausalLM),
        (tf.Qwen3Config, tf.Qwen3ForCausalLM),
    ],
)
def test_plain_families_send_exactly_the_seven_projections_to_muon(config: type, model: type) -> None:
    table = routes(model(config(**SMALL)))
    muon = [name for name, route in table.items() if route.route == "muon"]
    assert len(muon) == 2 * 7
    assert all(name.endswith(tuple(f"{projection}.weight" for projection in PROJECTIONS)) for name in muon)
    assert all(table[name].spec == MatrixSpec() for name in muon)
    assert all(route.spec is None for route in table.values() if route.route != "muon")


def test_qwen3_next_splits_every_fused_projection_and_keeps_values_per_head_on_adamw() -> None:
    table = routes(_qwen3_next())
    assert table["model.layers.1.self_attn.q_proj.weight"].spec == MatrixSpec(groups=4, sections=(16, 16))
    fused = table["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    assert fused.spec == MatrixSpec(groups=2, sections=(8, 8, 16, 16))
    assert table["model.layers.0.linear_attn.out_proj.weight"].route == "muon"
    for name in (
        "layers.0.linear_attn.in_proj_ba.weight",
        "layers.0.linear_attn.conv1d.weight",
        "layers.0.mlp.gate.weight",
        "layers.0.mlp.shared_expert_gate.weight",
    ):
        assert table["model." + name].route == "adamw", name
    for name in ("experts.gate_up_proj", "experts.down_proj", "shared_expert.up_proj.weight"):
        assert table["model.layers.0.mlp." + name].route == "muon", name


def _xlnet() -> nn.Module:
    return tf.XLNetLMHeadModel(tf.XLNetConfig(vocab_size=128, d_model=64, n_layer=2, n_head=4, d_inner=96))


def test_projections_in_three_dimensions_are_the_matrices_that_their_model_multiplies_by() -> None:
    model = _xlnet()
    table = routes(model)
    attention, hidden = model.transformer.layer[0].rel_attn, torch.randn(3, 64)
    nn.init.normal_(attention.q), nn.init.normal_(attention.o)

    def matrix_of(leaf: str) -> torch.Tensor:
        route = table[f"transformer.layer.0.rel_attn.{leaf}"]
        assert (route.route, route.reason) == ("muon", "linear weight in a block")
        (matrix,) = route.spec.split(route.spec.stored(getattr(attention, leaf)))
        return matrix

    for leaf in ("q", "k", "v", "r"):
        expected = torch.einsum("ih,hnd->ind", hidden, getattr(attention, leaf)).flatten(1)
        torch.testing.assert_close(hidden @ matrix_of(leaf).T, expected)
    outputs = torch.einsum("ind,hnd->ih", hidden.view(3, 4, 16), attention.o)
    torch.testing.assert_close(hidden @ matrix_of("o").T, outputs)
    assert table["transformer.layer.0.rel_attn.r_w_bias"].route == "adamw"
    assert table["transformer.layer.0.rel_attn.seg_embed"].route == "adamw"


def test_heads_of_projections_in_three_dimensions_are_matrices_when_asked_for() -> None:
    table = routes(_xlnet(), per_head=True)
    assert table["transformer.layer.0.rel_attn.k"].spec == MatrixSpec(sections=(16,) * 4, transposed=True, folded=True)


class _Einsum(nn.Module):
    """Attention of a user's own that keeps its queries in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(8, 2, 4))
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.einsum("bh,hnd->bnd", x, self.q).flatten(1))


def test_own_projections_in_three_dimensions_are_on_muon_when_their_layout_is_given() -> None:
    model = nn.Sequential(*(nn.ModuleDict({"attention": _Einsum()}) for _ in range(2)))
    assert routes(model)["0.attention.q"].route == "adamw"
    spec = MatrixSpec(folded=True, transposed=True)
    assert routes(model, layouts={"*.q": spec})["1.attention.q"].spec == spec
    with pytest.raises(ConfigurationError, match="folded=True"):
        routes(model, overrides={"0.attention.q": "muon"})


def test_dbrx_experts_are_the_matrices_that_their_model_multiplies_by() -> None:
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": 64, "max_seq_len": 8}
    attention = {"kv_n_heads": 1, "clip_qkv": None, "rope_theta": 1e4}
    experts = {"ffn_hidden_size": 12, "moe_num_experts": 3, "moe_top_k": 1}
    model = tf.DbrxForCausalLM(tf.DbrxConfig(**sizes, attn_config=attention, ffn_config=experts))
    table = routes(model)
    module, hidden = model.transformer.blocks[0].ffn.experts, torch.randn(3, 16)
    for weight in module.parameters():
        nn.init.normal_(weight)

    def matrices_of(leaf: str) -> list[torch.Tensor]:
        route = table[f"transformer.blocks.0.ffn.experts.mlp.{leaf}"]
        assert (route.route, route.reason) == ("muon", "linear weights of experts")
        return route.spec.split(getattr(module.mlp, leaf))

    chosen = torch.tensor([[2], [0], [1]])
    got = module(hidden, chosen, torch.ones(3, 1)).squeeze(1)
    parts = [[matrices_of(leaf)[expert] for leaf in ("w1", "v1", "w2")] for expert in chosen.flatten()]
    expected = [
        w2 @ (module.mlp.activation_fn(w1 @ x) * (v1 @ x)) for (w1, v1, w2), x in zip(parts, hidden, strict=True)
    ]
    torch.testing.assert_close(got, torch.stack(expected))


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_in = nn.Parameter(torch.randn(3, 4, 8))
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


def test_experts_of_unknown_layout_are_on_adamw_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(nn.ModuleDict({"experts": _Experts()}) for _ in range(2)))
    with caplog.at_level(logging.WARNING, logger="dmuon_hf.presets"):
        table = routes(model)
        routes(model)
    assert table["0.experts.weight_in"].route == "adamw"
    (record,) = caplog.records
    assert record.message.startswith("2 weights of experts are updated by AdamW") and "layouts=" in record.message


def test_recurrent_gates_and_heads_of_mamba_are_stacks_of_a_matrix_per_head() -> None:
    config = tf.RecurrentGemmaConfig(
        num_hidden_layers=2, hidden_size=64, lru_width=64, intermediate_size=96, num_attention_heads=4, vocab_size=128
    )
    table = routes(tf.RecurrentGemmaForCausalLM(config))
    gate = table["model.layers.0.temporal_block.rg_lru.input_gate_weight"]
    assert (gate.route, gate.spec, gate.reason) == ("muon", MatrixSpec(transposed=True), "linear weights of heads")


def test_qwen3_next_query_rows_are_what_its_forward_calls_query() -> None:
    attention = _qwen3_next().model.layers[1].self_attn
    query, gate = MatrixSpec(groups=4, sections=(16, 16)).split(attention.q_proj.weight)
    hidden = torch.randn(1, 3, 64)
    expected_query, expected_gate = torch.chunk(attention.q_proj(hidden).view(1, 3, -1, 32), 2, dim=-1)
    torch.testing.assert_close(hidden @ query.T, expected_query.reshape(1, 3, -1))
    torch.testing.assert_close(hidden @ gate.T, expected_gate.reshape(1, 3, -1))


def test_phi3_fused_projections_have_sections() -> None:
    table = routes(tf.Phi3ForCausalLM(tf.Phi3Config(**SMALL)))
    assert table["model.layers.0.self_attn.qkv_proj.weight"].spec == MatrixSpec(sections=(64, 32, 32))
    assert table["model.layers.0.mlp.gate_up_proj.weight"].spec == MatrixSpec(sections=(96, 96))


def test_gpt2_conv1d_weights_are_transposed_and_embeddings_stay_on_adamw() -> None:
    table = routes(tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64)))
    assert table["transformer.h.0.attn.c_attn.weight"].spec == MatrixSpec(sections=(64, 64, 64), transposed=True)
    assert table["transformer.h.0.mlp.c_fc.weight"].spec == MatrixSpec(transposed=True)
    assert table["transformer.wte.weight"].route == table["transformer.wpe.weight"].route == "adamw"


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, MatrixSpec(groups=2, sections=(32, 16, 16))),
        ({"multi_query": True}, MatrixSpec(groups=1, sections=(64, 16, 16))),
        ({"multi_query": False}, MatrixSpec(groups=4, sections=(16, 16, 16))),
    ],
)
def test_falcon_fused_qkv_follows_its_attention_variant(options: dict[str, object], spec: MatrixSpec) -> None:
    config = tf.FalconConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=128, **options)
    table = routes(tf.FalconForCausalLM(config))
    assert table["transformer.h.0.self_attention.query_key_value.weight"].spec == spec


def test_encoder_decoder_embeddings_and_position_biases_stay_on_adamw() -> None:
    config = tf.T5Config(d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, vocab_size=128)
    table = routes(tf.T5ForConditionalGeneration(config))
    adamw = [name for name, route in table.items() if route.route == "adamw"]
    assert "shared.weight" in adamw
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight" in adamw
    assert table["decoder.block.1.layer.1.EncDecAttention.k.weight"].route == "muon"


def test_heads_and_poolers_outside_the_blocks_stay_on_adamw() -> None:
    config = tf.BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=128
    )
    table = routes(tf.BertForSequenceClassification(config))
    assert (
        table["classifier.weight"].reason
        == table["bert.pooler.dense.weight"].reason
        == "outside the transformer blocks"
    )


def test_tied_weight_appears_once() -> None:
    table = routes(tiny_llama(tie_word_embeddings=True))
    assert "model.embed_tokens.weight" in table
    assert "lm_head.weight" not in table


def test_frozen_parameter_is_on_no_optimizer() -> None:
    model = tiny_llama()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    assert routes(model)["model.layers.0.self_attn.q_proj.weight"].route == "frozen"


def test_predicate_replaces_the_choice_but_keeps_the_layout() -> None:
    model = tf.Phi3ForCausalLM(tf.Phi3Config(**SMALL))
    table = routes(model, predicate=lambda name, parameter: name.endswith("qkv_proj.weight"))
    muon = {name: route for name, route in table.items() if route.route == "muon"}
    assert len(muon) == 2
    assert all(route.spec == MatrixSpec(sections=(64, 32, 32)) for route in muon.values())


def test_override_pattern_moves_matching_parameters() -> None:
    table = routes(tiny_llama(), overrides={"*.k_proj.weight": "adamw", "lm_head.weight": "muon"})
    assert table["model.layers.1.self_attn.k_proj.weight"].route == "adamw"
    assert table["lm_head.weight"].route == "muon"


def test_override_without_a_match_raises() -> None:
    with pytest.raises(ConfigurationError, match=r"no_such"):
        routes(tiny_llama(), overrides={"*.no_such.weight": "adamw"})


def test_override_of_a_vector_to_muon_raises() -> None:
    with pytest.raises(ConfigurationError, match=r"model\.norm\.weight.*\(64,\)"):
        routes(tiny_llama(), overrides={"model.norm.weight": "muon"})


class _Fused(nn.Module):
    """A block whose `both` is two matrices by what its forward does, and whose `qkv` is one whatever its name."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(8, 24)
        self.qkv = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.both(x)
        left, right = mixed.chunk(2, dim=-1)
        return self.qkv(left * right)


class _FusedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Fused(), _Fused()])


def test_unknown_fused_layout_is_one_matrix_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = _FusedModel()
    with caplog.at_level(logging.WARNING, logger="dmuon_hf.presets"):
        table = routes(model)
        routes(model)
    assert table["layers.0.both.weight"].spec == table["layers.0.qkv.weight"].spec == MatrixSpec()
    assert "not known here" in table["layers.0.both.weight"].reason
    assert "not known here" not in table["layers.0.qkv.weight"].reason
    messages = [record.message for record in caplog.records if "fused" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith("2 weights are fused") and messages[0].endswith("first layers.0.both.weight")


@pytest.mark.parametrize("layout", ["gate_up", MatrixSpec(sections=(12, 12))])
def test_layout_of_the_caller_is_taken_and_silences_the_warning(
    layout: MatrixSpec | str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="dmuon_hf.presets"):
        table = routes(_FusedModel(), layouts={"*.both.weight": layout})
    assert table["layers.1.both.weight"].spec == MatrixSpec(sections=(12, 12))
    assert not caplog.records


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"*.no_such.weight": "qkv"}, "no_such"),
        ({"*.both.weight": "quaternion"}, "quaternion"),
        ({"*.both.weight": MatrixSpec(sections=(7, 7))}, "layers.0.both.weight"),
        ({"*.both.weight": "qkv_per_head"}, "layers.0.both.weight"),
    ],
)
def test_layout_of_the_caller_that_cannot_be_raises(layouts: dict[str, MatrixSpec | str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        routes(_FusedModel(), layouts=layouts)


def test_per_head_cuts_queries_keys_and_values_and_nothing_else() -> None:
    table = routes(tiny_llama(), per_head=True)
    assert table["model.layers.0.self_attn.q_proj.weight"].spec == MatrixSpec(sections=(16,) * 4)
    assert table["model.layers.0.self_attn.k_proj.weight"].spec == MatrixSpec(sections=(16,) * 2)
    assert table["model.layers.0.self_attn.o_proj.weight"].spec == MatrixSpec()
    fused = routes(tf.Phi3ForCausalLM(tf.Phi3Config(**SMALL)), per_head=True)
    assert fused["model.layers.0.self_attn.qkv_proj.weight"].spec == MatrixSpec(sections=(16,) * 8)
    assert fused["model.layers.0.mlp.gate_up_proj.weight"].spec == MatrixSpec(sections=(96, 96))


def test_composite_model_uses_the_preset_of_its_text_model() -> None:
    class Composite(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = tf.Phi3ForCausalLM(tf.Phi3Config(**SMALL))
            self.vision = nn.Linear(8, 64)

    table = routes(Composite())
    name = "language_model.model.layers.0.self_attn.qkv_proj.weight"
    assert table[name].spec == MatrixSpec(sections=(64, 32, 32))
    assert table["vision.weight"].route == "adamw"


def test_attribute_that_differs_between_the_layers_of_a_configuration_is_looked_for_elsewhere() -> None:
    class Unlike:
        n_head = 4

        @property
        def num_heads(self) -> int:
            raise RuntimeError("it is another one in each layer")

    config: Any = Unlike()
    assert Projection("w", rows=96, transposed=False, callers=(), config=config).heads == 4


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"layouts": {"*.q": None}}, "MatrixSpec or the name"),
        ({"layouts": {"*.q": 3}}, "MatrixSpec or the name"),
        ({"layouts": ["*.q"]}, "takes a mapping"),
        ({"overrides": {"*.q": True}}, "'muon' or 'adamw'"),
        ({"overrides": "muon"}, "takes a mapping"),
        ({"layouts": {"*.q": "whole"}}, "folded=True"),
        ({"layouts": {"*.q": MatrixSpec(folded=True, sections=(3, 4))}}, "makes 7 rows"),
    ],
)
def test_what_is_no_layout_or_route_is_refused_with_what_to_give(said: dict[str, Any], message: str) -> None:
    with torch.device("meta"):
        model = _xlnet()
    with pytest.raises(ConfigurationError, match=message):
        routes(model, **said)
