"""Adapters of peft: who trains which factor, in every launch, saved alone, loaded, merged and resumed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from safetensors import safe_open

from dmuon_hf import ConfigurationError, create_optimizer, routes
from dmuon_hf.core import MatrixSpec
from dmuon_hf.core.runtime import runtime_of
from tests.harness import run_ranks
from tests.hf.support import (
    arguments,
    as_launched,
    finish,
    fsdp_env,
    full_weights,
    make_trainer,
    tiny_dataset,
    tiny_llama,
)

_VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "lora": ({}, "adamw"),
    "dora, saved head": ({"use_dora": True, "modules_to_save": ["lm_head"]}, "muon_b"),
    "rslora": ({"use_rslora": True}, "muon"),
}


def _adapted(base: Any = None, **config: Any) -> Any:
    base = tiny_llama() if base is None else base
    torch.manual_seed(3)
    settings: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "k_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(base, peft.LoraConfig(**settings | config))


@pytest.mark.parametrize(("policy", "on_muon"), [("adamw", ""), ("muon_b", "B"), ("muon", "AB")])
def test_policy_says_which_factors_are_on_muon(policy: Any, on_muon: str) -> None:
    table = routes(_adapted(use_dora=True, modules_to_save=["lm_head"]), lora=policy)
    for name, route in table.items():
        factor = next((side for side in "AB" if f".lora_{side}." in name), None)
        if factor is not None:
            assert route.route == ("muon" if factor in on_muon else "adamw"), name
        else:
            is_trained = "magnitude" in name or "modules_to_save" in name
            assert route.route == ("adamw" if is_trained else "frozen"), name


def test_factors_are_on_adamw_unless_asked() -> None:
    model = _adapted()
    assert "muon" not in {route.route for route in routes(model).values()}
    optimizer = create_optimizer(model, lr=1e-3)
    assert {group["route"] for group in optimizer.param_groups} == {"adamw"}


def test_frozen_base_has_no_owner_and_no_state() -> None:
    model = _adapted()
    optimizer = create_optimizer(model, lr=1e-3, lora="muon")
    runtime = runtime_of(model)
    assert runtime is not None and all(".lora_" in name for name in runtime.dedicated)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert {id(p) for p in optimizer.state} == trained


def test_factor_b_gets_an_orthogonal_update() -> None:
    model = _adapted()
    optimizer = create_optimizer(model, lr=1e-2, lora="muon_b")
    weight = model.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight")
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 1e-6
    optimizer.step()
    values = torch.linalg.svdvals(weight.detach() / (1e-2 * 0.2 * 64**0.5))
    assert 0.7 < values.min() < values.max() < 1.3


def _adapted_experts() -> Any:
    config = tf.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    return _adapted(
        tf.Qwen3MoeForCausalLM(config), target_modules=[], target_parameters=["mlp.experts.gate_up_proj"], r=2
    )


def test_factors_of_experts_are_one_matrix_each() -> None:
    model = _adapted_experts()
    table = {name: route for name, route in routes(model, lora="muon").items() if route.route == "muon"}
    (a,) = (route.spec for name, route in table.items() if "lora_A" in name)
    (b,) = (route.spec for name, route in table.items() if "lora_B" in name)
    assert a == MatrixSpec(sections=(2,) * 4)
    assert b == MatrixSpec(groups=2, sections=(1,) * 4, transposed=True)
    # The layout is that of peft's own sum over experts.
    layer = next(module for module in model.modules() if type(module).__name__ == "ParamWrapper")
    weights = {side: getattr(layer, f"lora_{side}")["default"].weight for side in "AB"}
    torch.nn.init.normal_(weights["B"])
    delta = torch.stack(
        [factor_b.T @ factor_a for factor_b, factor_a in zip(b.split(weights["B"]), a.split(weights["A"]), strict=True)]
    )
    expected = layer.get_delta_weight("default") / layer.scaling["default"]
    torch.testing.assert_close(delta if delta.shape == expected.shape else delta.mT, expected)
    optimizer = create_optimizer(model, lr=1e-2, lora="muon")
    before = {side: weight.detach().clone() for side, weight in weights.items()}
    ids = torch.arange(16)[None]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(weight, before[side]) for side, weight in weights.items())


def test_policy_for_a_model_without_adapters_raises() -> None:
    with pytest.raises(ConfigurationError, match="no LoRA adapters"):
        create_optimizer(tiny_llama(), lr=1e-3, lora="muon_b")
    with pytest.raises(ConfigurationError, match=r"'muon_a' is no policy.*muon_b"):
        create_optimizer(_adapted(), lr=1e-3, lora="muon_a")


def _docs(rank: int, world: int, directory: str) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/trainers.md").read_text()
    (block,) = re.findall(r"## Adapters\n\n```python\n(.*?)```", page, re.DOTALL)
    os.chdir(directory)
    namespace: dict[str, Any] = {
        "model": tiny_llama(), "args": arguments(directory, max_steps=1), "data": tiny_dataset()
    }  # fmt: skip
    exec(compile(block, "trainers.md", "exec"), namespace)  # noqa: S102


def test_adapters_of_the_docs_train_and_are_saved(tmp_path: Path) -> None:
    run_ranks(_docs, 1, str(tmp_path), init=False)
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()


# -- quantised bases ---------------------------------------------------------------------------------------------------


class _Quantized(torch.nn.Linear):
    """The layout of a 4-bit base: packed bytes that do not train, and a scale for each row."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        self.register_buffer("scale", scale)
        packed = ((linear.weight.detach() / scale).round() + 8).to(torch.uint8)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ ((self.weight.float() - 8) * self.scale).T


