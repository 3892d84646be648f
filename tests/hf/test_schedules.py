"""Every schedule that TrainingArguments can name gives Muon the rates that it gives AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import SchedulerType, Trainer

from tests.harness import run_ranks
from tests.hf.support import arguments, make_trainer, tiny_dataset, tiny_llama

pytestmark = pytest.mark.timeout(1200)

STEPS = 4
_OF_METRICS = ("reduce_lr_on_plateau", "greedy")
_KWARGS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 2},
    "reduce_lr_on_plateau": {"patience": 0},
}


def _rates(rank: int, world: int, directory: str, muon: bool) -> dict[str, list[list[float]]]:
    """The rates of all groups after every step, by schedule."""
    result: dict[str, list[list[float]]] = {}
    for kind in (item.value for item in SchedulerType):
        args = arguments(
            directory,
            max_steps=STEPS,
            lr_scheduler_type=kind,
            lr_scheduler_kwargs=_KWARGS.get(kind, {}),
            warmup_steps=1,
            eval_strategy="steps" if kind in _OF_METRICS else "no",
            eval_steps=1,
        )
        data = {"train_dataset": tiny_dataset(16), "eval_dataset": tiny_dataset(4)}
        model = tiny_llama(num_hidden_layers=1)
        trainer = make_trainer(model, args) if muon else Trainer(model=model, args=args, **data)
        rates: list[list[float]] = []
        trainer.create_optimizer()
        trainer.optimizer.register_step_post_hook(
            lambda optimizer, *_, rates=rates: rates.append([group["lr"] for group in optimizer.param_groups])
        )
        trainer.train()
        result[kind] = rates
    return result


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    directory: Path = tmp_path_factory.mktemp("out")
    muon, adamw = (run_ranks(_rates, 1, str(directory), muon, init=False, timeout=200)[0] for muon in (True, False))
    return muon, adamw


@pytest.mark.parametrize("kind", [item.value for item in SchedulerType])
def test_trainer_schedule_gives_the_rates_of_adamw(rates: tuple[dict[str, Any], dict[str, Any]], kind: str) -> None:
    muon, adamw = rates
    assert len(muon[kind]) == len(adamw[kind]) == STEPS
    for ours, theirs in zip(muon[kind], adamw[kind], strict=True):
        assert len(set(ours)) == 1
        # What follows a metric follows the run.
        assert kind in _OF_METRICS or set(ours) == set(theirs)


def _two_rates(rank: int, world: int, directory: str) -> list[list[float]]:
    args = arguments(
        directory, max_steps=STEPS, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-3}
    )
    trainer = make_trainer(tiny_llama(num_hidden_layers=1), args, muon_lr=2e-2)
    trainer.train()
    return [[group["initial_lr"], group["lr"]] for group in trainer.optimizer.param_groups]


def test_min_lr_keeps_the_ratio_of_the_rates(tmp_path: Path) -> None:
    groups = run_ranks(_two_rates, 1, str(tmp_path), init=False)[0]
    assert {initial for initial, _ in groups} == {2e-2, 5e-3}
    for initial, last in groups:
        assert last == pytest.approx(initial * 1e-3 / 2e-2)
