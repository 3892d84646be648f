"""What looks as if it worked, and would not: each is an error that names what was passed and what to do."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

import dmuon_hf
from dmuon_hf import ConfigurationError, checks
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
from tests.hf.zoo.tiny import FAMILIES


def _message(call: Callable[[], Any]) -> str:
    """What the error of a call says."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the tests look at the message
        call()
    return str(caught.value)


def _first_of_create() -> Any:
    return dmuon_hf.create()[0]


_GIVEN: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "in a tuple": (lambda: {"optimizers": (dmuon_hf.create(), None)}, "inside of something else"),
    "second in a tuple": (lambda: {"optimizers": (None, dmuon_hf.create())}, "inside of something else"),
    "in a list": (lambda: {"optimizers": [dmuon_hf.create(), None]}, "inside of something else"),
    "as a list": (lambda: {"optimizers": list(dmuon_hf.create())}, "neither unpacked"),
    "unpacked": (lambda: {"optimizers": tuple(dmuon_hf.create())}, "neither unpacked"),
    "its first element": (lambda: {"optimizers": (_first_of_create(), None)}, "scheduler="),
    "uncalled": (lambda: {"optimizers": dmuon_hf.create}, "call it"),
    "as class": (lambda: {"optimizer_cls_and_kwargs": (dmuon_hf.create(), {})}, "as the Trainer's optimizers="),
    "instead of class": (lambda: {"optimizer_cls_and_kwargs": dmuon_hf.create()}, "as the Trainer's optimizers="),
    "beside a class": (
        lambda: {"optimizers": dmuon_hf.create(), "optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
        "not both",
    ),
}


def _trainers(rank: int, world: int, directory: str) -> dict[str, str]:
    def make(given: dict[str, Any]) -> None:
        Trainer(model=tiny_llama(), args=arguments(directory), train_dataset=tiny_dataset(), **given)

    return {name: _message(lambda given=given: make(given())) for name, (given, _) in _GIVEN.items()}


@pytest.fixture(scope="module")
def trainer_messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    messages: dict[str, str] = run_ranks(_trainers, 1, str(tmp_path_factory.mktemp("out")), init=False)[0]
    return messages


@pytest.mark.parametrize("given", _GIVEN)
def test_description_that_the_trainer_would_not_understand_raises(trainer_messages: dict[str, str], given: str) -> None:
    assert _GIVEN[given][1] in trainer_messages[given]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bf16_full_eval": True, "world_size": 2}, "bf16_full_eval casts the model"),
        ({"fp16_full_eval": True, "world_size": 2}, "fp16_full_eval casts the model"),
        ({"optim": "adamw_torch_8bit"}, "adamw_torch_8bit.*no effect"),
        ({"optim": "adamw_torch_4bit"}, "adamw_torch_4bit.*no effect"),
        ({"optim": "sgd"}, "sgd.*no effect"),
        ({"optim_args": "a=1"}, "optim_args has no effect"),
        ({"optim_target_modules": "all-linear"}, "optim_target_modules has no effect"),
    ],
)
def test_arguments_that_ask_for_another_optimizer_raise(settings: dict[str, Any], message: str) -> None:
    defaults = dict.fromkeys(("optim_args", "optim_target_modules", "bf16_full_eval", "fp16_full_eval"))
    args = SimpleNamespace(**{"optim": "adamw_torch", "world_size": 1} | defaults | settings)
    with pytest.raises(ConfigurationError, match=message):
        checks.check_training_arguments(args)


@pytest.mark.parametrize(
    ("kind", "precision", "message"),
    [
        (DistributedType.NO, "fp8", "fp8"),
        (DistributedType.FSDP, "fp8", "fp8"),
        (DistributedType.DEEPSPEED, "no", "DEEPSPEED keeps its own optimizer"),
        (DistributedType.MEGATRON_LM, "no", "MEGATRON_LM keeps its own optimizer"),
    ],
)
def test_launch_that_muon_cannot_use_raises(kind: DistributedType, precision: str, message: str) -> None:
    state: Any = SimpleNamespace(distributed_type=kind, mixed_precision=precision)
    with pytest.raises((ConfigurationError, NotImplementedError), match=message):
        checks.check_launch(state)


