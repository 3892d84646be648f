"""Clipping of dedicated gradients by their global norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dmuon_hf.core.clip import (
    MuonGradClipRequest,
    MuonGradClipStats,
    clip_grad_norm_,
    register_muon_grad_clip_strategy,
)
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim import clip_global
from tests.unit.muon_fakes import MATRICES, Setup, backward, build


def gradients(setup: Setup) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in setup.model.named_parameters() if p.grad is not None}


def prepared(monkeypatch: pytest.MonkeyPatch) -> tuple[Setup, dict[str, Tensor], Tensor]:
    """A model with gradients, copies of them, and those of the dedicated matrices as one vector."""
    setup = build(monkeypatch)
    backward(setup.model, 0)
    grads = gradients(setup)
    return setup, grads, torch.cat([grads[name].flatten() for name in MATRICES]).double()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_dedicated_gradients_are_scaled_to_the_bound_and_others_left(
    monkeypatch: pytest.MonkeyPatch, norm_type: float, foreach: bool | None
) -> None:
    setup, before, flat = prepared(monkeypatch)
    norm = flat.norm(norm_type).item()
    stats = clip_grad_norm_(setup.optimizer, norm / 4, norm_type=norm_type, foreach=foreach)
    assert stats.total_norm == pytest.approx(norm, rel=1e-5)
    assert stats.clip_coef == pytest.approx(0.25, rel=1e-4)
    assert stats == MuonGradClipStats(stats.total_norm, norm / 4, norm_type, stats.clip_coef, True, 4, False)
    for name, grad in gradients(setup).items():
        expected = before[name] * stats.clip_coef if name in MATRICES else before[name]
        torch.testing.assert_close(grad, expected, msg=name)


def test_norm_below_the_bound_leaves_gradients_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, before, flat = prepared(monkeypatch)
    stats = clip_grad_norm_(setup.optimizer, flat.norm().item() * 2)
    assert (stats.clipped, stats.clip_coef) == (False, 1.0)
    assert all(torch.equal(grad, before[name]) for name, grad in gradients(setup).items())


def test_no_bound_only_takes_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, before, flat = prepared(monkeypatch)
    stats = clip_grad_norm_(setup.optimizer, None)
    assert stats.total_norm == pytest.approx(flat.norm().item(), rel=1e-5)
    assert (stats.max_norm, stats.clipped) == (None, False)
    assert all(torch.equal(grad, before[name]) for name, grad in gradients(setup).items())


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nonfinite_norm_leaves_gradients_for_the_step_to_refuse(
    monkeypatch: pytest.MonkeyPatch, norm_type: float, bad: float
) -> None:
    setup, _, _ = prepared(monkeypatch)
    assert setup.model.b_proj.weight.grad is not None
    setup.model.b_proj.weight.grad[0, 0] = bad
    before = gradients(setup)
    stats = clip_grad_norm_(setup.optimizer, 0.1, norm_type=norm_type)
    assert (stats.found_inf, stats.clipped, stats.clip_coef) == (True, False, 1.0)
    for name, grad in gradients(setup).items():
        torch.testing.assert_close(grad, before[name], rtol=0, atol=0, equal_nan=True)
    setup.optimizer.step()
    assert setup.optimizer.skipped_steps == 1


def test_nonfinite_norm_raises_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, _, _ = prepared(monkeypatch)
    assert setup.model.b_proj.weight.grad is not None
    setup.model.b_proj.weight.grad[0, 0] = math.nan
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 of the dedicated gradients is nan"):
        clip_grad_norm_(setup.optimizer, 0.1, error_if_nonfinite=True)


def test_method_and_function_agree_and_the_optimizer_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    left, _, _ = prepared(monkeypatch)
    right, _, _ = prepared(monkeypatch)
    assert left.optimizer.last_muon_grad_clip_stats is None
    by_method = left.optimizer.clip_grad_norm_(0.1, norm_type=3.0)
    assert by_method == clip_grad_norm_(right.optimizer, 0.1, norm_type=3.0)
    assert left.optimizer.last_muon_grad_clip_stats is by_method
    assert "prepare" in left.runtime.calls


def test_wrapper_that_holds_a_muon_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, _, flat = prepared(monkeypatch)

    class Wrapper:
        optimizer = setup.optimizer

    assert clip_grad_norm_(Wrapper(), None).total_norm == pytest.approx(flat.norm().item(), rel=1e-5)


def test_other_optimizer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected a Muon optimizer or a wrapper of one, got SGD"):
        clip_grad_norm_(torch.optim.SGD([torch.zeros(1)], lr=0.1), 1.0)


def test_half_precision_gradients_do_not_overflow_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch, dtype=torch.float16)
    for matrix in setup.runtime.dedicated.values():
        matrix.param.grad = torch.full_like(matrix.param, 6e4)
    count = sum(matrix.param.numel() for matrix in setup.runtime.dedicated.values())
    total = clip_grad_norm_(setup.optimizer, None).total_norm
    assert total == pytest.approx(6e4 * count**0.5, rel=1e-3)


def test_matrices_without_gradient_count_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, before, _ = prepared(monkeypatch)
    setup.model.b_proj.weight.grad = None
    rest = torch.cat([before[name].flatten() for name in MATRICES if name != "b_proj.weight"])
    stats = clip_grad_norm_(setup.optimizer, None)
    assert stats.param_count == 3
    assert stats.total_norm == pytest.approx(rest.norm().item(), rel=1e-5)


def test_no_gradient_anywhere_gives_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    for norm_type in (2.0, math.inf):
        stats = clip_grad_norm_(setup.optimizer, 1.0, norm_type=norm_type)
        assert (stats.total_norm, stats.param_count, stats.clipped) == (0.0, 0, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_norm": -1.0}, "max_norm must be at least 0"),
        ({"max_norm": math.nan}, "max_norm must be at least 0"),
        ({"max_norm": 1.0, "norm_type": 0.0}, "norm_type must be above 0"),
        (
            {"max_norm": 1.0, "strategy": "global"},
            r"unknown gradient clip strategy 'global', registered are \['global_norm'",
        ),
    ],
)
def test_bad_argument_is_refused(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        clip_grad_norm_(build(monkeypatch).optimizer, **arguments)  # type: ignore[arg-type]


def test_registered_strategy_sees_live_gradients_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_global, "_STRATEGIES", dict(clip_global._STRATEGIES))
    setup, before, _ = prepared(monkeypatch)

    def halve_b(request: MuonGradClipRequest) -> MuonGradClipStats:
        request.gradients["b_proj.weight"].mul_(0.5)
        total = request.reduce_sum(torch.tensor([7.0])).item()
        return MuonGradClipStats(total, request.max_norm, request.norm_type, 0.5, True, 1, False, strategy="halve_b")

    register_muon_grad_clip_strategy("halve_b", halve_b)
    by_name = clip_grad_norm_(setup.optimizer, 3.0, strategy="halve_b")
    assert (by_name.total_norm, by_name.max_norm, by_name.strategy) == (7.0, 3.0, "halve_b")
    setup.optimizer.clip_grad_norm_(3.0, strategy=halve_b)
    after = gradients(setup)
    torch.testing.assert_close(after["b_proj.weight"], before["b_proj.weight"] * 0.25)
    assert torch.equal(after["a_proj.weight"], before["a_proj.weight"])
    with pytest.raises(ConfigurationError, match="'halve_b' exists already"):
        register_muon_grad_clip_strategy("halve_b", halve_b)
