"""The studies behind docs/results.md, at toy size: they resume, report what is missing, and measure what they say."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "results"))

import command
import engine
import experts
import finetune
import from_scratch
import plots
import tables
import wall_time
from study import Column, Outcome, Run, Study
from training import Loop

LOOP = Loop(steps=2, warmup=1, sequences=2, tokens=16, bf16=False, measure_every=1)
TOYS = {
    "from_scratch": replace(
        from_scratch.study(False),
        budget=from_scratch.Budget(LOOP, hidden_size=16, layers=1, train_blocks=8, held_out_blocks=2),
        rates={"AdamW": (1e-3, 2e-3), "Muon": (1e-3,)},
    ),
    "experts": replace(
        experts.study(False),
        budget=from_scratch.Budget(LOOP, hidden_size=16, layers=1, experts=4, train_blocks=8, held_out_blocks=2),
        rates=dict.fromkeys(experts.METHODS, (1e-3,)),
    ),
    "finetune": replace(
        finetune.study(False),
        budget=finetune.Budget(LOOP, model="tiny", train_blocks=8, held_out_blocks=2, prose_blocks=2),
        rates=dict.fromkeys(finetune.METHODS, (1e-3,)),
        seeds=(0, 1),
    ),
}


@dataclass(frozen=True)
class NoBudget:
    size: int = 1


def score_of(budget: NoBudget, run: Run) -> dict[str, Any]:
    return {"loss": abs(run.rate - 2.0) + run.seed}


def study_of(**changes: Any) -> Study:
    nothing = Study(
        name="toy",
        budget=NoBudget(),
        rates={"one": (1.0, 2.0, 3.0), "other": (1.0, 4.0)},
        seeds=(0, 1),
        train=score_of,
        score="loss",
        said="none",
        columns=[Column("loss", "loss")],
        draw=lambda study, outcomes, figure: None,
    )
    return replace(nothing, **changes)


def test_best_rates_alone_get_all_seeds(tmp_path: Path) -> None:
    outcomes = engine.execute(study_of(), tmp_path, jobs=1)
    assert [outcome.run for outcome in outcomes[5:]] == [Run("one", 2.0, 1), Run("other", 1.0, 1)]
    assert len(engine.execute(study_of(whole_grid=True), tmp_path, jobs=1)) == 10


def test_interrupted_study_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    trained: list[Run] = []

    def interrupted(budget: NoBudget, run: Run) -> dict[str, Any]:
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(run)
        return score_of(budget, run)

    with pytest.raises(KeyboardInterrupt):
        engine.execute(study_of(train=interrupted), tmp_path, jobs=1)
    file = tmp_path / "toy.jsonl"
    with file.open("a") as lines:
        lines.write('{"study": "toy", "run": {"met')
    first = list(trained)
    trained.append(Run("passed over", 0.0, 0))
    outcomes = engine.execute(study_of(train=interrupted), tmp_path, jobs=1)
    assert len(first) == 3 and set(first).isdisjoint(trained[4:])
    assert {outcome.run for outcome in outcomes} == {outcome.run for outcome in engine.finished(study_of(), tmp_path)}
    assert len(outcomes) == 7
    records = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    assert all(record["budget"] == {"size": 1} and record["machine"]["torch"] for record in records)


def test_runs_of_another_budget_do_not_count(tmp_path: Path) -> None:
    engine.execute(study_of(), tmp_path, jobs=1)
    assert engine.finished(study_of(budget=NoBudget(2)), tmp_path) == []


def test_table_says_what_was_not_run(tmp_path: Path) -> None:
    outcomes = engine.execute(study_of(), tmp_path, jobs=1, methods=["one"])
    text = tables.markdown(study_of(), outcomes, "python toy.py", "toy.svg")
    assert "| other | not run | not run | 0 |" in text
    assert "| one | 2 | 0.500 ± 0.707 | 2 |" in text
    assert "Not finished: at least 2 runs." in text


def test_documentation_gets_table_and_runs_from_which_the_study_goes_on(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("a\n<!-- toy -->\nold\n<!-- end of toy -->\nb\n")
    outcomes = engine.execute(study_of(), tmp_path / "runs", jobs=1)
    command.write(study_of(), outcomes, "python toy.py", tmp_path / "tables", docs=tmp_path)
    text = page.read_text()
    assert "old" not in text and text.startswith("a\n") and text.endswith("<!-- end of toy -->\nb\n")
    assert "| one | 2 | 0.500 ± 0.707 | 2 |" in text and "(results/toy.svg)" in text
    assert engine.finished(study_of(), tmp_path / "results") == outcomes


@pytest.mark.parametrize("name", TOYS)
def test_study_trains_and_is_drawn(name: str, tmp_path: Path) -> None:
    study = TOYS[name]
    outcomes = engine.execute(study, tmp_path, jobs=1)
    assert study.pending(outcomes) == []
    assert "All runs are finished." in tables.markdown(study, outcomes, "python it.py", "it.svg")
    plots.save(study, outcomes, tmp_path / "plot.svg")
    assert "</svg>" in (tmp_path / "plot.svg").read_text()


def test_drift_and_losses_are_those_of_the_trained_weights() -> None:
    budget = TOYS["finetune"].budget
    still = finetune.train_run(budget, Run("LoRA, AdamW", 0.0, 0))
    assert still["drift"] == 0.0 and still["forgotten"] == 0.0 and still["held_out"] == still["base_held_out"]
    moved = finetune.train_run(budget, Run("AdamW", 1e-3, 0))
    assert 1e-3 < moved["drift"] < 1.0 and moved["held_out"] != moved["base_held_out"]


def test_steps_to_a_loss_are_those_of_its_first_measurement() -> None:
    def outcome(method: str, seed: int, curve: list[float]) -> Outcome:
        result = {"held_out": curve[-1], "curve": curve, "measured_at": [10, 20, 30], "cpu_curve": [1.0, 2.0, 3.0]}
        return Outcome(Run(method, 1.0, seed), result, {})

    study = study_of(rates={"AdamW": (1.0,), "Muon": (1.0,)}, score="held_out")
    curves = [("AdamW", 0, [4.0, 3.0, 2.0]), ("AdamW", 1, [4.0, 3.0, 2.5]), ("Muon", 0, [3.0, 2.4, 2.0])]
    found = from_scratch.reach(study, [outcome(*curve) for curve in [*curves, ("Muon", 1, [5.0, 4.0, 3.0])]])
    assert [(o.result["steps_to"], o.result["cpu_to"]) for o in found] == [
        (30, 3.0),
        (30, 3.0),
        (20, 2.0),
        (None, None),
    ]


def test_both_contenders_of_a_mode_are_timed_on_every_rank() -> None:
    budget = wall_time.Budget(demo=False, steps=2, turn=1, batch=(1, 8), warmup=1, ranks=2)
    spent = run_ranks(wall_time.race, budget.ranks, budget, wall_time.METHODS["FSDP2, Z3"])
    assert [set(rank) for rank in spent] == [{"adamw-z3", "dmuon-z3"}] * 2
    assert all(times["seconds"] > 0 and times["cpu"] > 0 for rank in spent for times in rank.values())


def test_wall_times_are_drawn_mode_by_mode(tmp_path: Path) -> None:
    study = wall_time.study(False)
    times = dict.fromkeys([column.key for column in study.columns], 2.0)
    outcomes = [Outcome(Run(name, 1e-3, seed), times, {}) for name in study.rates for seed in study.seeds]
    plots.save(study, outcomes, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(name in drawn for name in study.rates)


def test_pairs_are_the_same_sharding() -> None:
    from contenders import ALL_MODES

    assert {ALL_MODES[ours].rival for _, ours in wall_time.METHODS.values()} == {
        r for r, _ in wall_time.METHODS.values()
    }
    assert all(ALL_MODES[ours].rival == rival for rival, ours in wall_time.METHODS.values())
    assert torch.bfloat16 in {ALL_MODES[ours].dtype for _, ours in wall_time.METHODS.values()}
