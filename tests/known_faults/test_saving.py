"""Saving, resuming and exporting through the Trainer and Accelerate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

import dmuon_hf
from tests.harness import run_ranks
from tests.hf.support import (
    arguments,
    as_launched,
    error_of,
    finish,
    fsdp_env,
    full_weights,
    make_trainer,
    tiny_llama,
)


def _resumable(rank: int, world: int, directory: str, steps: int, resume: bool) -> dict[str, Any]:
    """Train `steps` in all, saving after two, on bf16 compute where the launch asks for it."""
    as_launched()
    args = arguments(
        directory, max_steps=steps, save_strategy="steps", save_steps=2, lr_scheduler_type="constant", seed=7
    )
    trainer = make_trainer(tiny_llama().to(torch.bfloat16), args)
    trainer.train(resume_from_checkpoint=f"{directory}/checkpoint-2" if resume else None)
    result = {"weights": full_weights(trainer.model), "dtype": {p.dtype for p in trainer.model.parameters()}}
    finish()
    return result


def test_fp32_masters_and_momentum_survive_a_resume_under_bf16(tmp_path: Path) -> None:
    env = fsdp_env(2, state_dict="SHARDED_STATE_DICT", ACCELERATE_MIXED_PRECISION="bf16")
    straight = run_ranks(_resumable, 2, str(tmp_path / "a"), 3, False, init=False, env=env)[0]
    run_ranks(_resumable, 2, str(tmp_path / "b"), 2, False, init=False, env=env)
    resumed = run_ranks(_resumable, 2, str(tmp_path / "b"), 3, True, init=False, env=env)[0]
    assert resumed["dtype"] == {torch.float32}
    for name, weight in straight["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name
        # A weight that went through bf16 on its way would have no bits below its mantissa.
        if "proj" in name:
            assert not torch.equal(weight, weight.to(torch.bfloat16).float())


def _refused_resume(rank: int, world: int, directory: str) -> str:
    with pytest.raises(dmuon_hf.ConfigurationError) as refused:
        _resumable(rank, world, directory, 3, True)
    return str(refused.value)


def test_resume_from_a_checkpoint_without_optimizer_state_is_refused(tmp_path: Path) -> None:
    env = fsdp_env(2)
    run_ranks(_resumable, 2, str(tmp_path), 2, False, init=False, env=env)
    removed = [path for path in (tmp_path / "checkpoint-2").iterdir() if path.name.startswith("optimizer")]
    assert removed
    for path in removed:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for message in run_ranks(_refused_resume, 2, str(tmp_path), init=False, env=env):
        assert "checkpoint-2 holds no optimizer state" in message


def _export(rank: int, world: int, directory: str, tied: bool) -> dict[str, torch.Tensor]:
    as_launched()
    accelerator = Accelerator()
    model = tiny_llama(tie_word_embeddings=tied)
    optimizer = dmuon_hf.create_optimizer(model, lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(8).unsqueeze(0)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    state = accelerator.get_state_dict(model)
    model.save_pretrained(
        directory, is_main_process=accelerator.is_main_process, state_dict=state, max_shard_size="50KB"
    )
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    finish()
    return {"logits": logits}


@pytest.mark.parametrize("tied", [False, True])
def test_model_saved_in_parts_has_an_index_and_reopens_with_equal_logits(tmp_path: Path, tied: bool) -> None:
    results = run_ranks(_export, 2, str(tmp_path), tied, init=False, env=fsdp_env(2))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert ("lm_head.weight" in index["weight_map"]) is not tied
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(8).unsqueeze(0)).logits
    torch.testing.assert_close(results[0]["logits"], logits)


def _save_sharded(rank: int, world: int, directory: str) -> dict[str, torch.Tensor]:
    as_launched()
    trainer = make_trainer(tiny_llama(tie_word_embeddings=True), arguments(directory, max_steps=1))
    trainer.train()
    trainer.save_model(f"{directory}/model")
    weights = full_weights(trainer.model)
    finish()
    return weights


def test_model_saved_under_sharded_state_dict_reopens_with_the_trained_weights(tmp_path: Path) -> None:
    env = fsdp_env(2, state_dict="SHARDED_STATE_DICT")
    weights = run_ranks(_save_sharded, 2, str(tmp_path), init=False, env=env)[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def _save_on_main_process_only(rank: int, world: int, directory: str) -> None:
    as_launched()
    trainer = make_trainer(tiny_llama(), arguments(directory, max_steps=1))
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(directory)
    finish()


def test_model_saved_on_the_main_process_only_is_an_error_that_says_who_waits_where(tmp_path: Path) -> None:
    env = fsdp_env(2, DMUON_HANG_SECONDS="2")
    outcomes = run_ranks(
        _save_on_main_process_only, 2, str(tmp_path), init=False, env=env, grace=20, expect_failure=True
    )
    assert all(outcome.status in ("raised", "died") for outcome in outcomes)
    message = error_of(outcomes[0])
    assert "rank 0 waits in get_model_state_dict" in message and "rank 1 waits in torch.distributed.barrier" in message
