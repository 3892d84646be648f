"""Stacks of experts are on Muon, each expert by itself, in every launch, and train as in one process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from torch import Tensor, nn

import dmuon_hf
from dmuon_hf.core import MatrixSpec
from tests.harness import run_ranks
from tests.harness.reference import ReferenceOptimizer
from tests.hf.support import (
    VOCABULARY,
    arguments,
    as_launched,
    finish,
    fsdp_env,
    full_weights,
    make_trainer,
)

STEPS, BATCH, EXPERTS = 2, 8, 6
HYPER = {"lr": 5e-3, "weight_decay": 0.1, "eps": 1e-3}
_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": 2,
}


def qwen3_moe() -> nn.Module:
    return tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**_SMALL, intermediate_size=48, moe_intermediate_size=20, num_experts=EXPERTS)
    )


def mixtral() -> nn.Module:
    """With fewer experts than ranks of the larger launches, so that a shard may hold none."""
    return tf.MixtralForCausalLM(tf.MixtralConfig(**_SMALL, intermediate_size=20, num_local_experts=3))


def gpt_oss() -> nn.Module:
    """With experts stored transposed, the columns of gate and up alternating."""
    return tf.GptOssForCausalLM(tf.GptOssConfig(**_SMALL, intermediate_size=20, num_local_experts=EXPERTS))


def qwen2_moe() -> nn.Module:
    """With an expert that all tokens share, and a router of its own for it."""
    return tf.Qwen2MoeForCausalLM(
        tf.Qwen2MoeConfig(
            **{key: value for key, value in _SMALL.items() if key != "head_dim"},
            intermediate_size=48,
            moe_intermediate_size=20,
            shared_expert_intermediate_size=24,
            num_experts=EXPERTS,
        )
    )


MODELS = {"qwen3_moe": qwen3_moe, "mixtral": mixtral, "gpt_oss": gpt_oss, "qwen2_moe": qwen2_moe}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batch_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, VOCABULARY, (BATCH, 8), generator=generator)


def split_of(name: str) -> Callable[[str], Callable[[Tensor], list[Tensor]]]:
    """How the stacks of a model are cut into matrices, written down by hand."""

    def gate_up(stack: Tensor) -> list[Tensor]:
        if name == "gpt_oss":
            return [half for expert in stack for half in (expert.T[::2], expert.T[1::2])]
        return [half for expert in stack for half in expert.split(20)]

    def down(stack: Tensor) -> list[Tensor]:
        return [expert.T if name == "gpt_oss" else expert for expert in stack]

    return lambda leaf: gate_up if leaf == "gate_up_proj" else down


@functools.cache
def reference(name: str) -> dict[str, dict[str, Tensor]]:
    """Weights and momentum after all steps of a Muon that shares no code with the package, in this process."""
    model = make(name)
    stacks = [key for key, p in model.named_parameters() if p.ndim == 3]
    assert len(stacks) == 4
    linear = [key for key, p in model.named_parameters() if p.ndim == 2 and "layers." in key and _is_linear(key)]
    decayed = set(tf.Trainer.get_decay_parameter_names(None, model))
    optimizers = []
    for inside, decay in ((True, HYPER["weight_decay"]), (False, 0.0)):
        part = {key: p for key, p in model.named_parameters() if (key in decayed) is inside}
        for key, p in model.named_parameters():
            p.requires_grad_(key in part)
        optimizers.append(
            ReferenceOptimizer(
                model,
                [key for key in (*linear, *stacks) if key in part],
                lr=HYPER["lr"],
                weight_decay=decay,
                adamw_lr=HYPER["lr"],
                adamw_eps=HYPER["eps"],
                adamw_weight_decay=decay,
                split={key: split_of(name)(key.rpartition(".")[2]) for key in stacks},
            )
        )
    model.requires_grad_(True)
    for step in range(STEPS):
        ids = batch_of(step)
        model(input_ids=ids, labels=ids).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    momenta = {key: value for optimizer in optimizers for key, value in optimizer.buffers.items()}
    return {"weights": {key: p.detach() for key, p in model.named_parameters()}, "momenta": momenta}


def _is_linear(key: str) -> bool:
    path = key.split(".")
    return path[-1] == "weight" and path[-2] not in ("gate", "router", "shared_expert_gate")


def prepared(launch: str, world: int, name: str, **options: Any) -> tuple[Accelerator, nn.Module, Any]:
    as_launched()
    if launch in ("alone", "ddp"):
        accelerator = Accelerator(cpu=True)
    else:
        replicas = 2 if launch == "hsdp" else 1
        mesh = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=world // replicas)
        accelerator = Accelerator(cpu=True, fsdp_plugin=dmuon_hf.DMuonPlugin(), parallelism_config=mesh)
    model = make(name)
    optimizer = dmuon_hf.create_optimizer(model, **HYPER, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def one_step(accelerator: Accelerator, model: nn.Module, optimizer: Any, step: int) -> None:
    rows = BATCH // accelerator.num_processes
    ids = batch_of(step)[accelerator.process_index * rows :][:rows]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()


def train(rank: int, world: int, launch: str, names: list[str]) -> dict[str, Any]:
    """Several models one after the other, in one process group."""
    results = {}
    for name in names:
        accelerator, model, optimizer = prepared(launch, world, name)
        for step in range(STEPS):
            one_step(accelerator, model, optimizer, step)
        bare = accelerator.unwrap_model(model)
        momenta = {
            key: entry["momentum_buffer"]
            for key, p in bare.named_parameters()
            if "momentum_buffer" in (entry := optimizer.state[p])
        }
        results[name] = {
            "fsdp2": accelerator.is_fsdp2,
            "weights": full_weights(bare),
            "momenta": {key: (m.full_tensor() if hasattr(m, "full_tensor") else m) for key, m in momenta.items()},
            "description": dmuon_hf.describe(bare, optimizer),
        }
    finish()
    return results


@pytest.mark.parametrize(("launch", "world"), [("alone", 1), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4), ("ddp", 2)])
def test_experts_train_as_a_reference_on_one_process(launch: str, world: int) -> None:
    ranks = run_ranks(train, world, launch, list(MODELS), init=False, timeout=150)
    for name in MODELS:
        expected = reference(name)
        for rank in ranks:
            result = rank[name]
            assert result["fsdp2"] == (launch in ("fsdp2", "hsdp"))
            assert result["momenta"].keys() == expected["momenta"].keys()
            for kind, bound in (("momenta", 1e-4), ("weights", 1e-3)):
                for key, want in expected[kind].items():
                    assert (result[kind][key] - want).norm() <= bound * want.norm() + 1e-7, (name, kind, key)
            for line in result["description"].splitlines():
                assert ("experts.gate_up_proj " not in line) or " muon " in line, line


def save(rank: int, world: int, launch: str, name: str, directory: str) -> dict[str, Tensor]:
    """One step, a checkpoint, and the weights after one more."""
    accelerator, model, optimizer = prepared(launch, world, name)
    one_step(accelerator, model, optimizer, 0)
    accelerator.save_state(directory)
    one_step(accelerator, model, optimizer, 1)
    weights = full_weights(accelerator.unwrap_model(model))
    finish()
    return weights


def resume(rank: int, world: int, launch: str, name: str, directory: str) -> dict[str, Tensor]:
    accelerator, model, optimizer = prepared(launch, world, name)
    accelerator.load_state(directory)
    one_step(accelerator, model, optimizer, 1)
    weights = full_weights(accelerator.unwrap_model(model))
    finish()
    return weights


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [(("fsdp2", 2), ("ddp", 2)), (("ddp", 2), ("fsdp2", 4)), (("hsdp", 4), ("alone", 1))]
)
def test_checkpoint_of_experts_resumes_in_another_launch(
    saved_by: tuple[str, int], loaded_by: tuple[str, int], tmp_path: Path
) -> None:
    (saver, many), (loader, others) = saved_by, loaded_by
    want = run_ranks(save, many, saver, "gpt_oss", str(tmp_path), init=False)[0]
    for got in run_ranks(resume, others, loader, "gpt_oss", str(tmp_path), init=False):
        for key, value in want.items():
            assert (got[key] - value).norm() <= 1e-4 * value.norm() + 1e-7, key


def experts_alone(rank: int, world: int, launch: str, directory: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Muon on the experts and nothing else: weights after two steps, and of the second one once more after a load."""
    routes = {"*": "adamw", "*.experts.*": "muon"}
    accelerator, model, optimizer = prepared(launch, world, "mixtral", routes=routes)
    weights = []
    for step in (0, 1):
        one_step(accelerator, model, optimizer, step)
        if step == 0:
            accelerator.save_state(directory)
    weights.append(full_weights(accelerator.unwrap_model(model)))
    accelerator.load_state(directory)
    one_step(accelerator, model, optimizer, 1)
    weights.append(full_weights(accelerator.unwrap_model(model)))
    routed = {group["route"]: len(group["params"]) for group in optimizer.param_groups}
    assert routed["muon"] == 4
    finish()
    return weights[0], weights[1]


