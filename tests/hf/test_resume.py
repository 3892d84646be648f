"""A run that is interrupted and resumed equals the uninterrupted run, to the bit, on the same ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.hf.support import arguments, as_launched, finish, fsdp_env, full_weights, losses, make_trainer, tiny_llama


def _run(rank: int, world: int, directory: str, steps: int, resume: bool) -> dict[str, Any]:
    as_launched()
    args = arguments(
        directory, max_steps=steps, save_strategy="steps", save_steps=3, lr_scheduler_type="constant", seed=7
    )
    trainer = make_trainer(tiny_llama(), args)
    trainer.train(resume_from_checkpoint=True if resume else None)
    momentum = {
        name: trainer.optimizer.state[p]["momentum_buffer"].full_tensor().clone()
        for name, p in trainer.model.named_parameters()
        if "momentum_buffer" in trainer.optimizer.state[p]
    }
    result = {
        "fsdp2": trainer.accelerator.is_fsdp2,
        "losses": losses(trainer),
        "weights": full_weights(trainer.model),
        "momentum": momentum,
    }
    finish()
    return result


@pytest.mark.parametrize("state_dict", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize(("world", "replicas"), [(4, 2), (2, 1)])
def test_resume_after_three_steps_equals_six_straight(tmp_path: Path, world: int, replicas: int, state_dict: str) -> None:
    env = fsdp_env(world, replicas=replicas, state_dict=state_dict)
    straight = run_ranks(_run, world, str(tmp_path / "a"), 6, False, init=False, env=env, timeout=100)[0]
    run_ranks(_run, world, str(tmp_path / "b"), 3, False, init=False, env=env, timeout=100)
    resumed = run_ranks(_run, world, str(tmp_path / "b"), 6, True, init=False, env=env, timeout=100)[0]

    assert resumed["fsdp2"]
    assert resumed["losses"] == straight["losses"]
    for kind in ("weights", "momentum"):
        for name, value in straight[kind].items():
            assert torch.equal(resumed[kind][name], value), f"{kind} of {name}"


def test_sharded_checkpoint_of_hsdp_resumes_on_two_ranks(tmp_path: Path) -> None:
    env = fsdp_env(4, replicas=2, state_dict="SHARDED_STATE_DICT")
    straight = run_ranks(_run, 4, str(tmp_path), 3, False, init=False, env=env, timeout=100)[0]
    env = fsdp_env(2, state_dict="SHARDED_STATE_DICT")
    resumed = run_ranks(_run, 2, str(tmp_path), 3, True, init=False, env=env, timeout=100)[0]
    for kind in ("weights", "momentum"):
        for name, value in straight[kind].items():
            assert torch.equal(resumed[kind][name], value), f"{kind} of {name}"
