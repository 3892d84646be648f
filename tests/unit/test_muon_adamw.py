"""The AdamW route against ``torch.optim.AdamW``, fused and not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmuon_hf.core.optim import adamw
from dmuon_hf.core.optim.adamw import apply_adamw
from dmuon_hf.core.optim.gradients import check_and_unscale_

RULE = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CPU = torch.device("cpu")


def tensors(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(33, 7), (5,), (1,), (0, 4), (64, 16)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def trained(params: list[Tensor], grads: list[Tensor], steps: int = 4) -> list[Tensor]:
    states = [
        {"step": torch.tensor(0.0), "exp_avg": p.clone().zero_(), "exp_avg_sq": p.clone().zero_()} for p in params
    ]
    for step in range(steps):
        apply_adamw(params, [grad * (step + 1) for grad in grads], states, RULE)
    assert [float(state["step"]) for state in states] == [steps] * len(params)
    return [*params, *(state[key] for state in states for key in ("exp_avg", "exp_avg_sq"))]


def of_torch(params: list[Tensor], grads: list[Tensor], *, fused: bool, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.AdamW(params, **RULE, fused=fused or None)  # type: ignore[arg-type]
    for step in range(steps):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad * (step + 1)
        optimizer.step()
    return [*params, *(optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq"))]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> bool:
    """Whether the CPU plays an accelerator with a fused kernel."""
    if request.param:
        monkeypatch.setattr(adamw, "_takes_fused", lambda row: all(map(adamw._is_dense, row)))
    return bool(request.param)


both = pytest.mark.parametrize("fused", [True, False], indirect=True, ids=["fused", "unfused"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@both
def test_update_and_state_are_those_of_adamw(dtype: torch.dtype, fused: bool) -> None:
    grads = [tensor.flip(0) for tensor in tensors(dtype)]
    found, expected = trained(tensors(dtype), grads), of_torch(tensors(dtype), grads, fused=fused)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("fused", [True], indirect=True)
def test_fused_update_differs_from_the_other_by_rounding(fused: bool) -> None:
    grads = [tensor.flip(0) for tensor in tensors(torch.float32)]
    expected = of_torch(tensors(torch.float32), grads, fused=False)
    for left, right in zip(trained(tensors(torch.float32), grads), expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("transposed", ["param", "grad"])
@both
def test_tensors_that_lie_differently_in_memory_are_updated_right(transposed: str, fused: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    param, grad = (torch.randn(6, 10, generator=generator) for _ in range(2))
    expected = of_torch([param.clone()], [grad], fused=False)
    if transposed == "param":
        param = param.T.contiguous().T
    else:
        grad = grad.T.contiguous().T
    for left, right in zip(trained([param], [grad]), expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


def test_update_of_a_shard_is_the_shard_of_the_update() -> None:
    whole, grad = torch.randn(997), torch.randn(997)
    updated = trained([whole.clone()], [grad])[0]
    assert not adamw._takes_fused([whole] * 4)
    for start, stop in ((0, 7), (3, 500), (990, 997)):
        part = trained([whole[start:stop].clone()], [grad[start:stop].clone()])[0]
        assert torch.equal(part, updated[start:stop])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan, "largest"])
def test_check_finds_every_infinity_and_writes_nothing(dtype: torch.dtype, bad: float | str | None) -> None:
    grads = [torch.full((2, 3), -8.0, dtype=dtype), torch.ones(7, dtype=dtype), torch.empty(0, 3, dtype=dtype)]
    if bad is not None:
        grads[1][4] = torch.finfo(dtype).max if bad == "largest" else bad
        grads[0][0, 0] = -torch.finfo(dtype).max
    versions = [grad._version for grad in grads]
    assert bool(check_and_unscale_(grads, None, CPU) > 0) is (bad not in (None, "largest"))
    assert [grad._version for grad in grads] == versions
