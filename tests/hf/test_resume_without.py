"""A checkpoint that lacks something: a new schedule where only that is gone, else an error and no lost momentum."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

import dmuon_hf
from dmuon_hf import ConfigurationError
from tests.harness import run_ranks
from tests.hf.support import (
    arguments,
    as_launched,
    error_of,
    finish,
    fsdp_env,
    full_weights,
    make_trainer,
    tiny_dataset,
    tiny_llama,
)
from tests.hf.test_resume_modes import Begin, snapshot

pytestmark = pytest.mark.timeout(1200)

MODES = {"one process": (1, ""), "full": (2, "FULL_STATE_DICT"), "sharded": (2, "SHARDED_STATE_DICT")}


def _run(rank: int, world: int, directory: str, steps: int, checkpoint: Any, **settings: Any) -> dict[str, Any]:
    if world > 1:
        as_launched()
    args = arguments(directory, max_steps=steps, **{"save_strategy": "steps", "save_steps": 3} | settings)
    trainer = make_trainer(tiny_llama(), args)
    begin = Begin()
    trainer.add_callback(begin)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dmuon_hf.trainer_resume").addHandler(handler)
    trainer.train(resume_from_checkpoint=checkpoint)
    result = {
        "said": said,
        "decay": {group["weight_decay"] for group in trainer.optimizer.param_groups},
        "begin": begin.taken,
        "end": snapshot(trainer.model, trainer.optimizer),
        "rates": [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry],
    }
    finish()
    return result


def _start(mode: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    world, state_dict = MODES[mode]
    env = fsdp_env(world, state_dict=state_dict) if world > 1 else {}
    return run_ranks(function, world, *args, init=False, env=env, timeout=100, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The checkpoint of step 3 of 6 in every mode, and the whole run."""
    runs = {}
    for mode in MODES:
        directory = tmp_path_factory.mktemp("saved")
        runs[mode] = directory / "checkpoint-3", _start(mode, _run, str(directory), 6, None)[0]
    return runs


@pytest.fixture
def checkpoint(saved: dict[str, tuple[Path, dict[str, Any]]], mode: str, tmp_path: Path) -> Path:
    """A copy to take something out of."""
    copy = tmp_path / "checkpoint-3"
    shutil.copytree(saved[mode][0], copy)
    return copy


@pytest.mark.parametrize("mode", MODES)
def test_without_scheduler_the_run_goes_on_with_its_momentum_and_the_schedule_of_its_arguments(
    saved: dict[str, tuple[Path, dict[str, Any]]], mode: str, checkpoint: Path, tmp_path: Path
) -> None:
    whole = _start(mode, _run, str(tmp_path), 6, checkpoint)[0]
    (checkpoint / "scheduler.pt").unlink()
    resumed = _start(mode, _run, str(tmp_path), 6, checkpoint)[0]
    assert any(value.any() for name, value in resumed["begin"].items() if name.startswith("momentum_buffer"))
    for kind, expected in (("begin", whole["begin"]), ("end", saved[mode][1]["end"])):
        for name, value in expected.items():
            assert torch.equal(resumed[kind][name], value), f"{kind}: {name}"
    assert resumed["rates"] == saved[mode][1]["rates"]


@pytest.mark.parametrize("mode", ["one process", "sharded"])
def test_without_scheduler_other_rate_and_schedule_hold_from_the_resumed_step(
    mode: str, checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "scheduler.pt").unlink()
    settings = {"learning_rate": 2e-3, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}
    resumed = _start(mode, _run, str(tmp_path), 6, str(checkpoint), **settings)[0]
    assert resumed["rates"][-3:] == pytest.approx([2e-3 * 3 / 5, 2e-3 * 4 / 5, 2e-3])


@pytest.mark.parametrize("mode", ["one process", "sharded"])
def test_settings_of_the_checkpoint_count_and_it_is_said(
    saved: dict[str, tuple[Path, dict[str, Any]]], mode: str, checkpoint: Path, tmp_path: Path
) -> None:
    ranks = _start(mode, _run, str(tmp_path), 6, str(checkpoint), learning_rate=2e-3, weight_decay=0.2)
    assert ranks[0]["rates"] == saved[mode][1]["rates"]
    assert ranks[0]["decay"] == {0.1, 0.0}
    (text,) = ranks[0]["said"]
    assert "initial_lr of 'decay/muon' is 0.005 and not 0.002" in text
    assert "weight_decay of 'decay/adamw' is 0.1 and not 0.2" in text
    assert not any(rank["said"] for rank in ranks[1:])
    assert saved[mode][1]["said"] == []


