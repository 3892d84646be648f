"""A checkpoint resumes in every mode, whichever saved it: weights, optimizer state and what training makes of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from tests.harness import run_ranks
from tests.hf.support import arguments, as_launched, finish, fsdp_env, full_weights, losses, make_trainer, tiny_llama

pytestmark = pytest.mark.timeout(1200)

# World size, replicas, FSDP's state dict type.
MODES: dict[str, tuple[int, int, str]] = {
    "one process": (1, 1, ""),
    "full": (2, 1, "FULL_STATE_DICT"),
    "sharded": (2, 1, "SHARDED_STATE_DICT"),
    "HSDP, sharded": (4, 2, "SHARDED_STATE_DICT"),
}
BATCH = 8


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and all optimizer state, whole. Collective."""
    taken = {f"weight of {name}": value for name, value in full_weights(model).items()}
    for name, parameter in model.named_parameters():
        taken |= {f"{key} of {name}": whole(value) for key, value in optimizer.state[parameter].items()}
    return taken


class Begin(TrainerCallback):
    """Keeps what the run starts from, after a checkpoint was loaded."""

    taken: dict[str, torch.Tensor]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.taken = snapshot(kwargs["model"], kwargs["optimizer"])


def _run(rank: int, world: int, directory: str, steps: int, checkpoint: str | None) -> dict[str, Any]:
    if world > 1:
        as_launched()
    args = arguments(
        directory,
        max_steps=steps,
        save_strategy="steps",
        save_steps=3,
        per_device_train_batch_size=BATCH // world,
        # Keeps the sign of gradients that are zero but for rounding out of AdamW's first steps.
        adam_epsilon=1e-3,
    )
    trainer = make_trainer(tiny_llama(tie_word_embeddings=True), args, scheduler=_constant_then_halved)
    begin = Begin()
    trainer.add_callback(begin)
    trainer.train(resume_from_checkpoint=checkpoint)
    result = {
        "fsdp2": trainer.accelerator.is_fsdp2,
        "begin": begin.taken,
        "end": snapshot(trainer.model, trainer.optimizer),
        "losses": losses(trainer),
        "rates": [group["lr"] for group in trainer.optimizer.param_groups],
    }
    finish()
    return result


def _constant_then_halved(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 4 else 0.5)


def run(mode: str, directory: Path, steps: int, checkpoint: Path | None = None) -> dict[str, Any]:
    world, replicas, state_dict = MODES[mode]
    env = fsdp_env(world, replicas=replicas, state_dict=state_dict) if world > 1 else {}
    given = None if checkpoint is None else str(checkpoint)
    results = run_ranks(_run, world, str(directory), steps, given, init=False, env=env, timeout=100)
    result: dict[str, Any] = results[0]
    assert result["fsdp2"] is (world > 1)
    return result


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Three steps in every mode, and the checkpoint of each."""
    runs = {}
    for mode in MODES:
        directory = tmp_path_factory.mktemp("saved")
        runs[mode] = run(mode, directory, 3) | {"checkpoint": directory / "checkpoint-3"}
    return runs


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Six steps without an interruption."""
    return run("one process", tmp_path_factory.mktemp("straight"), 6)


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(MODES, 2), ("one process", "one process")])
def test_trainer_resumes_in_any_mode_as_the_uninterrupted_run(
    saved: dict[str, dict[str, Any]], straight: dict[str, Any], tmp_path: Path, source: str, target: str
) -> None:
    resumed = run(target, tmp_path, 6, saved[source]["checkpoint"])
    assert resumed["begin"].keys() == saved[source]["end"].keys()
    for name, value in saved[source]["end"].items():
        assert torch.equal(resumed["begin"][name], value), name
    for name, value in straight["end"].items():
        torch.testing.assert_close(resumed["end"][name], value, rtol=1e-3, atol=2e-5, msg=name)
    assert resumed["rates"] == straight["rates"]
    assert [step for step, *_ in resumed["losses"]] == [1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(torch.tensor(resumed["losses"]), torch.tensor(straight["losses"]), rtol=1e-4, atol=1e-5)