def _prepared(rank: int, world: int, what: str) -> None:
    if world > 1:
        as_launched()
    accelerator = Accelerator(cpu=True)
    model = tiny_llama()
    muon = dmuon_hf.create_optimizer(model, lr=1e-3)
    others: dict[str, tuple[Any, ...]] = {
        "Muon, AdamW": (muon, torch.optim.AdamW(model.parameters())),
        "Muon, Muon": (muon, dmuon_hf.create_optimizer(model, lr=1e-3)),
        "AdamW, Muon": (torch.optim.AdamW(model.parameters()), muon),
        "description": (dmuon_hf.create(),),
        "element": (_first_of_create(),),
    }
    accelerator.prepare(model, *others[what])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("Muon, AdamW", r"2 optimizers \(Muon, AdamW\)"),
        ("Muon, Muon", r"2 optimizers \(Muon, Muon\)"),
        ("AdamW, Muon", r"2 optimizers \(AdamW, Muon\)"),
        ("description", "create_optimizer"),
        ("element", "create_optimizer"),
    ],
)
def test_prepare_of_what_cannot_train_together_raises(world: int, what: str, message: str) -> None:
    env = fsdp_env(world) if world > 1 else {}
    outcomes = run_ranks(_prepared, world, what, init=False, env=env, expect_failure=True, linger=10)
    for outcome in outcomes:
        assert outcome.exception is not None and outcome.exception.is_a(ConfigurationError)
        assert re.search(message, error_of(outcome)), error_of(outcome)


_SAVES: dict[str, tuple[Callable[[Any, Any, str], Any], str]] = {
    "save_pretrained": (lambda model, _, path: model.save_pretrained(path), "trainer.save_model"),
    "on the main process": (
        lambda model, accelerator, path: model.save_pretrained(path, accelerator.is_main_process),
        "accelerator.get_state_dict",
    ),
    "with its own state dict": (
        lambda model, _, path: model.save_pretrained(path, state_dict=model.state_dict()),
        "accelerator.get_state_dict",
    ),
    "push_to_hub": (lambda model, _, path: model.push_to_hub("nobody/nothing"), "trainer.push_to_hub"),
    "torch.save": (lambda model, _, path: torch.save(model.state_dict(), io.BytesIO()), "get_model_state_dict"),
    "clip_grad_value_": (
        lambda model, accelerator, path: accelerator.clip_grad_value_(model.parameters(), 1.0),
        "clip_grad_norm_",
    ),
}


def _saves(rank: int, world: int, directory: str) -> dict[str, Any]:
    as_launched()
    accelerator = Accelerator()
    model: Any = tiny_llama()
    model, _ = accelerator.prepare(model, dmuon_hf.create_optimizer(model, lr=1e-3))
    result: dict[str, Any] = {"weights": full_weights(model)}
    for name, (save, _) in _SAVES.items():
        result[name] = _message(lambda save=save: save(model, accelerator, directory))
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        directory, is_main_process=accelerator.is_main_process, state_dict=state
    )
    for name in _FILES:
        family = FAMILIES[name]
        model = family.build()
        model, _ = accelerator.prepare(model, dmuon_hf.create_optimizer(model, lr=1e-3))
        accelerator.unwrap_model(model).save_pretrained(
            f"{directory}/{name}",
            is_main_process=accelerator.is_main_process,
            state_dict=accelerator.get_state_dict(model),
        )
        result[name] = type(model).__name__
        accelerator.free_memory()
    finish()
    return result


_FILES = ("mixtral", "llava", "t5", "vit")
"""Merged experts, keys of other names by class and by type of the model, tied weights."""


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("saves")
    return directory, run_ranks(_saves, 2, str(directory), init=False, env=fsdp_env(2))


