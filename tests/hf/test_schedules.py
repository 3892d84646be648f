"""Every schedule of transformers on `Muon` gives the rates that it gives on AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from transformers import SchedulerType, get_scheduler

import dmuon_hf.core as dmuon
from tests.harness.models import tiny_mlp

LR, ADAMW_LR = 1e-3, 2.5e-4
STEPS = 20
ARGUMENTS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": 1e-5},
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4, "warmup_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 6, "min_lr_ratio": 0.1},
    "reduce_lr_on_plateau": {"patience": 2, "min_lr": 1e-5},
    "greedy": {"patience": 2, "min_lr": 1e-5},
}
BY_LOSS = ("reduce_lr_on_plateau", "greedy")
ONE_FACTOR = [name.value for name in SchedulerType if name.value not in BY_LOSS]


def build(lr: float = LR, adamw_lr: float = ADAMW_LR) -> dmuon.Muon:
    model = tiny_mlp()
    dmuon.dedicate_params(model, None, lambda name, param: "proj" in name)
    return dmuon.Muon(model, lr=lr, adamw_lr=adamw_lr)


def make(name: str, optimizer: Optimizer) -> Any:
    return get_scheduler(name, optimizer, 4, STEPS, scheduler_specific_kwargs=ARGUMENTS.get(name))


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def advance(name: str, optimizer: Optimizer, schedule: Any, step: int) -> list[float]:
    optimizer.step()
    schedule.step(*([1.0 if step < 4 else 2.0] if name in BY_LOSS else []))
    return rates(optimizer)


@pytest.mark.parametrize("name", [name.value for name in SchedulerType])
def test_schedule_gives_the_rates_of_adamw_also_after_a_resume(name: str) -> None:
    params = [nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]
    reference = AdamW([{"params": params[:1]}, {"params": params[1:], "lr": ADAMW_LR}], lr=LR)
    optimizer = build()
    schedule, of_reference = make(name, optimizer), make(name, reference)
    seen = [rates(optimizer)]
    for step in range(STEPS - 1):
        if step == STEPS // 2:
            # The defaults of the resumed run are those of its constructor, as for any optimizer.
            state, of_schedule = optimizer.state_dict(), schedule.state_dict()
            optimizer = build()
            schedule = make(name, optimizer)
            optimizer.load_state_dict(state)
            schedule.load_state_dict(of_schedule)
        seen.append(advance(name, optimizer, schedule, step))
        assert seen[-1] == pytest.approx(advance(name, reference, of_reference, step), rel=1e-12), step
    assert len({tuple(each) for each in seen}) > 1 or name == "constant"


@pytest.mark.parametrize("name", ONE_FACTOR)
def test_schedule_of_one_factor_keeps_the_ratio_of_the_rates(name: str) -> None:
    optimizer = build()
    schedule = make(name, optimizer)
    for step in range(STEPS):
        muon, adamw = advance(name, optimizer, schedule, step)
        assert adamw == pytest.approx(muon * ADAMW_LR / LR, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial"])
def test_absolute_bound_is_that_of_the_muon_rate(name: str) -> None:
    optimizer = build()
    schedule = make(name, optimizer)
    lowest = min(advance(name, optimizer, schedule, step) for step in range(STEPS + 5))
    bound = 1e-5 if name == "polynomial" else 1e-4
    assert lowest == pytest.approx([bound, bound * ADAMW_LR / LR], rel=1e-2)
