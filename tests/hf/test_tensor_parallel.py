"""FSDP2 and HSDP with tensor parallelism, as accelerate's `ParallelismConfig` asks for it, train like one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import dmuon_hf
from dmuon_hf.checks import check_launch, check_same_batches
from dmuon_hf.tensor_parallel import parallelize
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
from tests.hf.zoo.tiny import FAMILIES

MESHES: dict[str, dict[str, int]] = {
    "fsdp2_tp": {"dp_replicate_size": 1, "dp_shard_size": 2, "tp_size": 2},
    "hsdp_tp": {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2},
}
HYPER = {"lr": 5e-3, "weight_decay": 0.1, "eps": 1e-3}


def env_of(mesh: str | None, **extra: str) -> dict[str, str]:
    if mesh is None:
        return {}
    sizes = {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in MESHES[mesh].items()}
    return fsdp_env(2, state_dict="SHARDED_STATE_DICT") | sizes | extra


def parts_of(mesh: str | None) -> int:
    """Into how many parts a batch is cut: the ranks of one tensor-parallel group get the same."""
    return 1 if mesh is None else MESHES[mesh]["dp_replicate_size"] * MESHES[mesh]["dp_shard_size"]


def model_of(name: str) -> nn.Module:
    if name == "tied":
        return tiny_llama(tie_word_embeddings=True)
    torch.manual_seed(0)
    return tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(
            hidden_size=32, intermediate_size=48, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=128,
        )
    )  # fmt: skip


def loop(name: str, parts: int) -> dict[str, Any]:
    """Three steps of a loop on accelerate, under the launch of this process."""
    accelerator = Accelerator(cpu=True)
    model = model_of(name)
    optimizer = dmuon_hf.create_optimizer(model, **HYPER)
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in tiny_dataset(12)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4 // parts))
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
    return {
        "norms": norms,
        "weights": full_weights(model),
        "momenta": momenta,
        "kinds": {key: (type(p.data).__name__, p.dtype) for key, p in model.named_parameters()},
        "state": accelerator.get_state_dict(model),
        "mesh": None if accelerator.torch_device_mesh is None else accelerator.torch_device_mesh.mesh_dim_names,
    }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trainer_run(directory: str, parts: int) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more by another Trainer that resumes from it."""
    args = arguments(
        directory,
        max_steps=4,
        per_device_train_batch_size=4 // parts,
        save_strategy="steps",
        save_steps=2,
        adam_epsilon=1e-3,
    )
    for stop, resume in ((2, False), (4, True)):
        trainer = make_trainer(tiny_llama(), args)
        trainer.add_callback(StopAfter(stop))
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(directory)
    return {"losses": losses(trainer), "weights": full_weights(trainer.model)}


class StopAfter(tf.TrainerCallback):
    """Ends a run early, whose schedule goes on."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self._step


def train(rank: int, world: int, mesh: str | None, directory: str) -> dict[str, Any]:
    if mesh is not None:
        as_launched()
    result: dict[str, Any] = {name: loop(name, parts_of(mesh)) for name in ("tied", "moe")}
    result["trainer"] = trainer_run(directory, parts_of(mesh))
    finish()
    return result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(train, 1, None, str(tmp_path_factory.mktemp("alone")), init=False)[0]


@pytest.fixture(scope="module", params=MESHES)
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The directory that the Trainer saved into, and what every rank has seen."""
    mesh, directory = request.param, tmp_path_factory.mktemp(request.param)
    world = parts_of(mesh) * MESHES[mesh]["tp_size"]
    ranks = run_ranks(train, world, mesh, str(directory), init=False, env=env_of(mesh), timeout=300)
    axes = tuple(name.removesuffix("_size") for name, size in MESHES[mesh].items() if size > 1)
    assert all(rank["tied"]["mesh"] == axes for rank in ranks)
    return directory, ranks