def test_models_with_nothing_but_experts_on_muon_train_and_resume_where_the_model_is_sharded(tmp_path: Path) -> None:
    ((want, again),) = run_ranks(experts_alone, 1, "alone", str(tmp_path / "alone"), init=False)
    torch.testing.assert_close(again, want)
    for launch, world in (("fsdp2", 2), ("hsdp", 4)):
        for found in run_ranks(experts_alone, world, launch, str(tmp_path / launch), init=False):
            for got in found:
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5, msg=launch)


def trainer_run(rank: int, world: int, directory: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after four steps, and after two, a checkpoint, and two more by another Trainer."""
    if os.environ.get("ACCELERATE_USE_FSDP"):
        as_launched()
    args = arguments(
        directory, max_steps=4, per_device_train_batch_size=BATCH // world, save_strategy="steps", save_steps=2,
        adam_epsilon=HYPER["eps"],
    )  # fmt: skip
    straight = make_trainer(make("gpt_oss"), args)
    straight.train()
    resumed = make_trainer(make("gpt_oss"), args)
    resumed.train(resume_from_checkpoint=f"{directory}/checkpoint-2")
    result = full_weights(straight.model), full_weights(resumed.model)
    finish()
    return result


@pytest.mark.parametrize("launch", ["ddp", "fsdp2"])
def test_experts_under_the_trainer_train_and_resume_like_one_process(launch: str, tmp_path: Path) -> None:
    ((want, _),) = run_ranks(trainer_run, 1, str(tmp_path / "one"), init=False)
    env = fsdp_env(2, state_dict="SHARDED_STATE_DICT") if launch == "fsdp2" else {}
    for straight, resumed in run_ranks(trainer_run, 2, str(tmp_path / "two"), init=False, env=env):
        for key, value in want.items():
            assert (straight[key] - value).norm() <= 1e-3 * value.norm() + 1e-6, key
            assert torch.equal(resumed[key], straight[key]), key


@pytest.mark.parametrize("options", [{}, {"layouts": {"*.experts.gate_up_proj": MatrixSpec(sections=(15, 25))}}])
def test_description_shows_the_layout_that_is_used(options: dict[str, Any]) -> None:
    model = make("mixtral")
    optimizer = dmuon_hf.create_optimizer(model, lr=1e-3, **options)
    # A long name has a line of its own, above its row.
    text = " ".join(dmuon_hf.describe(model, optimizer).split())
    row = text.partition("experts.gate_up_proj")[2].partition("experts.down_proj")[0]
    assert ("3 of 15x32, 3 of 25x32" if options else "6 of 20x32") in row
