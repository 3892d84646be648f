"""Model families of unlike layouts train on two ranks as they do in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from tests.harness import run_ranks
from tests.hf.support import VOCABULARY, arguments, as_launched, finish, fsdp_env, full_weights, losses, make_trainer

_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}
_QWEN3_NEXT = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
# Model class, configuration, number of logical matrices.
FAMILIES: dict[str, tuple[type, Any, int]] = {
    "mistral": (tf.MistralForCausalLM, lambda: tf.MistralConfig(**_DECODER), 14),
    "qwen2": (tf.Qwen2ForCausalLM, lambda: tf.Qwen2Config(**_DECODER), 14),
    "qwen3-tied": (tf.Qwen3ForCausalLM, lambda: tf.Qwen3Config(**_DECODER, head_dim=16, tie_word_embeddings=True), 14),
    "phi3": (tf.Phi3ForCausalLM, lambda: tf.Phi3Config(**_DECODER), 2 * (3 + 1 + 2 + 1)),
    "gpt2": (
        tf.GPT2LMHeadModel,
        lambda: tf.GPT2Config(
            n_embd=64,
            n_layer=2,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        2 * (3 + 3),
    ),
    "qwen3-next": (
        tf.Qwen3NextForCausalLM,
        lambda: tf.Qwen3NextConfig(**_DECODER, **_QWEN3_NEXT),
        (4 + 1) + (2 + 3) + 2 * 3,
    ),
}


def _train(rank: int, world: int, family: str, directory: str, batch: int) -> dict[str, Any]:
    as_launched()
    model_class, config, _ = FAMILIES[family]
    torch.manual_seed(0)
    model: nn.Module = model_class(config())
    args = arguments(directory, max_steps=3, per_device_train_batch_size=batch, adam_epsilon=1e-4)
    trainer = make_trainer(model, args)
    trainer.train()
    result = {
        "losses": losses(trainer),
        "weights": full_weights(trainer.model),
        "matrices": trainer.optimizer.optimizer.ns_matrices,
    }
    finish()
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_as_one_process(tmp_path: Path, family: str) -> None:
    alone = run_ranks(_train, 1, family, str(tmp_path), 4, init=False)[0]
    ranks = run_ranks(_train, 2, family, str(tmp_path), 2, init=False, env=fsdp_env(2))
    assert alone["matrices"] == sum(rank["matrices"] for rank in ranks) == 3 * FAMILIES[family][2]
    for got, want in zip(ranks[0]["losses"], alone["losses"], strict=True):
        assert got[1:] == pytest.approx(want[1:], rel=1e-3)
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], weight, rtol=1e-3, atol=1e-4)