@pytest.mark.parametrize("name", ["tied", "moe"])
def test_loop_with_tensor_parallelism_trains_like_one_process(
    alone: dict[str, Any], launched: tuple[Path, list[Any]], name: str
) -> None:
    want, ranks = alone[name], [rank[name] for rank in launched[1]]
    for got in ranks:
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-4)
        assert got["momenta"].keys() == want["momenta"].keys()
        for kind in ("momenta", "weights"):
            for key, value in want[kind].items():
                assert (got[kind][key] - value).norm() <= 1e-3 * value.norm() + 1e-6, (kind, key)
        assert got["kinds"]["model.layers.0.self_attn.q_proj.weight"] == ("OwnedTensor", torch.float32)
    state = ranks[0]["state"]
    assert state.keys() == want["state"].keys()
    for key in want["weights"]:
        torch.testing.assert_close(state[key], ranks[0]["weights"][key], msg=key)


def test_trainer_with_tensor_parallelism_trains_saves_and_resumes_like_one_process(
    alone: dict[str, Any], launched: tuple[Path, list[Any]]
) -> None:
    want, (directory, ranks) = alone["trainer"], launched
    got = ranks[0]["trainer"]
    torch.testing.assert_close(torch.tensor(got["losses"]), torch.tensor(want["losses"]), rtol=1e-3, atol=1e-5)
    reopened = dict(tf.AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    for key, value in want["weights"].items():
        assert (got["weights"][key] - value).norm() <= 1e-3 * value.norm() + 1e-6, key
        torch.testing.assert_close(reopened[key].detach(), got["weights"][key], msg=key)


def half(rank: int, world: int, parts: int) -> dict[str, Any]:
    as_launched()
    result = loop("tied", parts)
    finish()
    return result


def test_bf16_with_tensor_parallelism_is_as_near_to_fp32_as_without(alone: dict[str, Any]) -> None:
    start = dict(model_of("tied").named_parameters())
    bf16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    without = run_ranks(half, 2, 2, init=False, env=fsdp_env(2, **bf16))[0]
    for got in run_ranks(half, 4, 2, init=False, env=env_of("fsdp2_tp", **bf16)):
        assert got["norms"] == pytest.approx(without["norms"], rel=5e-3)
        for key, value in alone["tied"]["weights"].items():
            kind = "OwnedTensor" if key in got["momenta"] else "DTensor"
            assert got["kinds"][key] == (kind, torch.float32), key
            error, usual = ((run["weights"][key] - value).norm() for run in (got, without))
            assert error <= 1.5 * usual, key
            assert usual < 0.2 * (value - start[key]).norm(), key


@pytest.mark.parametrize(
    ("kind", "one_loads", "message"),
    [("MULTI_GPU", False, "without FSDP is not built"), ("FSDP", True, "cpu_ram_efficient_loading: false")],
)
def test_launches_that_cannot_cut_the_model_are_refused(kind: str, one_loads: bool, message: str) -> None:
    plugin = SimpleNamespace(
        fsdp_version=2, cpu_offload=None, ignored_modules=None, cpu_ram_efficient_loading=one_loads
    )
    state: Any = SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind),
        mixed_precision="no",
        parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2),
        fsdp_plugin=plugin,
    )
    with pytest.raises(NotImplementedError, match=message):
        check_launch(state)


class GRPOTrainer:
    """Named like the one of TRL, which asks for no more than its name."""

    def __init__(self, tp_size: int) -> None:
        self.accelerator = SimpleNamespace(parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=tp_size))
        self.model = nn.Linear(2, 2)


def test_trainer_that_draws_its_batches_is_refused_where_ranks_share_them() -> None:
    check_same_batches(GRPOTrainer(tp_size=1))
    with pytest.raises(NotImplementedError, match="draw other completions"):
        check_same_batches(type("Mine", (GRPOTrainer,), {})(tp_size=2))


def test_models_without_a_plan_are_refused_by_name() -> None:
    mesh: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(dmuon_hf.ConfigurationError, match=r"GPT2LMHeadModel cannot be cut into tp_size=2 parts.*plan"):
        parallelize(FAMILIES["gpt2"].build(), mesh)
    with pytest.raises(dmuon_hf.ConfigurationError, match="Linear is none: set tp_size: 1"):
        parallelize(nn.Linear(4, 4), mesh)


def test_adapters_are_refused_with_tensor_parallelism() -> None:
    mesh: Any = SimpleNamespace(size=lambda: 2)
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(NotImplementedError, match="tp_size=2 with adapters"):
        parallelize(model, mesh)
