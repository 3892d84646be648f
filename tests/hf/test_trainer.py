"""Muon under the stock Trainer: one process, FSDP2 and HSDP give the same run, and what follows training works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import dmuon_hf
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


def _train(rank: int, world: int, directory: str, tied: bool = False, **overrides: Any) -> dict[str, Any]:
    as_launched()
    model = tiny_llama(tie_word_embeddings=tied)
    trainer = make_trainer(model, arguments(directory, **{"max_steps": 4} | overrides))
    trainer.train()
    result = {
        "fsdp2": trainer.accelerator.is_fsdp2,
        "losses": losses(trainer),
        "weights": full_weights(trainer.model),
        "matrices": trainer.optimizer.optimizer.ns_matrices,
        "skipped": trainer.optimizer.optimizer.skipped_steps,
    }
    finish()
    return result


def _assert_same_run(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for got, want in zip(actual["losses"], expected["losses"], strict=True):
        assert got[1:] == pytest.approx(want[1:], rel=2e-4), (got, want)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(
            actual["weights"][name], weight, rtol=1e-3, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    """The run of one process that sees every sample, with untied and with tied embeddings."""
    directory = str(tmp_path_factory.mktemp("alone"))
    return {
        tied: run_ranks(_train, 1, directory, tied, init=False, per_device_train_batch_size=8)[0]
        for tied in (False, True)
    }


@pytest.mark.parametrize(
    ("world", "replicas", "tied", "overrides", "extra"),
    [
        (4, 2, False, {}, {}),
        (2, 1, True, {}, {"FSDP_RESHARD_AFTER_FORWARD": "false"}),
        (2, 1, False, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, {}),
        (2, 1, False, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, {}),
        (2, 1, False, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, {}),
    ],
    ids=["hsdp", "fsdp-z2-tied", "accumulation", "checkpointing", "reentrant-checkpointing"],
)
def test_distributed_run_equals_the_run_of_one_process(
    alone: dict[bool, dict[str, Any]],
    tmp_path: Path,
    world: int,
    replicas: int,
    tied: bool,
    overrides: dict[str, Any],
    extra: dict[str, str],
) -> None:
    overrides = {"per_device_train_batch_size": 8 // world} | overrides
    env = fsdp_env(world, replicas=replicas, **extra)
    results = run_ranks(_train, world, str(tmp_path), tied, init=False, env=env, **overrides)
    assert all(result["fsdp2"] for result in results)
    assert sum(result["matrices"] for result in results) == 4 * 14
    _assert_same_run(results[0], alone[tied])


def test_fsdp_without_a_parallelism_config_equals_one_process(
    alone: dict[bool, dict[str, Any]], tmp_path: Path
) -> None:
    env = fsdp_env(2, mesh=False)
    results = run_ranks(_train, 2, str(tmp_path), init=False, env=env, per_device_train_batch_size=4)
    assert all(result["fsdp2"] for result in results)
    _assert_same_run(results[0], alone[False])


def _after_training(rank: int, world: int, directory: str) -> dict[str, Any]:
    as_launched()
    model = tiny_llama(tie_word_embeddings=True)
    args = arguments(directory, max_steps=2, eval_on_start=True, per_device_eval_batch_size=4)
    trainer = make_trainer(model, args)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(directory)
    trainer.model.eval()
    prompt = torch.arange(6).unsqueeze(0)
    generated = trainer.model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        logits = trainer.model(input_ids=prompt).logits
    table = dmuon_hf.describe(trainer.model, trainer.optimizer)
    finish()
    return {"evaluated": evaluated, "generated": generated, "logits": logits, "table": table}


def test_saved_model_reopens_and_evaluates_and_generates_as_the_trained_one(tmp_path: Path) -> None:
    results = run_ranks(_after_training, 4, str(tmp_path), init=False, env=fsdp_env(4, replicas=2))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([row["input_ids"] for row in tiny_dataset(16)])
    prompt = torch.arange(6).unsqueeze(0)
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
        logits = model(input_ids=prompt).logits
    generated = model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
    for result in results:
        assert result["evaluated"] == pytest.approx(loss, rel=1e-5)
        assert torch.equal(result["generated"], generated)
        torch.testing.assert_close(result["logits"], logits)


def test_saved_tied_weight_is_written_once(tmp_path: Path) -> None:
    from safetensors import safe_open

    run_ranks(_after_training, 2, str(tmp_path), init=False, env=fsdp_env(2))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_description_shows_routes_groups_and_owners_of_all_ranks(tmp_path: Path) -> None:
    table = run_ranks(_after_training, 4, str(tmp_path), init=False, env=fsdp_env(4, replicas=2))[2]["table"]
    assert "owners on 2 shards x 2 replicas" in table
    row = next(line for line in table.splitlines() if line.startswith("model.layers.*.mlp.up_proj.weight"))
    assert row.split()[:6] == ["model.layers.*.mlp.up_proj.weight", "96x64", "muon", "decay/muon", "0.005", "0.1"]
    assert "embedding" in next(line for line in table.splitlines() if line.startswith("model.embed_tokens"))


def _train_twice(rank: int, world: int, directory: str, once: bool) -> dict[str, Any]:
    as_launched()
    # A constant rate and samples in order, so that two runs of two steps can equal one run of four.
    steps = 4 if once else 2
    args = arguments(directory, max_steps=steps, lr_scheduler_type="constant", train_sampling_strategy="sequential")
    trainer = make_trainer(tiny_llama(), args)
    trainer.train()
    if not once:
        trainer.train_dataset = trainer.train_dataset[8:] + trainer.train_dataset[:8]
        trainer.train()
    result = {"weights": full_weights(trainer.model), "evaluated": trainer.evaluate()["eval_loss"]}
    finish()
    return result


def test_second_train_goes_on_with_the_same_weights_and_momentum(tmp_path: Path) -> None:
    once, twice = (
        run_ranks(_train_twice, 2, str(tmp_path), once, init=False, env=fsdp_env(2)) for once in (True, False)
    )
    for name, weight in once[0]["weights"].items():
        torch.testing.assert_close(twice[0]["weights"][name], weight)
    assert twice[0]["evaluated"] == pytest.approx(once[0]["evaluated"])


def _best_model(rank: int, world: int, directory: str) -> dict[str, Any]:
    as_launched()
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    args = arguments(directory, max_steps=4, learning_rate=0.3, load_best_model_at_end=True, **settings)
    trainer = make_trainer(tiny_llama(), args)
    trainer.train()
    measured = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    result = {"best": min(measured), "last": measured[-1], "loaded": trainer.evaluate()["eval_loss"]}
    finish()
    return result


def test_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    for result in run_ranks(_best_model, 2, str(tmp_path), init=False, env=fsdp_env(2)):
        assert result["best"] < result["last"]
        assert result["loaded"] == pytest.approx(result["best"], rel=1e-6)


def _from_arguments(rank: int, world: int, directory: str) -> bool:
    as_launched()
    args = arguments(directory, max_steps=1, fsdp="full_shard auto_wrap", fsdp_config={"version": 2})
    trainer = make_trainer(tiny_llama(), args)
    trainer.train()
    result = trainer.accelerator.is_fsdp2
    finish()
    return result


def test_fsdp_asked_for_by_training_arguments_is_fsdp2_on_cpu(tmp_path: Path) -> None:
    assert run_ranks(_from_arguments, 2, str(tmp_path), init=False) == [True, True]


def test_torch_compile_gives_the_run_of_one_process(alone: dict[bool, dict[str, Any]], tmp_path: Path) -> None:
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "per_device_train_batch_size": 4}
    for result in run_ranks(_train, 2, str(tmp_path), False, init=False, env=fsdp_env(2), **options):
        assert result["fsdp2"]
        result["weights"] = {name.replace("_orig_mod.", ""): weight for name, weight in result["weights"].items()}
        _assert_same_run(result, alone[False])
