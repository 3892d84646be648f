"""What TrainingArguments and the Trainer offer beside training, with Muon in every launch: a table."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.trainer_utils import HPSearchBackend

import dmuon_hf
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

pytestmark = pytest.mark.timeout(600)

_LAUNCHES: dict[str, tuple[int, dict[str, str]]] = {
    "one process": (1, {}),
    "ddp": (2, {}),
    "fsdp2": (2, fsdp_env(2)),
}
_HSDP = (4, fsdp_env(4, replicas=2))


def _model() -> nn.Module:
    return tiny_llama(num_hidden_layers=1)


class _Runs:
    """The features, each a method that trains and returns what is to be looked at."""

    def __init__(self, directory: str, world: int) -> None:
        self.directory, self.world = directory, world

    def args(self, name: str, **overrides: Any) -> tf.TrainingArguments:
        settings = {
            "max_steps": 2, "per_device_train_batch_size": 4 // self.world, "adam_epsilon": 1e-3, "weight_decay": 0.0
        }  # fmt: skip
        return arguments(f"{self.directory}/{name}", **settings | overrides)

    def plain(self) -> Any:
        trainer = make_trainer(_model(), self.args("plain"))
        trainer.train()
        return full_weights(trainer.model)

    def compiled(self) -> Any:
        trainer = make_trainer(_model(), self.args("c", torch_compile=True, torch_compile_backend="eager"))
        trainer.train()
        return full_weights(trainer.model)

    def twice(self) -> Any:
        trainer = make_trainer(_model(), self.args("twice"))
        trainer.train()
        trainer.train()
        return full_weights(trainer.model)

    def batch_size(self) -> Any:
        model: Any = _model()
        model.model.embed_tokens.forward = _limited(model.model.embed_tokens)
        rows = tiny_dataset(1) * 16
        options = {"train_dataset": rows, "optimizers": dmuon_hf.create()}
        trainer = tf.Trainer(model=model, args=self.args("batch", auto_find_batch_size=True), **options)
        trainer.train()
        fitting = tf.Trainer(model=_model(), args=self.args("fitting", per_device_train_batch_size=1), **options)
        fitting.train()
        found = trainer._train_batch_size, trainer.state.global_step
        return found, full_weights(trainer.model), full_weights(fitting.model)

    def noise(self) -> Any:
        trainer = make_trainer(_model(), self.args("noise", neftune_noise_alpha=5.0))
        trainer.train()
        embedding = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings()
        return full_weights(trainer.model), trainer.neftune_hook_handle.id in embedding._forward_hooks

    def best(self) -> Any:
        args = self.args(
            "best", max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
            load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
        )  # fmt: skip
        trainer = make_trainer(_model(), args)
        seen = {}

        class Keep(tf.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                seen[state.global_step] = full_weights(trainer.model)

        trainer.add_callback(Keep())
        trainer.train()
        return seen[1], full_weights(trainer.model), trainer.state.best_model_checkpoint

    def generated(self) -> Any:
        args = tf.Seq2SeqTrainingArguments(
            **self.args("seq2seq", learning_rate=3e-2, lr_scheduler_type="constant").to_dict()
            | {"output_dir": f"{self.directory}/seq2seq", "log_level": "error"},
            predict_with_generate=True,
            generation_max_length=8,
        )
        args.eval_strategy, args.eval_steps, args.per_device_eval_batch_size = "steps", 1, 4 // self.world
        seen: list[Any] = []
        trainer = tf.Seq2SeqTrainer(
            model=_encoder_decoder(),
            args=args,
            train_dataset=tiny_dataset(16),
            eval_dataset=tiny_dataset(8),
            compute_metrics=lambda prediction: seen.append(prediction.predictions.tolist()) or {},
            optimizers=dmuon_hf.create(),
        )
        trainer.train()
        predicted = trainer.predict(tiny_dataset(8)).predictions
        trainer.save_model()
        return seen, predicted.tolist(), full_weights(trainer.model)

    def search(self) -> Any:
        """What a search does between its trials, without one of the packages that search."""
        args = self.args("search")
        trainer = tf.Trainer(model_init=_model, args=args, train_dataset=tiny_dataset(), optimizers=dmuon_hf.create())
        trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.OPTUNA, lambda trial: trial.params
        runs = []
        for number, rate in enumerate((5e-3, 1e-3, 5e-3)):
            trial = SimpleNamespace(number=number, params={"learning_rate": rate})
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tf.integrations, "hp_params", lambda trial: trial.params)
                trainer.train(trial=trial)
            runs.append((trainer.optimizer.param_groups[0]["initial_lr"], full_weights(trainer.model)))
        return runs


def _encoder_decoder() -> nn.Module:
    torch.manual_seed(0)
    config = tf.BartConfig(
        d_model=64, encoder_ffn_dim=96, decoder_ffn_dim=96, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=128, max_position_embeddings=64, dropout=0.0,
        pad_token_id=1, bos_token_id=0, eos_token_id=127, decoder_start_token_id=2,
        forced_eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return tf.BartForConditionalGeneration(config)


def _limited(embedding: nn.Embedding) -> Callable[[torch.Tensor], torch.Tensor]:
    """Its forward, which runs out of memory on more than one row at a time, as a GPU would."""

    def forward(ids: torch.Tensor) -> torch.Tensor:
        if embedding.training and ids.shape[0] > 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        return nn.functional.embedding(ids, embedding.weight)

    return forward


_FEATURES = ("plain", "compiled", "twice", "batch_size", "noise", "best", "search", "generated")


def _train(rank: int, world: int, directory: str, features: list[str]) -> dict[str, Any]:
    if os.environ.get("ACCELERATE_USE_FSDP"):
        as_launched()
    runs = _Runs(directory, world)
    result = {name: getattr(runs, name)() for name in features}
    finish()
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    features = {name: [item for item in _FEATURES if (item, name) != ("compiled", "ddp")] for name in _LAUNCHES}
    features["hsdp"] = ["generated"]
    return {
        name: run_ranks(
            _train, world, str(tmp_path_factory.mktemp("out")), features[name], init=False, env=env, timeout=150
        )
        for name, (world, env) in (_LAUNCHES | {"hsdp": _HSDP}).items()
    }


def _assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 5e-5) -> None:
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-3, atol=atol, msg=name)


@pytest.mark.parametrize("launch", ["one process", "fsdp2"])
def test_compiled_model_trains_like_one_that_is_not(runs: Any, launch: str) -> None:
    for result in runs[launch]:
        _assert_same(result["compiled"], result["plain"])
        _assert_same(result["plain"], runs["one process"][0]["plain"])


@pytest.mark.parametrize("launch", _LAUNCHES)
def test_second_train_goes_on_like_in_one_process(runs: Any, launch: str) -> None:
    for result in runs[launch]:
        _assert_same(result["twice"], runs["one process"][0]["twice"], atol=1e-4)
        assert any(not torch.equal(result["twice"][name], weight) for name, weight in result["plain"].items())


@pytest.mark.parametrize("launch", _LAUNCHES)
def test_batch_size_that_fits_is_found(runs: Any, launch: str) -> None:
    for result in runs[launch]:
        found, weights, fitting = result["batch_size"]
        assert found == (1, 2)
        _assert_same(weights, fitting)


@pytest.mark.parametrize("launch", _LAUNCHES)
def test_noise_on_embeddings_is_added_while_training_alone(runs: Any, launch: str) -> None:
    for result in runs[launch]:
        weights, is_left = result["noise"]
        assert not is_left
        assert any(not torch.equal(weights[name], weight) for name, weight in result["plain"].items())
        assert all(torch.equal(weights[name], weight) for name, weight in runs[launch][0]["noise"][0].items())


@pytest.mark.parametrize("launch", _LAUNCHES)
def test_search_starts_every_trial_anew(runs: Any, launch: str) -> None:
    for result in runs[launch]:
        (rate, first), (other_rate, second), (_, third) = result["search"]
        assert (rate, other_rate) == (5e-3, 1e-3)
        assert all(torch.equal(third[name], weight) for name, weight in first.items())
        assert any(not torch.equal(second[name], weight) for name, weight in first.items())


@pytest.mark.parametrize("launch", _LAUNCHES)
def test_best_model_is_there_at_the_end(runs: Any, launch: str) -> None:
    for result in runs[launch]:
        # The loss is largest after the first step, and here that counts as best.
        first, last, best = result["best"]
        assert best.endswith("checkpoint-1")
        assert all(torch.equal(last[name], weight) for name, weight in first.items())


@pytest.mark.parametrize("launch", [*_LAUNCHES, "hsdp"])
def test_encoder_decoder_generates_while_it_trains_as_in_one_process(runs: Any, launch: str) -> None:
    seen, predicted, weights = runs["one process"][0]["generated"]
    # Both evaluations and the prediction see the weights of their own step.
    assert len(seen) == 3 and seen[0] != seen[1] and seen[1] == seen[2] == predicted
    for result in runs[launch]:
        assert result["generated"][:2] == (seen, predicted)
        _assert_same(result["generated"][2], weights)


def _full_eval(rank: int, world: int, directory: str, flag: str, train_first: bool) -> str:
    trainer = make_trainer(_model(), arguments(directory, max_steps=1, **{flag: True}))
    if train_first:
        trainer.train()
    trainer.evaluate()
    with pytest.raises(dmuon_hf.ConfigurationError) as caught:
        trainer.train()
    return str(caught.value)


@pytest.mark.parametrize(("flag", "train_first"), [("bf16_full_eval", True), ("fp16_full_eval", False)])
def test_train_after_an_evaluation_that_cast_the_model_raises_before_it_runs(
    tmp_path: Path, flag: str, train_first: bool
) -> None:
    (message,) = run_ranks(_full_eval, 1, str(tmp_path), flag, train_first, init=False)
    assert f"{flag} cast the model when it was evaluated (model." in message
