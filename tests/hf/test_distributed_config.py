"""Models that transformers shards while it loads them (`DistributedConfig`) train like one process."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers as tf
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from transformers.distributed import DistributedConfig

import dmuon_hf
import dmuon_hf.core as dmuon
from tests.harness import run_ranks
from tests.hf.support import VOCABULARY, arguments, error_of, finish, full_weights, make_trainer, tiny_llama

STEPS = 4
BATCH = 4
MODES: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp_size": 2},
    "tp": {"tp_size": 2},
    "hsdp": {"fsdp_size": 2, "dp_replicate_size": 2},
    "fsdp_tp": {"fsdp_size": 2, "tp_size": 2},
    "ep": {"fsdp_size": 4, "ep_size": 4, "ep_implementation": "all_to_all"},
    "fsdp_tp_ep": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4, "ep_implementation": "all_to_all"},
}
WORLDS = {"fsdp": 2, "tp": 2}
ONE_MESH = {"fsdp", "hsdp"}


def tiny_qwen3_moe() -> nn.Module:
    torch.manual_seed(0)
    return tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=40,
            num_experts=8,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=VOCABULARY,
        )
    )


def tiny_phi3() -> nn.Module:
    """With fused projections of queries, keys and values, and of gate and up."""
    torch.manual_seed(0)
    return tf.Phi3ForCausalLM(
        tf.Phi3Config(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            pad_token_id=0,
        )
    )


def tiny_gpt_oss() -> nn.Module:
    """With experts stored transposed, the columns of gate and up alternating."""
    torch.manual_seed(0)
    return tf.GptOssForCausalLM(
        tf.GptOssConfig(
            hidden_size=64,
            intermediate_size=40,
            num_local_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=VOCABULARY,
        )
    )


MODELS = {"llama": tiny_llama, "qwen3_moe": tiny_qwen3_moe, "phi3": tiny_phi3, "gpt_oss": tiny_gpt_oss}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A directory per model, as `from_pretrained` opens it."""
    root = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        make().save_pretrained(root / name)
    return {name: str(root / name) for name in MODELS}


def batch_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, VOCABULARY, (BATCH, 16), generator=generator)


def load(directory: str, mode: str | None) -> nn.Module:
    if mode is None:
        return tf.AutoModelForCausalLM.from_pretrained(directory)
    dist.init_process_group("gloo")
    return tf.AutoModelForCausalLM.from_pretrained(directory, distributed_config=DistributedConfig(**MODES[mode]))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def clip(model: nn.Module, max_norm: float, mode: str | None) -> Tensor:
    """torch's own on one mesh; else one norm for each mesh, as the Trainer does."""
    if mode is None or mode in ONE_MESH:
        return whole(clip_grad_norm_(model.parameters(), max_norm))
    by_mesh: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_mesh[getattr(parameter.grad, "device_mesh", None)].append(parameter)
    norms = [whole(get_total_norm([p.grad for p in parameters])) for parameters in by_mesh.values()]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for parameters in by_mesh.values():
        clip_grads_with_norm_(parameters, max_norm, total)
    return total


def stack_specs(model: nn.Module) -> dict[str, dmuon.MatrixSpec]:
    """What the experts hold, written down by hand."""
    if model.config.model_type == "qwen3_moe":
        specs = {"gate_up_proj": dmuon.MatrixSpec(sections=(40, 40)), "down_proj": dmuon.MatrixSpec()}
    else:
        specs = {
            "gate_up_proj": dmuon.MatrixSpec(groups=40, sections=(1, 1), transposed=True),
            "down_proj": dmuon.MatrixSpec(transposed=True),
        }
    return {
        name: specs[name.rpartition(".")[2]]
        for name, _ in model.named_parameters()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }


