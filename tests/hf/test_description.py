"""The table that `describe` prints."""

from __future__ import annotations

import re

import transformers as tf
from torch.distributed.device_mesh import init_device_mesh

import dmuon_hf.core as dmuon
from dmuon_hf import create_optimizer, describe
from tests.harness import run_ranks
from tests.hf.support import tiny_llama


def _row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.split()


def test_model_alone_shows_shapes_routes_and_reasons() -> None:
    text = describe(tiny_llama())
    assert text.startswith("LlamaForCausalLM: muon 14 parameters (61,440 elements), adamw 7 parameters")
    assert _row(text, "parameter") == ["parameter", "shape", "route", "why"]
    assert _row(text, "lm_head.weight") == ["lm_head.weight", "128x64", "adamw", "output", "embedding"]


def test_layers_of_one_kind_share_a_row() -> None:
    text = describe(tiny_llama())
    assert _row(text, "model.layers.*.self_attn.k_proj.weight")[1:3] == ["32x64", "muon"]


def test_optimizer_adds_group_rate_and_decay() -> None:
    model = tiny_llama()
    optimizer = create_optimizer(model, lr=1e-3, muon_lr=2e-3, weight_decay=0.1)
    text = describe(model, optimizer)
    assert _row(text, "model.layers.*.mlp.up_proj.weight")[2:6] == ["muon", "decay/muon", "0.002", "0.1"]
    assert _row(text, "model.norm.weight")[2:6] == ["adamw", "no_decay/adamw", "0.001", "0"]


def test_fused_weight_shows_its_logical_matrices() -> None:
    config = tf.Phi3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        pad_token_id=0,
    )
    assert "1 of 64x64, 2 of 32x64" in describe(tf.Phi3ForCausalLM(config))


def test_choice_of_the_caller_is_shown_instead_of_the_preset() -> None:
    model = tiny_llama()
    optimizer = create_optimizer(model, lr=1e-3, routes={"*.k_proj.weight": "adamw"})
    row = _row(describe(model, optimizer), "model.layers.*.self_attn.k_proj.weight")
    assert row[2] == "adamw"
    assert row[-4:] == ["chosen", "by", "the", "caller"]


def describe_rows(rank: int, world: int) -> str:
    model = tiny_llama()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    overrides = [{"name": "_proj", "set": {"route": "muon"}}, {"name": "lm_head", "set": {"route": "sharded_adamw"}}]
    policy = {"defaults": {"route": "adamw"}, "overrides": overrides}
    dmuon.dedicate_params(model, mesh, lambda name, param: True, param_policy=policy)
    return describe(model, dmuon.Muon(model))


def test_parameter_in_rows_has_no_owner() -> None:
    numel = sum(param.numel() for name, param in tiny_llama().named_parameters() if name != "lm_head.weight")
    for text in run_ranks(describe_rows, 2):
        assert {"all,", "rows"} <= set(_row(text, "lm_head.weight"))
        (owners,) = re.findall(r"elements each: 0: ([\d,]+), 1: ([\d,]+)", text)
        assert sum(int(count.replace(",", "")) for count in owners) == numel


def test_frozen_weight_is_in_no_group() -> None:
    model = tiny_llama()
    model.lm_head.weight.requires_grad_(False)
    optimizer = create_optimizer(model, lr=1e-3)
    text = describe(model, optimizer)
    assert "frozen 1 parameters (8,192 elements)" in text
    assert _row(text, "lm_head.weight")[2:] == ["frozen", "requires_grad", "is", "False"]


def test_like_vectors_of_a_layer_share_a_row_and_shares_are_given() -> None:
    text = describe(tiny_llama())
    assert _row(text, "model.layers.*.{input_layernorm,post_attention_layernorm}.weight")
    assert "of the elements: muon 78.6 %, adamw 21.4 %" in text.splitlines()


def test_no_line_of_a_vision_language_model_is_longer_than_a_page() -> None:
    text_config = tf.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    vision_config = tf.CLIPVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14
    )
    model = tf.LlavaForConditionalGeneration(tf.LlavaConfig(text_config=text_config, vision_config=vision_config))
    optimizer = create_optimizer(
        model, lr=1e-3, param_groups={"model.vision_tower.encoder.layers.*": {"lr_factor": 0.1}}, scalar_lr=1e-3
    )
    lines = describe(model, optimizer).splitlines()
    assert max(map(len, lines)) <= 120
    # Both towers and the projector, with whole names.
    for name, count in (("vision_tower.encoder.layers.*", 1), ("language_model.layers.*", 1)):
        assert sum(line.startswith(f"model.{name}.self_attn.q_proj.weight") for line in lines) == count