def _quantized_llama() -> Any:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.up_proj = _Quantized(layer.mlp.up_proj)
    model.is_quantized = True
    return model


def test_quantised_base_is_refused_without_adapters_and_stays_as_it_is_below_them() -> None:
    with pytest.raises(ConfigurationError, match=r"quantised.*adapters"):
        create_optimizer(_quantized_llama(), lr=1e-3)
    model = _adapted(_quantized_llama(), target_modules=["q_proj", "up_proj"])
    optimizer = create_optimizer(model, lr=1e-2, lora="muon_b")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.arange(16)[None]
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is not p.requires_grad, name


_BASES = {
    "experts": _adapted_experts,
    "quantised": lambda: _adapted(_quantized_llama(), target_modules=["q_proj", "up_proj"]),
}


def _adapters_under_ddp(rank: int, world: int) -> dict[str, dict[str, torch.Tensor]]:
    """Trained parameters by base, after two steps on the same rows, shared out."""
    if world > 1:
        as_launched()
    accelerator = Accelerator(cpu=True)
    found = {}
    for name, make in _BASES.items():
        model = make()
        optimizer = create_optimizer(model, lr=1e-2, lora="muon")
        prepared, optimizer = accelerator.prepare(model, optimizer)
        rows = torch.arange(64).view(4, 16)
        for _ in range(2):
            mine = rows[rank :: accelerator.num_processes]
            accelerator.backward(prepared(input_ids=mine, labels=mine).loss)
            optimizer.step()
            optimizer.zero_grad()
        found[name] = {key: value.detach().clone() for key, value in model.named_parameters() if value.requires_grad}
    return found


def test_adapters_of_experts_and_of_a_quantised_base_train_under_ddp_like_one_process() -> None:
    (alone,) = run_ranks(_adapters_under_ddp, 1, init=False)
    for result in run_ranks(_adapters_under_ddp, 2, init=False):
        for name, weights in alone.items():
            assert result[name].keys() == weights.keys()
            for key, value in weights.items():
                torch.testing.assert_close(result[name][key], value, rtol=1e-4, atol=1e-6)


# -- launches ----------------------------------------------------------------------------------------------------------

_LAUNCHES: dict[str, tuple[int, dict[str, str]]] = {
    "one process": (1, {}),
    "ddp": (2, {}),
    "fsdp2": (2, fsdp_env(2)),
    "fsdp2, sharded files": (2, fsdp_env(2, state_dict="SHARDED_STATE_DICT")),
    "hsdp": (4, fsdp_env(4, replicas=2)),
}


class _StopAt(tf.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def _train(rank: int, world: int, directory: str, env: dict[str, str], variant: str) -> dict[str, Any]:
    if env:
        as_launched()
    config, policy = _VARIANTS[variant]

    def trainer_of(folder: str, steps: int, **overrides: Any) -> Any:
        args = arguments(
            f"{directory}/{folder}", max_steps=4, per_device_train_batch_size=8 // world, adam_epsilon=1e-3, **overrides
        )
        made = make_trainer(_adapted(**config), args, lora=policy)
        made.add_callback(_StopAt(steps))
        return made

    trainer = trainer_of("straight", 4)
    base = {name: weight for name, weight in full_weights(trainer.model).items() if "base_layer" in name}
    trainer.train()
    trainer.save_model(f"{directory}/saved")
    weights = full_weights(trainer.model)
    assert all(torch.equal(weights[name], weight) for name, weight in base.items())
    trainer_of("resumed", 2, save_strategy="steps", save_steps=2).train()
    resumed = trainer_of("resumed", 4)
    resumed.train(resume_from_checkpoint=True)
    groups = {group["group_name"]: len(group["params"]) for group in trainer.optimizer.param_groups}
    finish()
    return {"weights": weights, "resumed": full_weights(resumed.model), "groups": groups}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    directories = {variant: tmp_path_factory.mktemp("alone") for variant in _VARIANTS}
    return {
        variant: (directory, run_ranks(_train, 1, str(directory), {}, variant, init=False))
        for variant, directory in directories.items()
    }


_CELLS = [
    ("one process", "rslora"),
    ("one process", "dora, saved head"),
    ("ddp", "lora"),
    ("ddp", "dora, saved head"),
    ("fsdp2", "lora"),
    ("fsdp2", "dora, saved head"),
    ("fsdp2, sharded files", "rslora"),
    ("hsdp", "lora"),
]


@pytest.mark.parametrize(("launch", "variant"), _CELLS, ids=[", ".join(cell) for cell in _CELLS])
def test_adapters_train_save_merge_and_resume_like_one_process(
    alone: dict[str, tuple[Path, list[dict[str, Any]]]], tmp_path: Path, launch: str, variant: str
) -> None:
    world, env = _LAUNCHES[launch]
    directory, results = alone[variant]
    (expected,) = results
    if world > 1:
        directory = tmp_path
        results = run_ranks(_train, world, str(tmp_path), env, variant, init=False, env=env, timeout=100)
    for result in results:
        assert result["groups"] == expected["groups"]
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-3, atol=5e-5, msg=name)
            torch.testing.assert_close(result["resumed"][name], result["weights"][name], rtol=1e-5, atol=1e-6, msg=name)
    with safe_open(directory / "saved/adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name or "lm_head" in name for name in file.keys())  # noqa: SIM118
    assert not list((directory / "saved").glob("model*"))
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), directory / "saved")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, results[0]["weights"][name]), name
    ids = torch.arange(16)[None]
    with torch.no_grad():
        adapted = loaded(input_ids=ids).logits
        torch.testing.assert_close(loaded.merge_and_unload()(input_ids=ids).logits, adapted, rtol=1e-4, atol=1e-5)
