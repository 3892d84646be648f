"""A checkpoint resumes in every mode, whichever saved it: weights, optimizer state and what training makes of them."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import dmuon_hf
from dmuon_hf.core.plan import canonical_name
from dmuon_hf.resume import load_model, load_optimizer, saved_whole
from tests.harness import run_ranks
from tests.hf.support import (
    arguments,
    as_launched,
    finish,
    fsdp_env,
    full_weights,
    losses,
    make_trainer,
    tiny_dataset,
    tiny_llama,
)

pytestmark = pytest.mark.timeout(1200)

# World size, replicas, FSDP's state dict type.
MODES: dict[str, tuple[int, int, str]] = {
    "one process": (1, 1, ""),
    "full": (2, 1, "FULL_STATE_DICT"),
    "sharded": (2, 1, "SHARDED_STATE_DICT"),
    "HSDP, sharded": (4, 2, "SHARDED_STATE_DICT"),
    "DDP": (2, 1, ""),
}
PAIRS = [
    *((a, b) for a, b in itertools.permutations(MODES, 2) if "DDP" not in (a, b)),
    ("one process", "one process"),
    ("one process", "DDP"),
    ("HSDP, sharded", "DDP"),
    ("DDP", "one process"),
    ("DDP", "full"),
    ("DDP", "DDP"),
]
BATCH = 8


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and all optimizer state, whole. Collective."""
    taken = {f"weight of {name}": value for name, value in full_weights(model).items()}
    for raw_name, parameter in model.named_parameters():
        name = canonical_name(raw_name, model)
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
    env = fsdp_env(world, replicas=replicas, state_dict=state_dict) if state_dict else {}
    given = None if checkpoint is None else str(checkpoint)
    results = run_ranks(_run, world, str(directory), steps, given, init=False, env=env, timeout=100)
    result: dict[str, Any] = results[0]
    assert result["fsdp2"] is bool(state_dict)
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


@pytest.mark.parametrize(("source", "target"), PAIRS)
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


def _loop(rank: int, world: int, directory: str, load: bool, lr: float = 5e-3) -> dict[str, Any]:
    """Two batches of NorMuon, a save, two batches; or a load, and the last two."""
    if world > 1:
        as_launched()
    accelerator = Accelerator(cpu=True)
    model = tiny_llama()
    optimizer = dmuon_hf.create_optimizer(model, lr=lr, weight_decay=0.1, eps=1e-3, update_rule="normuon")
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in tiny_dataset(32)]
    loader = DataLoader(rows, batch_size=BATCH // world)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if load:
        accelerator.load_state(directory)
    taken = snapshot(model, optimizer)
    for number, batch in enumerate(loader):
        if load and number < 2:
            continue
        if not load and number == 2:
            accelerator.save_state(directory)
            taken = snapshot(model, optimizer)
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    result = {"middle": taken, "end": snapshot(model, optimizer)}
    finish()
    return result


def loop(mode: str, directory: Path, load: bool, lr: float = 5e-3) -> dict[str, Any]:
    world, replicas, state_dict = MODES[mode]
    env = fsdp_env(world, replicas=replicas, state_dict=state_dict) if state_dict else {}
    result: dict[str, Any] = run_ranks(_loop, world, str(directory), load, lr, init=False, env=env, timeout=100)[0]
    return result


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """What `save_state` writes in every mode, and the run around it."""
    directories = {mode: tmp_path_factory.mktemp("looped") for mode in MODES}
    return {mode: (directory, loop(mode, directory, False)) for mode, directory in directories.items()}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_load_state_continues_in_any_mode_as_the_saved_run_did(
    looped: dict[str, tuple[Path, dict[str, Any]]], source: str, target: str
) -> None:
    directory, expected = looped[source]
    actual = loop(target, directory, True)
    for name, value in expected["middle"].items():
        assert torch.equal(actual["middle"][name], value), name
    for name, value in expected["end"].items():
        torch.testing.assert_close(actual["end"][name], value, rtol=1e-3, atol=2e-5, msg=name)


def test_newest_form_counts_in_a_directory_that_two_modes_saved_into(
    looped: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    shutil.copytree(looped["sharded"][0], tmp_path, dirs_exist_ok=True)
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    later = loop("full", tmp_path, False, lr=1e-3)
    for mode in ("one process", "sharded"):
        loaded = loop(mode, tmp_path, True)["middle"]
        for name, value in later["middle"].items():
            assert torch.equal(loaded[name], value), name


@pytest.mark.parametrize("expert_names", ["experts.0.gate_proj", "block_sparse_moe.experts.0.w1"])
def test_weights_that_transformers_renames_when_it_saves_are_loaded(tmp_path: Path, expert_names: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    if "gate_proj" in expert_names:
        config = tf.Qwen3MoeConfig(**sizes, **heads, num_experts=4, moe_intermediate_size=24, head_dim=16)
    else:
        config = tf.MixtralConfig(**sizes, **heads, num_local_experts=4)
    saved, loaded = (tf.AutoModelForCausalLM.from_config(config) for _ in range(2))
    saved.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any(expert_names in name for name in file.keys())  # noqa: SIM118 - it is no dict
    load_model(loaded, tmp_path)
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def _trained(directory: Path) -> tuple[nn.Module, dmuon_hf.core.Muon]:
    model = tiny_llama()
    optimizer = dmuon_hf.create_optimizer(model, lr=5e-3)
    ids = torch.arange(16).unsqueeze(0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with saved_whole(model, optimizer):
        torch.save(optimizer.state_dict(), directory / "optimizer.pt")
    return model, optimizer


def test_state_of_one_process_is_assigned_by_name_and_not_by_place(tmp_path: Path) -> None:
    model, optimizer = _trained(tmp_path)
    expected = snapshot(model, optimizer)
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    for group in state["param_groups"]:
        group["params"].reverse()
        group["param_names"].reverse()
    torch.save(state, tmp_path / "optimizer.pt")
    fresh = dmuon_hf.create_optimizer(model, lr=5e-3)
    load_optimizer(model, fresh, tmp_path)
    for name, value in snapshot(model, fresh).items():
        assert torch.equal(value, expected[name]), name


def test_state_of_an_unknown_name_raises_and_names_it(tmp_path: Path) -> None:
    model, optimizer = _trained(tmp_path)
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    state["param_groups"][0]["param_names"][0] = "model.elsewhere.weight"
    torch.save(state, tmp_path / "optimizer.pt")
    with pytest.raises(dmuon_hf.ConfigurationError, match=r"optimizer\.pt: .*model\.elsewhere\.weight.*unexpected"):
        load_optimizer(model, optimizer, tmp_path)