def optimizer_of(model: nn.Module, mode: str | None, options: dict[str, Any]) -> dmuon.Muon:
    if mode is not None:
        return dmuon_hf.create_optimizer(model, lr=5e-3, weight_decay=0.1, **options)
    # One process: the routes of the presets and, for the stacks, layouts that do not come from the product.
    specs = {name: route.spec for name, route in dmuon_hf.routes(model).items() if route.route == "muon"}
    specs |= stack_specs(model)
    decayed = set(tf.Trainer.get_decay_parameter_names(None, model))
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n in decayed) is inside], "weight_decay": decay}
        for inside, decay in ((True, 0.1), (False, 0.0))
    ]
    return dmuon.Muon(
        model,
        lr=5e-3,
        adamw_lr=5e-3,
        ns_backend="auto",
        predicate=lambda name, _: name in specs,
        matrix_spec_fn=lambda name, _: specs[name],
        param_groups=groups,
    )


def part_of(mode: str | None, rank: int, world: int) -> slice:
    """Rows of the batch for this rank: ranks of one tensor-parallel group get the same."""
    if mode is None:
        return slice(None)
    parts = world // MODES[mode].get("tp_size", 1)
    index = rank // MODES[mode].get("tp_size", 1)
    return slice(index * BATCH // parts, (index + 1) * BATCH // parts)


def one_step(model: nn.Module, optimizer: dmuon.Muon, step: int, mode: str | None, rows: slice) -> dict[str, Any]:
    ids = batch_of(step)[rows]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None} if not step else {}
    norm = clip(model, 0.5, mode)
    optimizer.step()
    optimizer.zero_grad()
    return {"gradients": gradients, "norm": norm}


def train(rank: int, world: int, directory: str, mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    model = load(directory, mode)
    optimizer = optimizer_of(model, mode, options)
    results = [one_step(model, optimizer, step, mode, part_of(mode, rank, world)) for step in range(STEPS)]
    momenta = {
        name: whole(optimizer.state[p]["momentum_buffer"])
        for name, p in model.named_parameters()
        if "momentum_buffer" in optimizer.state[p]
    }
    weights = full_weights(model)
    finish()
    return {
        "weights": weights,
        "momenta": momenta,
        "gradients": results[0]["gradients"],
        "norms": [result["norm"] for result in results],
    }


@pytest.fixture(scope="module")
def one_process(saved: dict[str, str]) -> Callable[[str], dict[str, Any]]:
    """What one process makes of a model, computed once."""
    return functools.cache(lambda name: run_ranks(train, 1, saved[name], None, {}, init=False)[0])


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("llama", mode) for mode in ("fsdp", "tp", "hsdp", "fsdp_tp")),
        *(("qwen3_moe", mode) for mode in ("fsdp", "tp", "fsdp_tp", "ep", "fsdp_tp_ep")),
        *(("phi3", mode) for mode in ("fsdp", "fsdp_tp")),
        *(("gpt_oss", mode) for mode in ("fsdp", "ep")),
    ],
)
def test_model_sharded_by_transformers_trains_like_one_process(
    name: str, mode: str, saved: dict[str, str], one_process: Callable[[str], dict[str, Any]]
) -> None:
    expected = one_process(name)
    ranks = run_ranks(train, WORLDS.get(mode, 4), saved[name], mode, {}, init=False)
    for got in ranks:
        assert got["momenta"].keys() == expected["momenta"].keys()
        for kind, bound in (("gradients", 1e-4), ("momenta", 1e-3), ("weights", 1e-3)):
            for key, want in expected[kind].items():
                assert (got[kind][key] - want).norm() <= bound * want.norm() + 1e-7, (kind, key)
        torch.testing.assert_close(torch.stack(got["norms"]), torch.stack(expected["norms"]), rtol=1e-3, atol=1e-5)


def described(rank: int, world: int, directory: str, options: dict[str, Any]) -> str:
    model = load(directory, "fsdp")
    return dmuon_hf.describe(model, optimizer_of(model, "fsdp", options))


def row(text: str, name: str) -> str:
    """The row of a parameter; a long name has a line of its own, above the rest of its row."""
    (found,) = [row for row in text.replace("\n ", " ").splitlines() if name in row]
    return found


