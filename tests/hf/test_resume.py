"""A run that is interrupted and resumed equals the uninterrupted run, to the bit, on the same ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer
from torch import nn
from transformers import TrainerCallback

from tests.harness import run_ranks
from tests.hf.support import (
    arguments,
    as_launched,
    error_of,
    finish,
    fsdp_env,
    full_weights,
    losses,
    make_trainer,
    tiny_llama,
)

# Up to three runs of a Trainer in one test, beside whatever else the machine does.
pytestmark = pytest.mark.timeout(1200)


class _Snapshot(TrainerCallback):
    """Keeps what the run starts from: weights and momentum after a checkpoint was loaded."""

    state: dict[str, dict[str, torch.Tensor]]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.state = _snapshot(kwargs["model"], kwargs["optimizer"])


def _snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    momentum = {
        name: optimizer.state[p]["momentum_buffer"].full_tensor().clone()
        for name, p in model.named_parameters()
        if "momentum_buffer" in optimizer.state[p]
    }
    return {"weights": full_weights(model), "momentum": momentum}


def _run(rank: int, world: int, directory: str, steps: int, resume: bool) -> dict[str, Any]:
    as_launched()
    args = arguments(
        directory, max_steps=steps, save_strategy="steps", save_steps=3, lr_scheduler_type="constant", seed=7
    )
    trainer = make_trainer(tiny_llama(), args)
    begin = _Snapshot()
    trainer.add_callback(begin)
    trainer.train(resume_from_checkpoint=True if resume else None)
    result = {
        "fsdp2": trainer.accelerator.is_fsdp2,
        "losses": losses(trainer),
        "begin": begin.state,
        "end": _snapshot(trainer.model, trainer.optimizer),
    }
    finish()
    return result


def _assert_equal(actual: dict[str, dict[str, torch.Tensor]], expected: dict[str, dict[str, torch.Tensor]]) -> None:
    for kind, tensors in expected.items():
        for name, value in tensors.items():
            assert torch.equal(actual[kind][name], value), f"{kind} of {name}"


@pytest.mark.parametrize("state_dict", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize(("world", "replicas"), [(4, 2), (2, 1)])
def test_resume_after_three_steps_equals_six_straight(
    tmp_path: Path, world: int, replicas: int, state_dict: str
) -> None:
    env = fsdp_env(world, replicas=replicas, state_dict=state_dict)
    straight = run_ranks(_run, world, str(tmp_path / "a"), 6, False, init=False, env=env, timeout=100)[0]
    run_ranks(_run, world, str(tmp_path / "b"), 3, False, init=False, env=env, timeout=100)
    resumed = run_ranks(_run, world, str(tmp_path / "b"), 6, True, init=False, env=env, timeout=100)[0]

    assert resumed["fsdp2"]
    assert resumed["losses"] == straight["losses"]
    _assert_equal(resumed["end"], straight["end"])


def test_sharded_checkpoint_of_hsdp_resumes_on_two_ranks(tmp_path: Path) -> None:
    env = fsdp_env(4, replicas=2, state_dict="SHARDED_STATE_DICT")
    saved = run_ranks(_run, 4, str(tmp_path), 3, False, init=False, env=env, timeout=100)[0]
    env = fsdp_env(2, state_dict="SHARDED_STATE_DICT")
    resumed = run_ranks(_run, 2, str(tmp_path), 4, True, init=False, env=env, timeout=100)[0]
    _assert_equal(resumed["begin"], saved["end"])


def _die_in_second_save(rank: int, world: int, directory: str, victim: int) -> None:
    as_launched()
    save, saves = transformers.trainer.save_fsdp_optimizer, []

    def dying(*args: Any, **kwargs: Any) -> None:
        saves.append(1)
        if len(saves) == 2 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        save(*args, **kwargs)

    transformers.trainer.save_fsdp_optimizer = dying
    _run(rank, world, directory, 6, False)


@pytest.mark.parametrize(("state_dict", "victim"), [("FULL_STATE_DICT", 0), ("SHARDED_STATE_DICT", 1)])
def test_kill_during_a_save_leaves_the_checkpoint_before_it_to_resume_from(
    tmp_path: Path, state_dict: str, victim: int
) -> None:
    env = fsdp_env(2, state_dict=state_dict)
    straight = run_ranks(_run, 2, str(tmp_path / "a"), 6, False, init=False, env=env, timeout=100)[0]
    crashed = str(tmp_path / "b")
    outcomes = run_ranks(
        _die_in_second_save, 2, crashed, victim, init=False, env=env, timeout=60, grace=3, expect_failure=True
    )
    assert outcomes[victim].status == "died"
    assert (tmp_path / "b" / "checkpoint-6").exists()

    resumed = run_ranks(_run, 2, crashed, 6, True, init=False, env=env, timeout=100)[0]
    assert [entry[0] for entry in resumed["losses"]] == [1, 2, 3, 4, 5, 6]
    _assert_equal(resumed["end"], straight["end"])


def test_resume_without_a_complete_checkpoint_raises(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{")
    (outcome,) = run_ranks(_run, 1, str(tmp_path), 3, True, init=False, expect_failure=True)
    assert "no complete checkpoint" in error_of(outcome)
