"""Hook boundaries are the modules that accelerate wraps."""

from __future__ import annotations

import pytest
import transformers as tf
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import nn

from dmuon_hf import ConfigurationError, HookBoundaries, routes
from tests.hf.support import tiny_llama


def _t5() -> nn.Module:
    config = tf.T5Config(d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, vocab_size=128)
    return tf.T5ForConditionalGeneration(config)


def _bert() -> nn.Module:
    config = tf.BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=128
    )
    return tf.BertForMaskedLM(config)


@pytest.mark.parametrize("make", [tiny_llama, _t5, _bert])
def test_boundary_of_every_muon_weight_is_wrapped_by_accelerate(make: object) -> None:
    model = make()  # type: ignore[operator]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    wraps = fsdp2_prepare_auto_wrap_policy(plugin, model)
    boundaries = HookBoundaries(model)
    muon = [name for name, route in routes(model).items() if route.route == "muon"]
    assert muon
    for name in muon:
        assert wraps(boundaries(name, model.get_parameter(name))), name


def test_encoder_and_decoder_blocks_of_one_number_are_two_boundaries() -> None:
    model = _t5()
    boundaries = HookBoundaries(model)
    encoder = boundaries.block("encoder.block.0.layer.0.SelfAttention.q.weight")
    decoder = boundaries.block("decoder.block.0.layer.0.SelfAttention.q.weight")
    assert encoder is model.encoder.block[0]
    assert decoder is model.decoder.block[0]


def test_named_block_classes_take_precedence() -> None:
    model = tiny_llama()
    boundaries = HookBoundaries(model, ["LlamaMLP", "LlamaAttention"])
    assert boundaries.block("model.layers.0.mlp.up_proj.weight") is model.model.layers[0].mlp


def test_unknown_block_class_raises() -> None:
    with pytest.raises(ConfigurationError, match="NoSuchLayer"):
        HookBoundaries(tiny_llama(), ["NoSuchLayer"])


@pytest.mark.parametrize("attribute", ["layers", "blocks", "h", "towers"])
def test_model_without_block_classes_uses_its_module_lists(attribute: str) -> None:
    model = nn.Module()
    setattr(model, attribute, nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]))
    assert HookBoundaries(model).block(f"{attribute}.0.0.weight") is getattr(model, attribute)[0]


def test_parameter_outside_all_blocks_has_its_own_module_as_boundary() -> None:
    model = tiny_llama()
    assert HookBoundaries(model)("lm_head.weight", model.lm_head.weight) is model.lm_head


def test_parameter_of_the_model_itself_raises() -> None:
    model = nn.Module()
    model.register_parameter("matrix", nn.Parameter(nn.Linear(2, 2).weight))
    with pytest.raises(ConfigurationError, match="matrix"):
        HookBoundaries(model)("matrix", model.get_parameter("matrix"))