@pytest.mark.parametrize("way", _SAVES)
def test_saving_what_one_rank_has_raises_on_every_rank(saves: tuple[Path, list[dict[str, Any]]], way: str) -> None:
    for result in saves[1]:
        assert _SAVES[way][1] in result[way]


def test_save_pretrained_with_the_gathered_state_dict_writes_the_model(
    saves: tuple[Path, list[dict[str, Any]]],
) -> None:
    directory, results = saves
    model = AutoModelForCausalLM.from_pretrained(directory)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, results[0]["weights"][name]), name


@pytest.mark.parametrize("name", _FILES)
def test_files_of_a_sharded_model_have_the_keys_that_one_process_writes(
    saves: tuple[Path, list[dict[str, Any]]], name: str, tmp_path: Path
) -> None:
    directory, results = saves
    family = FAMILIES[name]
    family.build().save_pretrained(tmp_path)
    torch.testing.assert_close(
        load_file(directory / name / "model.safetensors"), load_file(tmp_path / "model.safetensors"), rtol=0, atol=0
    )
    reopened, info = family.model_class.from_pretrained(directory / name, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert reopened.config.architectures == [family.model_class.__name__]
    # The class is named as FSDP2 names it when saving is over.
    assert results[0][name] == f"FSDP{family.model_class.__name__}"


def _clip_some(rank: int, world: int) -> dict[str, Any]:
    if world > 1:
        as_launched()
    accelerator = Accelerator(cpu=True)
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, dmuon_hf.create_optimizer(model, lr=1e-3))
    ids = torch.arange(32).reshape(2, 16)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    norms = [
        float(accelerator.clip_grad_norm_([p for n, p in model.named_parameters() if part in n], 1e-2))
        for part in ("mlp", "norm", "layers.0", "lm_head")
    ]
    optimizer.zero_grad()
    finish()
    return {"norms": norms, "unwrapped": accelerator.unwrap_model(model) is model}


def test_clipping_some_parameters_uses_their_whole_norm() -> None:
    alone = run_ranks(_clip_some, 1, init=False)[0]
    for result in run_ranks(_clip_some, 2, init=False, env=fsdp_env(2)):
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert result["unwrapped"]


def _model_init(rank: int, world: int, directory: str) -> list[dict[str, Any]]:
    if world > 1:
        as_launched()
    args = arguments(directory, max_steps=2, per_device_train_batch_size=4 // world)
    data = tiny_dataset()
    trainer = Trainer(model_init=_init, args=args, train_dataset=data, optimizers=dmuon_hf.create())
    runs = []
    for lr in (5e-3, 1e-3, 5e-3):
        # As a search over hyperparameters does between its trials.
        args.learning_rate = lr
        trainer.train()
        rates = [group["initial_lr"] for group in trainer.optimizer.param_groups]
        runs.append({"weights": full_weights(trainer.model), "rates": set(rates)})
    finish()
    return runs


def _init() -> nn.Module:
    return tiny_llama()


@pytest.mark.parametrize("world", [1, 2])
def test_model_init_gives_every_train_a_new_model_and_optimizer(tmp_path: Path, world: int) -> None:
    env = fsdp_env(world) if world > 1 else {}
    first, second, third = run_ranks(_model_init, world, str(tmp_path), init=False, env=env)[0]
    assert (first["rates"], second["rates"]) == ({5e-3}, {1e-3})
    for name, weight in first["weights"].items():
        assert torch.equal(third["weights"][name], weight), name
    assert any(not torch.equal(second["weights"][name], weight) for name, weight in first["weights"].items())


def _without_optimizer(rank: int, world: int, directory: str) -> str:
    make_trainer(tiny_llama(), arguments(directory, optim="adamw_torch_8bit", max_steps=1)).train()
    return "trained"


def test_trainer_refuses_the_optimizer_of_its_arguments(tmp_path: Path) -> None:
    (outcome,) = run_ranks(_without_optimizer, 1, str(tmp_path), init=False, expect_failure=True)
    assert "adamw_torch_8bit" in error_of(outcome)