def _remove(*patterns: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        for pattern in patterns:
            for path in checkpoint.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def _cut(pattern: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        for path in checkpoint.glob(pattern):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return damage


def _saved_by_adamw(checkpoint: Path) -> None:
    torch.save(torch.optim.AdamW(tiny_llama().parameters()).state_dict(), next(checkpoint.glob("optimizer.*")))


_DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "optimizer": (_remove("optimizer*"), "no optimizer state"),
    "weights": (_remove("model*", "pytorch_model*"), "no weights"),
    "trainer state": (_remove("trainer_state.json"), "no whole trainer_state.json"),
    "end of trainer state": (_cut("trainer_state.json"), "no whole trainer_state.json"),
    "everything": (_remove("*"), "no weights"),
}
_DAMAGES_OF: dict[str, dict[str, tuple[Callable[[Path], None], str]]] = {
    "one process": {
        "end of optimizer": (_cut("optimizer.pt"), "optimizer.pt cannot be read"),
        "end of weights": (_cut("model.safetensors"), "model.safetensors cannot be read"),
        "Muon": (_saved_by_adamw, "another optimizer"),
    },
    "full": {
        "end of optimizer": (_cut("optimizer.bin"), "optimizer.bin cannot be read"),
        "end of weights": (_cut("pytorch_model_fsdp.bin"), "pytorch_model_fsdp.bin cannot be read"),
        "Muon": (_saved_by_adamw, "another optimizer"),
    },
    "sharded": {
        "metadata": (_remove("optimizer_0/.metadata"), "no optimizer state"),
        "end of optimizer": (_cut("optimizer_0/*.distcp"), "optimizer_0 cannot be read"),
        "end of weights": (_cut("pytorch_model_fsdp_0/*.distcp"), "pytorch_model_fsdp_0 cannot be read"),
    },
}


@pytest.mark.parametrize(
    ("mode", "missing"),
    [(mode, name) for mode in MODES for name in (*_DAMAGES, *_DAMAGES_OF[mode])],
)
def test_resume_without_the_rest_raises_on_every_rank(
    mode: str, missing: str, checkpoint: Path, tmp_path: Path
) -> None:
    damage, message = (_DAMAGES | _DAMAGES_OF[mode])[missing]
    damage(checkpoint)
    outcomes = _start(mode, _run, str(tmp_path), 6, str(checkpoint), expect_failure=True, linger=10)
    for outcome in outcomes:
        assert outcome.exception is not None and outcome.exception.is_a(dmuon_hf.ConfigurationError)
        assert message in error_of(outcome), error_of(outcome)


def _load_state(rank: int, world: int, directory: str) -> list[str]:
    """Messages of loading a state without its scheduler and without its scaler, with what became of the weights."""
    if world > 1:
        as_launched()
    accelerator = Accelerator(cpu=True)
    model: Any = tiny_llama(num_hidden_layers=1)
    optimizer: Any = dmuon_hf.create_optimizer(model, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.save_state(directory)
    ids = torch.arange(16)[None]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    before = full_weights(model)
    accelerator.wait_for_everyone()
    messages = []
    for name in ("scheduler.bin", "scaler.pt"):
        if name == "scheduler.bin" and accelerator.is_main_process:
            Path(directory, name).rename(Path(directory, "away"))
        accelerator.wait_for_everyone()
        if name == "scaler.pt":
            accelerator.scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(ConfigurationError) as caught:
            accelerator.load_state(directory)
        messages.append(str(caught.value))
        accelerator.wait_for_everyone()
        if name == "scheduler.bin" and accelerator.is_main_process:
            Path(directory, "away").rename(Path(directory, name))
        accelerator.wait_for_everyone()
    assert all(torch.equal(weight, before[name]) for name, weight in full_weights(model).items())
    finish()
    return messages


@pytest.mark.parametrize("world", [1, 2])
def test_state_without_scheduler_or_scaler_is_refused_before_anything_is_loaded(tmp_path: Path, world: int) -> None:
    env = fsdp_env(world) if world > 1 else {}
    for scheduler, scaler in run_ranks(_load_state, world, str(tmp_path), init=False, env=env):
        assert "no scheduler.bin, so nothing was loaded" in scheduler
        assert "no scaler.pt, so nothing was loaded" in scaler


def test_resume_from_no_directory_raises(tmp_path: Path) -> None:
    (outcome,) = _start("one process", _run, str(tmp_path), 6, "True", expect_failure=True)
    assert "'True' is no directory" in error_of(outcome)


class _LoadsNothing(Trainer):
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        pass


def _subclass(rank: int, world: int, directory: str, checkpoint: str) -> None:
    if world > 1:
        as_launched()
    data = tiny_dataset()
    args = arguments(directory, max_steps=6)
    trainer = _LoadsNothing(model=tiny_llama(), args=args, train_dataset=data, optimizers=dmuon_hf.create())
    trainer.train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize("mode", MODES)
def test_trainer_that_does_not_load_the_optimizer_raises(mode: str, checkpoint: Path, tmp_path: Path) -> None:
    for outcome in _start(mode, _subclass, str(tmp_path), str(checkpoint), expect_failure=True, linger=10):
        assert "momentum would start from zero: _LoadsNothing" in error_of(outcome)