def test_caller_routes_stacks_and_says_their_layout(saved: dict[str, str]) -> None:
    options = {
        "routes": {"*.experts.down_proj": "adamw"},
        "layouts": {"*.experts.gate_up_proj": dmuon.MatrixSpec(sections=(20, 60))},
    }
    text = run_ranks(described, 2, saved["qwen3_moe"], options, init=False)[0]
    assert "adamw" in row(text, "experts.down_proj")
    assert "chosen by the caller" in row(text, "experts.down_proj")
    assert "muon" in row(text, "experts.gate_up_proj")
    plain = run_ranks(described, 2, saved["qwen3_moe"], {}, init=False)[0]
    assert "8 of 64x40" in row(plain, "experts.down_proj")


def test_layout_of_a_stack_by_name_is_refused_on_every_rank(saved: dict[str, str]) -> None:
    options = {"layouts": {"*.experts.gate_up_proj": "gate_up"}}
    for outcome in run_ranks(described, 2, saved["qwen3_moe"], options, init=False, expect_failure=True, linger=10.0):
        assert "give the MatrixSpec of one expert" in error_of(outcome)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save(rank: int, world: int, directory: str, mode: str, path: str) -> dict[str, Any]:
    """Two steps, a checkpoint of torch's DCP, and the weights after two more; whole state dicts of the first two."""
    model = load(directory, mode)
    optimizer = optimizer_of(model, mode, {})
    rows = part_of(mode, rank, world)
    for step in range(2):
        one_step(model, optimizer, step, mode, rows)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    gathered = dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)
    for step in range(2, STEPS):
        one_step(model, optimizer, step, mode, rows)
    result = {"weights": full_weights(model), "gathered": gathered}
    finish()
    return result


def resume(rank: int, world: int, directory: str, mode: str, path: str | None, states: Any) -> dict[str, Tensor]:
    """The last two steps from a checkpoint, or from whole state dicts."""
    model = load(directory, mode)
    optimizer = optimizer_of(model, mode, {})
    if path is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    else:
        dmuon.set_model_state_dict(model, states[0])
        dmuon.set_optimizer_state_dict(model, optimizer, states[1])
    for step in range(2, STEPS):
        one_step(model, optimizer, step, mode, part_of(mode, rank, world))
    result = full_weights(model)
    finish()
    return result


@pytest.mark.parametrize(
    ("name", "mode"), [("llama", "fsdp"), ("llama", "tp"), ("llama", "fsdp_tp"), ("qwen3_moe", "ep")]
)
def test_own_loop_resumed_from_a_checkpoint_goes_on_equally(
    name: str, mode: str, saved: dict[str, str], tmp_path: Path
) -> None:
    world, path = WORLDS.get(mode, 4), str(tmp_path / "checkpoint")
    before = run_ranks(save, world, saved[name], mode, path, init=False)[0]
    from_dcp = run_ranks(resume, world, saved[name], mode, path, None, init=False)
    from_whole = run_ranks(resume, world, saved[name], mode, None, before["gathered"], init=False)
    for weights in (*from_dcp, *from_whole):
        for key, want in before["weights"].items():
            torch.testing.assert_close(weights[key], want, rtol=0, atol=0)


# -- Trainer -----------------------------------------------------------------------------------------------------------


