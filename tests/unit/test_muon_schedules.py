"""Every schedule of ``torch.optim.lr_scheduler`` on `Muon` gives the rates that it gives on AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

import dmuon_hf.core as dmuon
from tests.harness.models import TinyMLP, tiny_mlp

LR, ADAMW_LR = 1e-3, 2.5e-4
STEPS = 24

Make = Callable[[Optimizer], Any]

SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 5, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 11], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 7),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 20)], [4]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, 1e-5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2, min_lr=1e-5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, [1e-3, 5e-4], 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2, 1e-5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [1e-2, 5e-3], total_steps=STEPS),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0),
    "SWALR": lambda o: SWALR(o, 1e-4, 8),
}


def build(lr: float | Tensor = LR, adamw_lr: float | Tensor = ADAMW_LR) -> tuple[TinyMLP, dmuon.Muon]:
    model = tiny_mlp()
    dmuon.dedicate_params(model, None, lambda name, param: "proj" in name)
    return model, dmuon.Muon(model, lr=lr, adamw_lr=adamw_lr)


def plain() -> AdamW:
    """AdamW with the rates of `build`, one group each."""
    params = [nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]
    return AdamW([{"params": params[:1]}, {"params": params[1:], "lr": ADAMW_LR}], lr=LR)


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def advance(optimizer: Optimizer, schedule: Any, step: int) -> list[float]:
    optimizer.step()
    schedule.step(*([1.0 if step < 4 else 2.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
    return rates(optimizer)


def schedules_of_torch() -> set[str]:
    return {name for name in lr_scheduler.__all__ if name != "LRScheduler"} | {"SWALR"}


def test_table_names_every_schedule_of_torch() -> None:
    assert SCHEDULES.keys() == schedules_of_torch()


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_gives_the_rates_of_adamw_also_after_a_resume(name: str) -> None:
    make = SCHEDULES[name]
    optimizer, reference = build()[1], plain()
    schedule, of_reference = make(optimizer), make(reference)
    seen = [rates(optimizer)]
    assert seen[0] == rates(reference)
    for step in range(STEPS - 1):
        if step == STEPS // 2:
            state, of_schedule = optimizer.state_dict(), schedule.state_dict()
            optimizer = build(lr=0.7, adamw_lr=0.3)[1]
            schedule = make(optimizer)
            optimizer.load_state_dict(state)
            schedule.load_state_dict(of_schedule)
        seen.append(advance(optimizer, schedule, step))
        assert seen[-1] == pytest.approx(advance(reference, of_reference, step), rel=1e-12), step
    assert len({tuple(each) for each in seen}) > 1
    assert [{*group} & {"momentum", "betas"} for group in optimizer.state_dict()["param_groups"]] == [
        {"momentum"},
        {"betas"},
    ]


@pytest.mark.parametrize("name", ["LambdaLR", "ExponentialLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_rates_that_are_tensors_are_written_in_place(name: str) -> None:
    held = torch.tensor(LR, dtype=torch.float64), torch.tensor(ADAMW_LR, dtype=torch.float64)
    optimizer, reference = build(*held)[1], plain()
    schedule, of_reference = SCHEDULES[name](optimizer), SCHEDULES[name](reference)
    for step in range(STEPS - 1):
        assert advance(optimizer, schedule, step) == pytest.approx(advance(reference, of_reference, step), rel=1e-6)
    assert [group["lr"] for group in optimizer.param_groups] == list(held)
    assert optimizer.defaults["lr"] == LR


def cycled(make: Make, optimizer: Optimizer, model: nn.Module) -> list[float]:
    """Train on fixed gradients; the first-moment coefficient of the step of each group that holds `head.weight`."""
    schedule, seen = make(optimizer), []
    for step in range(STEPS - 1):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        seen.append(float(optimizer.param_groups[-1]["betas"][0]))
        schedule.step()
    return seen


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_cycled_momentum_reaches_both_routes(name: str) -> None:
    model, optimizer = build()
    twin = tiny_mlp()
    apart = [
        [param for name, param in twin.named_parameters() if ("proj" in name) == matrix] for matrix in (True, False)
    ]
    reference = AdamW(
        [{"params": apart[0]}, {"params": apart[1], "lr": ADAMW_LR, "weight_decay": 0.01}], lr=LR, weight_decay=0.0
    )
    momenta: list[float] = []
    optimizer.register_step_post_hook(lambda o, *_: momenta.append(o.param_groups[0]["momentum"]))
    betas = cycled(SCHEDULES[name], reference, twin)
    assert cycled(SCHEDULES[name], optimizer, model) == pytest.approx(betas)
    assert momenta == pytest.approx(betas)
    assert len(set(betas)) > 3
    for key, param in twin.named_parameters():
        if "proj" not in key:
            torch.testing.assert_close(model.get_parameter(key), param, rtol=1e-5, atol=1e-7)


def test_a_cycle_that_was_built_before_a_load_does_not_replace_the_loaded_betas() -> None:
    saved = build()[1]
    saved.param_groups[1]["betas"] = (0.7, 0.9)
    state = saved.state_dict()
    optimizer = build()[1]
    SCHEDULES["OneCycleLR"](optimizer)
    optimizer.load_state_dict(state)
    optimizer.step()
    assert optimizer.param_groups[1]["betas"] == (0.7, 0.9)


def test_defaults_are_numbers_of_the_muon_route() -> None:
    optimizer = build(lr=torch.tensor(0.5))[1]
    assert optimizer.defaults == {"lr": 0.5, "momentum": 0.95, "weight_decay": 0.0}
    assert [{*group} & {"momentum", "betas"} for group in optimizer.param_groups] == [{"momentum"}, {"betas"}]


def test_step_hooks_and_the_profiler_see_the_step() -> None:
    model, optimizer = build()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    model(torch.ones(4, 16)).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert calls == ["before", "after"]
    ranges = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#Muon.step", "Optimizer.zero_grad#Muon.zero_grad"} <= ranges
    assert "default/muon" in repr(optimizer)
