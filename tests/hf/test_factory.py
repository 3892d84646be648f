"""`create` and `create_optimizer`: where hyperparameters come from, and what is refused."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

import dmuon_hf
from dmuon_hf import ConfigurationError, create, create_optimizer
from tests.harness import run_ranks
from tests.hf.support import arguments, error_of, make_trainer, tiny_dataset, tiny_llama


def _groups(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {group["group_name"]: group for group in optimizer.param_groups}


def _names(model: nn.Module, group: dict[str, Any]) -> set[str]:
    members = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in members}


def _trainer_groups(rank: int, world: int, directory: str) -> dict[str, Any]:
    args = arguments(
        directory, learning_rate=3e-4, weight_decay=0.07, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6
    )
    trainer = make_trainer(tiny_llama(), args)
    trainer.create_optimizer()
    groups = _groups(trainer.optimizer)
    members = {name: _names(trainer.model, group) for name, group in groups.items()}
    values = {name: {k: v for k, v in group.items() if k != "params"} for name, group in groups.items()}
    return {"members": members, "values": values, "decay": set(trainer.get_decay_parameter_names(trainer.model))}


def test_trainer_arguments_reach_every_group(tmp_path: Path) -> None:
    result = run_ranks(_trainer_groups, 1, str(tmp_path), init=False)[0]
    values = result["values"]
    assert set(values) == {"decay/muon", "decay/adamw", "no_decay/adamw"}
    assert {group["lr"] for group in values.values()} == {3e-4}
    assert values["decay/muon"]["weight_decay"] == values["decay/adamw"]["weight_decay"] == 0.07
    assert values["no_decay/adamw"]["weight_decay"] == 0.0
    assert values["decay/adamw"]["betas"] == (0.8, 0.9)
    assert values["decay/adamw"]["eps"] == 1e-6


def test_no_decay_names_are_the_trainers(tmp_path: Path) -> None:
    result = run_ranks(_trainer_groups, 1, str(tmp_path), init=False)[0]
    decayed = result["members"]["decay/muon"] | result["members"]["decay/adamw"]
    assert decayed == result["decay"]
    assert all("norm" in name for name in result["members"]["no_decay/adamw"])


@pytest.mark.parametrize(
    ("option", "value", "group", "key"),
    [
        ("muon_lr", 0.5, "decay/muon", "lr"),
        ("adamw_lr", 0.5, "decay/adamw", "lr"),
        ("adamw_lr", 0.5, "no_decay/adamw", "lr"),
        ("muon_weight_decay", 0.5, "decay/muon", "weight_decay"),
        ("momentum", 0.5, "decay/muon", "momentum"),
        ("nesterov", False, "decay/muon", "nesterov"),
        ("ns_steps", 3, "decay/muon", "ns_steps"),
    ],
)
def test_option_overrides_its_group_alone(option: str, value: Any, group: str, key: str) -> None:
    default = _groups(create_optimizer(tiny_llama(), lr=1e-3, weight_decay=0.1))
    changed = _groups(create_optimizer(tiny_llama(), lr=1e-3, weight_decay=0.1, **{option: value}))
    assert changed[group][key] == value != default[group][key]
    other = "decay/adamw" if "muon" in group else "decay/muon"
    assert {k: v for k, v in changed[other].items() if k != "params"} == {
        k: v for k, v in default[other].items() if k != "params"
    }


def test_lr_scale_changes_the_update() -> None:
    def step(**options: Any) -> torch.Tensor:
        model = tiny_llama()
        optimizer = create_optimizer(model, lr=1e-3, **options)
        batch = torch.tensor([tiny_dataset(1)[0]["input_ids"]])
        model(input_ids=batch, labels=batch).loss.backward()
        before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
        optimizer.step()
        return model.model.layers[0].mlp.up_proj.weight.detach() - before

    ratio = step(lr_scale="none", muon_lr=1e-3).norm() / step().norm()
    assert float(ratio) == pytest.approx(1 / (0.2 * 96**0.5), rel=1e-3)


def test_other_lr_scale_without_muon_lr_raises() -> None:
    with pytest.raises(ConfigurationError, match="muon_lr"):
        create(lr_scale="original")


def test_unknown_option_raises_and_lists_the_options() -> None:
    with pytest.raises(ConfigurationError, match=r"mometum.*momentum"):
        create(mometum=0.9)


def test_create_optimizer_without_learning_rate_raises() -> None:
    with pytest.raises(ConfigurationError, match="lr="):
        create_optimizer(tiny_llama())


def test_no_muon_matrix_raises() -> None:
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        create_optimizer(tiny_llama(), lr=1e-3, predicate=lambda name, parameter: False)


def test_model_without_matrices_raises() -> None:
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        create_optimizer(nn.LayerNorm(4), lr=1e-3)


def test_routes_for_a_dedicated_model_raise() -> None:
    model = tiny_llama()
    create_optimizer(model, lr=1e-3)
    with pytest.raises(ConfigurationError, match="already has dedicated"):
        create_optimizer(model, lr=1e-3, routes={"*.k_proj.weight": "adamw"})


@pytest.mark.parametrize(
    "use", [lambda x: x.step(), lambda x: x.param_groups, lambda x: x(), lambda x: setattr(x, "a", 1)]
)
def test_unpacked_elements_fail_on_any_use(use: Any) -> None:
    optimizer, scheduler = create()
    for element in (optimizer, scheduler):
        with pytest.raises(ConfigurationError, match="never built"):
            use(element)


def test_description_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(create(ns_steps=3)))
    assert copy.options.ns_steps == 3


def _unhooked(rank: int, world: int, directory: str) -> None:
    optimizers = create()
    dmuon_hf.hooks.uninstall()
    trainer = Trainer(
        model=tiny_llama(), args=arguments(directory, max_steps=1), train_dataset=tiny_dataset(), optimizers=optimizers
    )
    trainer.train()


def test_trainer_without_hooks_fails_loudly(tmp_path: Path) -> None:
    (outcome,) = run_ranks(_unhooked, 1, str(tmp_path), init=False, expect_failure=True)
    assert "never built" in error_of(outcome)


def _user_scheduler(rank: int, world: int, directory: str) -> list[float]:
    def halving(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    trainer = make_trainer(tiny_llama(), arguments(directory, max_steps=3, learning_rate=1e-3), scheduler=halving)
    trainer.train()
    return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


def test_scheduler_given_to_create_is_used(tmp_path: Path) -> None:
    rates = run_ranks(_user_scheduler, 1, str(tmp_path), init=False)[0]
    assert rates == pytest.approx([1e-3, 5e-4, 2.5e-4])


def _with_optim(rank: int, world: int, directory: str) -> None:
    make_trainer(tiny_llama(), arguments(directory, optim="adafactor")).create_optimizer()


def test_another_optim_argument_raises(tmp_path: Path) -> None:
    (outcome,) = run_ranks(_with_optim, 1, str(tmp_path), init=False, expect_failure=True)
    assert "adafactor" in error_of(outcome)


def _by_position(rank: int, world: int, directory: str) -> bool:
    names = list(inspect.signature(Trainer.__init__).parameters)[1:]
    values = {"model": tiny_llama(), "args": arguments(directory), "optimizers": create(ns_steps=3)}
    trainer = Trainer(*(values.get(name) for name in names[: names.index("optimizers") + 1]))
    trainer.create_optimizer()
    return _groups(trainer.optimizer)["decay/muon"]["ns_steps"] == 3


def test_optimizers_passed_by_position_are_understood(tmp_path: Path) -> None:
    assert run_ranks(_by_position, 1, str(tmp_path), init=False) == [True]


def _both(rank: int, world: int, directory: str) -> None:
    optimizer = (torch.optim.SGD, {"lr": 0.1})
    Trainer(tiny_llama(), arguments(directory), optimizers=create(), optimizer_cls_and_kwargs=optimizer)


def test_create_beside_another_optimizer_class_raises(tmp_path: Path) -> None:
    (outcome,) = run_ranks(_both, 1, str(tmp_path), init=False, expect_failure=True)
    assert "not both" in error_of(outcome)
