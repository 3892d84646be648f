"""The precisions that TrainingArguments and models can ask for: fp32 masters and momentum where they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.hf.support import arguments, as_launched, finish, fsdp_env, make_trainer, tiny_llama

pytestmark = pytest.mark.timeout(1200)


def _train(rank: int, world: int, directory: str, bf16_model: bool, mixed: bool) -> dict[str, Any]:
    if world > 1:
        as_launched()
    model = tiny_llama().to(torch.bfloat16 if bf16_model else torch.float32)
    settings = {"per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 8}
    trainer = make_trainer(model, arguments(directory, max_steps=2, bf16=mixed, **settings))
    trainer.train()
    weight = trainer.model.model.layers[0].mlp.up_proj.weight
    result = {
        "weight": weight.dtype,
        "momentum": trainer.optimizer.state[weight]["momentum_buffer"].dtype,
        "loss": trainer.evaluate()["eval_loss"],
    }
    finish()
    return result


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("bf16_model", "mixed", "weights"),
    [
        (False, True, [torch.float32, torch.float32]),
        (True, False, [torch.bfloat16, torch.bfloat16]),
        # accelerate makes fp32 masters of what it shards; one process trains the weights that it is given.
        (True, True, [torch.bfloat16, torch.float32]),
    ],
)
def test_momentum_is_fp32_in_every_precision(
    tmp_path: Path, world: int, bf16_model: bool, mixed: bool, weights: list[torch.dtype]
) -> None:
    env = fsdp_env(world, ACCELERATE_MIXED_PRECISION="bf16" if mixed else "no") if world > 1 else {}
    for result in run_ranks(_train, world, str(tmp_path), bf16_model, mixed, init=False, env=env):
        assert result["weight"] == weights[world - 1]
        assert result["momentum"] == torch.float32
        assert result["loss"] == pytest.approx(4.798, abs=0.01)
