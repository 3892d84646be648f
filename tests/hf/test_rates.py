"""Rates per part of the model and per pattern: who is in which group, in every launch, across a resume, in the logs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

import dmuon_hf
from dmuon_hf import ConfigurationError, MomentumWarmup, create, create_optimizer
from dmuon_hf.announcement import summary_line
from dmuon_hf.core import NewtonSchulz
from tests.harness import run_ranks
from tests.hf.support import (
    arguments,
    as_launched,
    finish,
    fsdp_env,
    full_weights,
    losses,
    make_trainer,
    tiny_llama,
)


def _groups(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {group["group_name"]: group for group in optimizer.param_groups}


def _rates(model: nn.Module, **options: Any) -> dict[str, float]:
    """Learning rate of every parameter."""
    optimizer = create_optimizer(model, lr=1e-3, weight_decay=0.1, **options)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: rates[id(p)] for name, p in model.named_parameters()}


def test_parts_get_their_rates_and_nothing_else_changes() -> None:
    rates = _rates(tiny_llama(), embedding_lr=2e-3, head_lr=3e-3, scalar_lr=4e-3, muon_lr=5e-3)
    assert rates.pop("model.embed_tokens.weight") == 2e-3
    assert rates.pop("lm_head.weight") == 3e-3
    for name, rate in rates.items():
        assert rate == (4e-3 if "norm" in name else 5e-3), name


def test_tied_head_counts_as_embedding() -> None:
    assert _rates(tiny_llama(tie_word_embeddings=True), embedding_lr=2e-3)["model.embed_tokens.weight"] == 2e-3
    with pytest.raises(ConfigurationError, match="head_lr would have no effect"):
        _rates(tiny_llama(tie_word_embeddings=True), head_lr=2e-3)


def test_head_is_what_a_task_adds_around_the_base_model() -> None:
    config = tf.RobertaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=128, num_labels=3
    )
    rates = _rates(tf.RobertaForSequenceClassification(config), head_lr=2e-3, scalar_lr=4e-3)
    assert {name for name, rate in rates.items() if rate == 2e-3} == {
        f"classifier.{layer}.{leaf}" for layer in ("dense", "out_proj") for leaf in ("weight", "bias")
    }
    assert rates["roberta.encoder.layer.0.output.dense.bias"] == 4e-3


def test_pattern_group_sets_rates_decay_and_rule_of_its_weights() -> None:
    model = tiny_llama()
    optimizer = create_optimizer(
        model,
        lr=1e-3,
        weight_decay=0.1,
        scalar_lr=4e-3,
        param_groups=[
            {"params": "*.layers.0.*", "group_name": "low", "lr_factor": 0.5, "weight_decay": 0.2},
            {"params": ["*.q_proj.weight", "lm_head.*"], "muon_lr": 7e-3, "adamw_lr": 8e-3, "momentum": 0.9},
        ],
    )
    groups = _groups(optimizer)
    assert {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()} == {
        "decay/muon": (1e-3, 0.1),
        "decay/adamw": (1e-3, 0.1),
        "scalar/no_decay/adamw": (4e-3, 0.0),
        "low/decay/muon": (0.5e-3, 0.2),
        "low/scalar/no_decay/adamw": (2e-3, 0.0),
        "*.q_proj.weight/decay/muon": (7e-3, 0.1),
        "*.q_proj.weight/decay/adamw": (8e-3, 0.1),
    }
    # The last entry that matches counts.
    assert len(groups["*.q_proj.weight/decay/muon"]["params"]) == 2
    assert groups["*.q_proj.weight/decay/muon"]["momentum"] == 0.9
    assert groups["decay/muon"]["momentum"] == 0.95


def test_update_rule_may_differ_by_pattern_and_is_announced() -> None:
    model = tiny_llama()
    groups = {"*.down_proj.weight": {"update_rule": "muon"}, "*.up_proj.weight": {"normuon_beta2": 0.5}}
    optimizer = create_optimizer(model, lr=1e-3, update_rule="normuon", normuon_beta2=0.9, param_groups=groups)
    kept = {g["group_name"]: (g["update_rule"], g["normuon_beta2"]) for g in optimizer.param_groups if "ns_steps" in g}
    assert kept == {
        "decay/muon": ("normuon", 0.9),
        "*.down_proj.weight/decay/muon": ("muon", 0.9),
        "*.up_proj.weight/decay/muon": ("normuon", 0.5),
    }
    assert summary_line(model, optimizer).startswith("Muon and NorMuon: 14 matrices, ")
    described = dmuon_hf.describe(model, optimizer)
    assert "\nupdated by NorMuon: decay/muon, *.up_proj.weight/decay/muon\n" in described, described
    assert summary_line(model, create_optimizer(tiny_llama(), lr=1e-3, update_rule="normuon")).startswith("NorMuon: 14")


def test_layers_get_decaying_rates_by_pattern() -> None:
    layers = {f"model.layers.{index}.*": {"lr_factor": 0.5 ** (1 - index)} for index in range(2)}
    rates = _rates(tiny_llama(), param_groups=layers)
    assert rates["model.layers.0.mlp.up_proj.weight"] == 0.5e-3
    assert rates["model.layers.1.input_layernorm.weight"] == 1e-3


def test_rates_of_the_docs_give_every_part_its_own() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/huggingface.md").read_text()
    (block,) = re.findall(r"```python\n(optimizers = .*?)```", page, re.DOTALL)
    namespace: dict[str, Any] = {"dmuon_hf": dmuon_hf, "layers": 2}
    exec(compile(block, "huggingface.md", "exec"), namespace)  # noqa: S102
    options = namespace["optimizers"].options
    rates = _rates(tiny_llama(), **{name: getattr(options, name) for name in options.__dataclass_fields__})
    assert rates["model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.9 * 5e-4)
    assert rates["model.embed_tokens.weight"] == rates["model.norm.weight"] == 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"param_groups": {"*.nothing.*": {"lr": 1e-3}}}, r"no trainable parameter of the model: \['\*.nothing"),
        ({"param_groups": {"*": {"lr": 1e-3}, "lm_head.*": {"lr": 1e-3, "rate": 3}}}, r"unknown \['rate'\].*lr_factor"),
        ({"param_groups": {"lm_head.weight": 1e-3}}, "dict of settings"),
        ({"param_groups": {"lm_head.weight": {}}}, "sets nothing"),
        ({"param_groups": [{"lr": 1e-3}]}, "needs 'params'"),
        ({"param_groups": [{"params": "a*", "lr": 1.0}, {"params": "a*", "lr": 2.0}]}, "repeat the names"),
        ({"param_groups": {"*": {"lr_scale": "original"}}}, "needs muon_lr"),
        ({"param_groups": {"*": {"momentum": 0.9}}, "momentum_schedule": MomentumWarmup()}, "leave one"),
        ({"momentum": 0.9, "momentum_schedule": MomentumWarmup()}, "either momentum"),
        ({"momentum_schedule": {"begin": 0.9}}, r"unknown fields.*\['begin'\]"),
        ({"momentum_schedule": 0.9}, "function of the step"),
        ({"weight_decay_schedule": MomentumWarmup()}, "none is decayed"),
        ({"weight_decay_schedule": {"first": 1.0}}, r"unknown fields.*\['first'\]"),
        ({"weight_decay_schedule": {"end": -1.0}}, "start and end of at least 0"),
        ({"weight_decay_schedule": 0.9}, "function of the step"),
        ({"update_rule": "adamuon"}, "update_rule is one of"),
        ({"normuon_beta2": 0.9}, "no effect without update_rule='normuon'"),
        ({"update_rule": "normuon", "normuon_beta2": 1.0}, r"in \[0, 1\)"),
        ({"coefficients": "cubic"}, "'polar_express', 'you', 'quintic'"),
        ({"coefficients": "you", "ns_backend": NewtonSchulz()}, "coefficients= has no effect"),
        ({"embedding_lr": -1.0}, "lr must be at least 0"),
    ],
)
def test_rates_that_mean_nothing_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create_optimizer(tiny_llama(), lr=1e-3, **options)


def test_options_that_need_no_model_are_checked_by_create() -> None:
    for options in ({"coefficients": "cubic"}, {"param_groups": {"*": {"rate": 1}}}, {"momentum_schedule": 1}):
        with pytest.raises(ConfigurationError):
            create(**options)


def test_weight_decay_schedule_is_a_factor_on_what_each_group_is_decayed_by() -> None:
    model = tiny_llama()
    optimizer = create_optimizer(
        model, lr=0.1, weight_decay=0.2, muon_weight_decay=0.4, weight_decay_schedule=lambda step: (1.0, 0.5, 0.0)[step]
    )
    weights = model.model.layers[0].mlp.up_proj.weight, model.lm_head.weight, model.model.norm.weight
    before = [weight.detach().clone() for weight in weights]
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
    for old, new, decay in zip(before, weights, (0.4, 0.2, 0.0), strict=True):
        torch.testing.assert_close(new.detach(), old * (1 - 0.1 * decay) * (1 - 0.1 * decay * 0.5))


def test_negative_factor_of_a_weight_decay_schedule_is_refused_in_its_step() -> None:
    model = tiny_llama()
    optimizer = create_optimizer(model, lr=0.1, weight_decay=0.2, weight_decay_schedule=lambda step: 1.0 - step)
    optimizer.param_groups[0]["weight_decay_step"] = 2
    with pytest.raises(ConfigurationError, match=r"factor -1\.0 in step 2"):
        optimizer.step()


def test_named_coefficients_change_the_update() -> None:
    updates = {}
    for name in ("polar_express", "you", "quintic"):
        model = tiny_llama()
        optimizer = create_optimizer(model, lr=1e-2, coefficients=name)
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        before = weight.detach().clone()
        optimizer.step()
        updates[name] = before - weight.detach()
    assert not torch.allclose(updates["polar_express"], updates["you"])
    assert not torch.allclose(updates["quintic"], updates["you"])


# -- launches ----------------------------------------------------------------------------------------------------------

_LAUNCHES: dict[str, tuple[int, dict[str, str]]] = {
    "one process": (1, {}),
    "ddp": (2, {}),
    "fsdp2": (2, fsdp_env(2)),
    "hsdp": (4, fsdp_env(4, replicas=2)),
}
_OPTIONS: dict[str, Any] = {
    "muon_lr": 1e-2,
    "embedding_lr": 2e-3,
    "head_lr": 3e-3,
    "scalar_lr": 4e-3,
    "coefficients": "quintic",
    "update_rule": "normuon",
    "momentum_schedule": {"start": 0.5, "end": 0.9, "steps": 4},
    "weight_decay_schedule": {"start": 2.0, "end": 0.0, "steps": 8},
    "param_groups": {"model.layers.0.*": {"lr_factor": 0.5}},
}


def _train(rank: int, world: int, directory: str, env: dict[str, str]) -> dict[str, Any]:
    if env:
        as_launched()

    def trainer_of(folder: str, steps: int, **overrides: Any) -> Any:
        args = arguments(
            f"{directory}/{folder}",
            max_steps=4,
            per_device_train_batch_size=8 // world,
            weight_decay=0.1,
            adam_epsilon=1e-3,
            max_grad_norm=0.1,
            **overrides,
        )
        made = make_trainer(tiny_llama(), args, **_OPTIONS)
        made.add_callback(_StopAt(steps))
        return made

    trainer = trainer_of("straight", 4)
    trainer.train()
    result: dict[str, Any] = {
        "weights": full_weights(trainer.model),
        "losses": losses(trainer),
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "momentum": {group.get("momentum") for group in trainer.optimizer.param_groups} - {None},
        "decay": {group["weight_decay"] for group in trainer.optimizer.param_groups},
        "groups": {group["group_name"]: group["initial_lr"] for group in trainer.optimizer.param_groups},
    }
    trainer_of("resumed", 2, save_strategy="steps", save_steps=2).train()
    resumed = trainer_of("resumed", 4)
    resumed.train(resume_from_checkpoint=True)
    result["resumed"] = full_weights(resumed.model)
    result["resumed decay"] = {group["weight_decay"] for group in resumed.optimizer.param_groups}
    result["resumed momentum"] = {g.get("momentum") for g in resumed.optimizer.param_groups} - {None}
    result["resumed groups"] = {group["group_name"]: group["initial_lr"] for group in resumed.optimizer.param_groups}
    finish()
    return result


class _StopAt(tf.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return {
        name: run_ranks(_train, world, str(tmp_path_factory.mktemp("out")), env, init=False, env=env, timeout=150)
        for name, (world, env) in _LAUNCHES.items()
    }


def test_groups_are_named_after_what_was_said(runs: dict[str, list[dict[str, Any]]]) -> None:
    assert runs["one process"][0]["groups"] == {
        "decay/muon": 1e-2,
        "embedding/decay/adamw": 2e-3,
        "head/decay/adamw": 3e-3,
        "scalar/no_decay/adamw": 4e-3,
        "model.layers.0.*/decay/muon": 5e-3,
        "model.layers.0.*/scalar/no_decay/adamw": 2e-3,
    }


@pytest.mark.parametrize("launch", [name for name in _LAUNCHES if name != "one process"])
def test_rates_train_every_launch_like_one_process(runs: dict[str, list[dict[str, Any]]], launch: str) -> None:
    (alone,) = runs["one process"]
    for result in runs[launch]:
        assert result["groups"] == alone["groups"]
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-3, atol=5e-5, msg=name)


@pytest.mark.parametrize("launch", _LAUNCHES)
def test_logs_have_rate_and_norm_of_every_group(runs: dict[str, list[dict[str, Any]]], launch: str) -> None:
    (alone,) = runs["one process"]
    for result in runs[launch]:
        for index, (entry, expected) in enumerate(zip(result["logs"], alone["logs"], strict=True)):
            norms = {name: value for name, value in entry.items() if name.startswith("grad_norm/")}
            assert math.hypot(*norms.values()) == pytest.approx(entry["grad_norm"], rel=1e-4)
            assert norms == pytest.approx({name: expected[name] for name in norms}, rel=1e-2)
            rates = {name: entry[f"learning_rate/{name}"] for name in result["groups"]}
            # The schedule keeps the ratios.
            assert rates == pytest.approx({name: rate * (4 - index) / 4 for name, rate in result["groups"].items()})


@pytest.mark.parametrize("launch", _LAUNCHES)
def test_resumed_run_keeps_groups_and_goes_on_with_the_schedules(
    runs: dict[str, list[dict[str, Any]]], launch: str
) -> None:
    for result in runs[launch]:
        assert result["momentum"] == result["resumed momentum"] == {0.5 + (0.9 - 0.5) * 3 / 4}
        assert result["decay"] == result["resumed decay"] == {0.0, 0.1 * 1.25}
        assert result["resumed groups"] == result["groups"]
        for name, weight in result["weights"].items():
            torch.testing.assert_close(result["resumed"][name], weight, rtol=1e-5, atol=1e-6, msg=name)
