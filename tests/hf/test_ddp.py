"""Trainer and accelerate without FSDP on several processes: DDP, with owners for the updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import dmuon_hf
from tests.harness import run_ranks
from tests.hf.support import (
    arguments,
    error_of,
    finish,
    full_weights,
    losses,
    make_trainer,
    tiny_dataset,
    tiny_llama,
)

BATCH = 8


def _train(rank: int, world: int, directory: str, overrides: dict[str, Any], times: int) -> dict[str, Any]:
    accumulate = overrides.get("gradient_accumulation_steps", 1)
    args = arguments(
        directory,
        max_steps=3,
        per_device_train_batch_size=BATCH // world // accumulate,
        # Keeps the sign of gradients that are zero but for rounding out of AdamW's first steps.
        adam_epsilon=1e-3,
        **overrides,
    )
    trainer = make_trainer(tiny_llama(tie_word_embeddings=True), args)
    for _ in range(times):
        trainer.train()
    trainer.save_model()
    wrapped = trainer.model_wrapped
    result = {
        "ddp": isinstance(wrapped, DistributedDataParallel),
        "reduced by DDP": len(getattr(wrapped, "_module_parameters", ())),
        "weights": full_weights(trainer.model),
        "losses": losses(trainer),
        "loss": trainer.evaluate()["eval_loss"],
        "description": dmuon_hf.describe(trainer.model, trainer.optimizer),
    }
    finish()
    return result


@pytest.mark.parametrize(
    ("overrides", "times"),
    [({}, 1), ({"gradient_accumulation_steps": 2}, 2), ({"ddp_static_graph": True, "gradient_checkpointing": True}, 1)],
    ids=["plain", "accumulation, two runs", "static graph, checkpointing"],
)
def test_trainer_under_ddp_trains_like_one_process(tmp_path: Path, overrides: dict[str, Any], times: int) -> None:
    alone_overrides = {name: value for name, value in overrides.items() if name != "ddp_static_graph"}
    alone = run_ranks(_train, 1, str(tmp_path / "alone"), alone_overrides, times, init=False)[0]
    results = run_ranks(_train, 2, str(tmp_path / "ddp"), overrides, times, init=False, timeout=100)
    saved = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "ddp").state_dict()
    for result in results:
        assert result["ddp"] and not alone["ddp"]
        # Two norms in each of two layers, one at the end, and the embedding: the rest has owners.
        assert result["reduced by DDP"] == 6
        assert "owners on 2" in result["description"]
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-3)
        for name, value in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-3, atol=2e-5, msg=name)
            assert torch.equal(result["weights"][name], results[0]["weights"][name]), name
            assert torch.equal(saved[name], results[0]["weights"][name]), name
    torch.testing.assert_close(torch.tensor(results[0]["losses"]), torch.tensor(alone["losses"]), rtol=1e-3, atol=1e-5)


def _shared(rank: int, world: int) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = tf.T5ForConditionalGeneration(
        tf.T5Config(
            d_model=64, d_ff=96, num_layers=1, num_heads=4, d_kv=16, vocab_size=128, decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )  # fmt: skip
    optimizer = dmuon_hf.create_optimizer(model, lr=1e-2)
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in tiny_dataset(16)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
    seen = []
    for batch in [*loader, *loader]:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(float(loss))
    assert seen[-1] < seen[0]
    for name, value in accelerator.get_state_dict(model).items():
        gathered = accelerator.gather(value.unsqueeze(0))
        assert torch.equal(gathered[0], gathered[1]), name
    finish()


def test_model_that_shares_its_embedding_among_encoder_and_decoder_trains_in_a_loop_of_accelerate() -> None:
    run_ranks(_shared, 2, init=False)


def _other_model(rank: int, world: int) -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = dmuon_hf.create_optimizer(tiny_llama(), lr=1e-3)
    accelerator.prepare(tiny_llama(), optimizer)


def test_optimizer_of_another_model_is_refused() -> None:
    outcomes = run_ranks(_other_model, 2, init=False, expect_failure=True, linger=10)
    assert all("another model" in error_of(outcome) for outcome in outcomes)
