"""`Muon` under `torch.amp.GradScaler`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.unit.muon_fakes import Setup, build, weights


def scaled_backward(setup: Setup, scaler: torch.amp.GradScaler, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 12, generator=generator), torch.randn(8, 3, generator=generator)
    loss = (setup.model(x) - y).square().mean()
    scaler.scale(loss).backward()


def scaler_of(init_scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)


def grad_of(module: nn.Module, name: str) -> Tensor:
    grad = module.get_parameter(name).grad
    assert grad is not None
    return grad


@pytest.mark.parametrize("unscale_first", [False, True])
def test_scaled_steps_equal_unscaled_ones(monkeypatch: pytest.MonkeyPatch, unscale_first: bool) -> None:
    plain, scaled = build(monkeypatch), build(monkeypatch)
    scaler, off = scaler_of(), torch.amp.GradScaler("cpu", enabled=False)
    for seed in range(4):
        plain.optimizer.zero_grad()
        scaled_backward(plain, off, seed)
        plain.optimizer.step()
        scaled.optimizer.zero_grad()
        scaled_backward(scaled, scaler, seed)
        if unscale_first:
            scaler.unscale_(scaled.optimizer)
        scaler.step(scaled.optimizer)
        scaler.update()
    for name, weight in weights(plain.model).items():
        torch.testing.assert_close(scaled.model.get_parameter(name), weight, rtol=1e-5, atol=1e-6, msg=name)
    assert scaled.optimizer.skipped_steps == 0


@pytest.mark.parametrize("unscale_first", [False, True])
def test_overflow_skips_the_step_and_lowers_the_scale(monkeypatch: pytest.MonkeyPatch, unscale_first: bool) -> None:
    setup, scaler = build(monkeypatch), scaler_of()
    before = weights(setup.model)
    scaled_backward(setup, scaler, 0)
    grad_of(setup.model, "b_proj.weight")[0, 0] = float("inf")
    if unscale_first:
        scaler.unscale_(setup.optimizer)
    scaler.step(setup.optimizer)
    scaler.update()
    assert setup.optimizer.skipped_steps == 1
    assert scaler.get_scale() == 512.0
    for name, weight in before.items():
        assert torch.equal(weight, setup.model.get_parameter(name))
    setup.optimizer.zero_grad()
    scaled_backward(setup, scaler, 0)
    scaler.step(setup.optimizer)
    scaler.update()
    assert not torch.equal(before["b_proj.weight"], setup.model.b_proj.weight)


def test_gradients_are_left_unscaled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, scaler = build(monkeypatch), scaler_of()
    scaled_backward(setup, scaler, 0)
    expected = grad_of(setup.model, "a_proj.weight") / 1024.0
    scaler.step(setup.optimizer)
    torch.testing.assert_close(grad_of(setup.model, "a_proj.weight"), expected)


def test_overflow_found_on_another_rank_skips_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, scaler = build(monkeypatch), scaler_of()
    before = weights(setup.model)
    scaled_backward(setup, scaler, 0)

    def overflowed(values: Tensor) -> Tensor:
        values[0] = 1.0
        return values

    setup.runtime.others = overflowed
    scaler.step(setup.optimizer)
    assert setup.optimizer.skipped_steps == 1
    assert torch.equal(before["a_proj.weight"], setup.model.a_proj.weight)


def test_found_inf_of_the_scaler_reaches_the_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, seen = build(monkeypatch), []
    scaled_backward(setup, torch.amp.GradScaler("cpu", enabled=False), 0)

    def record(values: Tensor) -> Tensor:
        seen.append(values[0].item())
        return values

    setup.runtime.others = record
    setup.optimizer.grad_scale, setup.optimizer.found_inf = None, torch.tensor(3.0)
    setup.optimizer.step()
    assert seen == [1.0]
    assert setup.optimizer.skipped_steps == 1
