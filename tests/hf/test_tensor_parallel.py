"""FSDP2 with tensor parallelism, as accelerate's `ParallelismConfig` asks for it, trains like one process."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import dmuon_hf
from dmuon_hf.checks import check_launch
from dmuon_hf.tensor_parallel import parallelize
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
    tiny_dataset,
    tiny_llama,
)
from tests.hf.zoo.tiny import FAMILIES

MESHES = {"fsdp_tp": {"dp_shard_size": 2, "tp_size": 2}}
HYPER = {"lr": 5e-3, "weight_decay": 0.1, "eps": 1e-3}


def accelerator_of(mesh: str | None, **plugin: Any) -> Accelerator:
    as_launched()
    if mesh is None:
        return Accelerator(cpu=True)
    return Accelerator(
        cpu=True, fsdp_plugin=dmuon_hf.DMuonPlugin(**plugin), parallelism_config=ParallelismConfig(**MESHES[mesh])
    )


def model_of(name: str) -> nn.Module:
    if name == "tied":
        return tiny_llama(tie_word_embeddings=True)
    if name == "moe":
        torch.manual_seed(0)
        return tf.Qwen3MoeForCausalLM(
            tf.Qwen3MoeConfig(
                hidden_size=32, intermediate_size=48, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=128,
            )
        )  # fmt: skip
    return tiny_llama()


def loop(rank: int, world: int, mesh: str | None, name: str) -> dict[str, Any]:
    accelerator = accelerator_of(mesh)
    model = model_of(name)
    optimizer = dmuon_hf.create_optimizer(model, **HYPER)
    data = 1 if mesh is None else MESHES[mesh]["dp_shard_size"]
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in tiny_dataset(12)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4 // data))
    norms = []
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    momenta = {
        key: whole(entry["momentum_buffer"])
        for key, p in model.named_parameters()
        if "momentum_buffer" in (entry := optimizer.state[p])
    }
    result = {
        "norms": norms,
        "weights": full_weights(model),
        "momenta": momenta,
        "kinds": {key: type(p.data).__name__ for key, p in model.named_parameters()},
        "state": accelerator.get_state_dict(model),
        "description": dmuon_hf.describe(model, optimizer),
    }
    finish()
    return result


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@functools.cache
def alone(name: str) -> dict[str, Any]:
    return run_ranks(loop, 1, None, name, init=False)[0]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["tied", "moe"])
def test_loop_with_tensor_parallelism_trains_like_one_process(mesh: str, name: str) -> None:
    want = alone(name)
    ranks = run_ranks(loop, 4, mesh, name, init=False)
    for got in ranks:
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-4)
        assert got["momenta"].keys() == want["momenta"].keys()
        for kind in ("momenta", "weights"):
            for key, value in want[kind].items():
                assert (got[kind][key] - value).norm() <= 1e-3 * value.norm() + 1e-6, (kind, key)
        assert got["kinds"]["model.layers.0.self_attn.q_proj.weight"] == "OwnedTensor"
    state = ranks[0]["state"]
    assert state.keys() == want["state"].keys()
    for key in want["weights"]:
        torch.testing.assert_close(state[key], ranks[0]["weights"][key], msg=key)


def trainer_run(
    rank: int, world: int, directory: str, mesh: str | None, max_steps: int, resume: bool
) -> dict[str, Any]:
    as_launched()
    data = 1 if mesh is None else MESHES[mesh]["dp_shard_size"]
    args = arguments(
        directory,
        max_steps=4,
        per_device_train_batch_size=4 // data,
        save_strategy="steps",
        save_steps=2,
        adam_epsilon=1e-3,
    )
    trainer = make_trainer(tiny_llama(), args)
    trainer.add_callback(StopAfter(max_steps))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(directory)
    result = {"losses": losses(trainer), "weights": full_weights(trainer.model)}
    finish()
    return result


class StopAfter(tf.TrainerCallback):
    """Ends a run early, whose schedule goes on."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self._step


def test_trainer_with_tensor_parallelism_trains_saves_and_resumes_like_one_process(tmp_path: Path) -> None:
    (want,) = run_ranks(trainer_run, 1, str(tmp_path / "one"), None, 4, False, init=False)
    directory, env = str(tmp_path / "tp"), fsdp_env(2, state_dict="SHARDED_STATE_DICT")
    env |= {"PARALLELISM_CONFIG_TP_SIZE": "2"}
    run_ranks(trainer_run, 4, directory, "fsdp_tp", 2, False, init=False, env=env)
    got = run_ranks(trainer_run, 4, directory, "fsdp_tp", 4, True, init=False, env=env)[0]
    torch.testing.assert_close(torch.tensor(got["losses"]), torch.tensor(want["losses"]), rtol=1e-3, atol=1e-5)
    reopened = dict(tf.AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    for key, value in want["weights"].items():
        assert (got["weights"][key] - value).norm() <= 1e-3 * value.norm() + 1e-6, key
        torch.testing.assert_close(reopened[key].detach(), got["weights"][key], msg=key)


def refused(rank: int, world: int) -> None:
    as_launched()
    Accelerator()
    dmuon_hf.create_optimizer(tiny_llama(), lr=1e-3)


def test_loading_on_one_process_alone_is_refused_with_tensor_parallelism() -> None:
    env = fsdp_env(2, FSDP_CPU_RAM_EFFICIENT_LOADING="true") | {"PARALLELISM_CONFIG_TP_SIZE": "2"}
    for outcome in run_ranks(refused, 4, init=False, env=env, expect_failure=True, linger=10):
        assert "cpu_ram_efficient_loading: false" in error_of(outcome)


def test_tensor_parallelism_of_replicas_is_refused() -> None:
    config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    state: Any = SimpleNamespace(
        distributed_type=SimpleNamespace(value="MULTI_GPU"), mixed_precision="no", parallelism_config=config
    )
    with pytest.raises(NotImplementedError, match="without FSDP is not built"):
        check_launch(state)


def test_models_without_a_plan_are_refused_by_name() -> None:
    mesh: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(dmuon_hf.ConfigurationError, match=r"GPT2LMHeadModel cannot be cut into tp_size=2 parts.*plan"):
        parallelize(FAMILIES["gpt2"].build(), mesh)
    with pytest.raises(dmuon_hf.ConfigurationError, match="Linear is none: set tp_size: 1"):
        parallelize(nn.Linear(4, 4), mesh)