def trainer_run(
    rank: int, world: int, directory: str, output: str, mode: str | None, overrides: dict[str, Any], resume: bool
) -> Any:
    model = load(directory, mode)
    args = arguments(output, max_steps=STEPS, save_strategy="steps", save_steps=STEPS // 2, **overrides)
    trainer = make_trainer(model, args)
    if mode == "hsdp":
        # With an optimizer that was made before, which is the same.
        optimizer = dmuon_hf.create_optimizer(model, args)
        trainer = tf.Trainer(model, args, train_dataset=trainer.train_dataset, optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=str(Path(output) / "checkpoint-2") if resume else None)
    trainer.save_model(output)
    weights = full_weights(model)
    finish()
    return weights, dmuon_hf.describe(model, trainer.optimizer)


def trainer_alone(rank: int, world: int, directory: str, output: str) -> Any:
    model = load(directory, None)
    optimizer = optimizer_of(model, None, {})
    trainer = tf.Trainer(
        model=model,
        args=arguments(output, max_steps=STEPS, per_device_train_batch_size=4),
        train_dataset=make_trainer(tiny_llama(), arguments(output)).train_dataset,
        optimizers=(optimizer, None),
    )
    trainer.train()
    return full_weights(model)


@pytest.fixture(scope="module")
def trained_alone(saved: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    output = str(tmp_path_factory.mktemp("one"))
    (weights,) = run_ranks(trainer_alone, 1, saved["qwen3_moe"], output, init=False)
    return weights


@pytest.mark.parametrize("mode", ["fsdp", "hsdp", "ep"])
def test_trainer_trains_a_sharded_model_like_one_process_saves_what_opens_and_resumes(
    mode: str, saved: dict[str, str], trained_alone: dict[str, Tensor], tmp_path: Path
) -> None:
    expected = trained_alone
    output = str(tmp_path / "sharded")
    world = WORLDS.get(mode, 4)
    run: Any = functools.partial(run_ranks, trainer_run, init=False)
    options = {"per_device_train_batch_size": BATCH // world}
    (weights, description), *_ = run(world, saved["qwen3_moe"], output, mode, options, False)
    reopened = dict(tf.AutoModelForCausalLM.from_pretrained(output).named_parameters())
    for key, want in expected.items():
        assert (weights[key] - want).norm() < 1e-3 * want.norm() + 1e-7, key
        torch.testing.assert_close(reopened[key].detach(), weights[key], rtol=0, atol=0)
    (stack,) = [line for line in description.splitlines() if "experts.gate_up_proj" in line]
    assert "muon" in stack
    assert "16 of 40x64" in stack
    for resumed, _ in run(world, saved["qwen3_moe"], output, mode, options, True):
        for key, want in weights.items():
            assert torch.equal(resumed[key], want), key
    # The same checkpoint in one process, without DistributedConfig.
    ((alone, _),) = run(1, saved["qwen3_moe"], output, None, {"per_device_train_batch_size": BATCH}, True)
    for key, want in weights.items():
        assert (alone[key] - want).norm() < 1e-3 * want.norm() + 1e-7, key


def test_trainer_with_tensor_parallelism_on_cpu_ends_with_the_error_of_accelerate(
    saved: dict[str, str], tmp_path: Path
) -> None:
    outcomes = run_ranks(
        trainer_run, 2, saved["llama"], str(tmp_path), "tp", {}, False, init=False, expect_failure=True
    )
    assert "ParallelismConfig" in error_of(outcomes[0])


def adapters(rank: int, world: int, directory: str, output: str) -> tuple[str, dict[str, Tensor]]:
    """What an own loop says of adapters on a model, and their weights after a run of the Trainer."""
    import peft

    model = load(directory, "fsdp")
    torch.manual_seed(rank)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    said = ""
    optimizer = dmuon_hf.create_optimizer(model, lr=5e-3, lora="muon")
    model(input_ids=batch_of(0), labels=batch_of(0)).loss.backward()
    try:
        optimizer.step()
    except dmuon_hf.ConfigurationError as error:
        said = str(error)
    model.zero_grad()
    args = arguments(output, max_steps=2, per_device_train_batch_size=BATCH // world)
    make_trainer(model, args, lora="muon").train()
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    finish()
    return said, weights


def test_adapters_that_nobody_synchronises_are_refused_and_train_alike_under_the_trainer(
    saved: dict[str, str], tmp_path: Path
) -> None:
    (first, want), (second, got) = run_ranks(adapters, 2, saved["llama"], str(tmp_path), init=False)
    assert "lora_A.default.weight and 7 more" in first and first == second
    for name, value in want.items():
        assert torch.equal(got[name], value), name
        assert value.any(), name


def accelerate_save(rank: int, world: int, directory: str, path: str) -> None:
    model = load(directory, "fsdp")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(optimizer_of(model, "fsdp", {}))
    accelerator.save_state(path)


def test_accelerate_refuses_to_save_the_part_of_a_rank_as_the_whole(saved: dict[str, str], tmp_path: Path) -> None:
    for outcome in run_ranks(
        accelerate_save, 2, saved["llama"], str(tmp_path), init=False, expect_failure=True, linger=10.0
    ):
        assert "Use torch.distributed.checkpoint" in error_of(outcome)
