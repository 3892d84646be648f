"""The numbers of an update: scale, zero, conditioning, learning-rate rule, many shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dmuon_hf.core as dmuon


def _stepped(weight: torch.Tensor, gradient: torch.Tensor, **options: object) -> torch.Tensor:
    """What one step of Muon moves a weight by."""
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    dmuon.dedicate_params(model, None, lambda name, param: True)
    optimizer = dmuon.Muon(model, **{"lr": 1.0, "weight_decay": 0.0, **options})  # type: ignore[arg-type]
    model[0].weight.grad = gradient.clone()
    optimizer.step()
    return weight - model[0].weight.detach()


# -- scale -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [1e-20, 1e-10, 1e5, 1e15])
def test_update_does_not_depend_on_the_size_of_the_gradient(norm: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.zeros(24, 16), torch.randn(24, 16, generator=generator)
    gradient /= gradient.norm()
    torch.testing.assert_close(_stepped(weight, gradient * norm), _stepped(weight, gradient), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_entries_that_overflow_half_precision_are_normalised_before_the_cast(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(16, 24, generator=generator)
    small = dmuon.newton_schulz(gradient, dtype=dtype)
    large = dmuon.newton_schulz(gradient * 2.0**20, dtype=dtype)
    assert large.isfinite().all()
    torch.testing.assert_close(large, small)


def test_zero_gradient_beside_others_moves_nothing_and_makes_no_nan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    dmuon.dedicate_params(model, None, lambda name, param: True)
    optimizer = dmuon.Muon(model, lr=0.1, weight_decay=0.0)
    idle, busy = model[0].weight, model[1].weight
    before = idle.detach().clone()
    idle.grad, busy.grad = torch.zeros(8, 8), torch.randn(8, 8)
    moved = busy.detach().clone()
    optimizer.step()
    assert torch.equal(idle.detach(), before)
    assert busy.isfinite().all() and not torch.equal(busy.detach(), moved)


# -- learning-rate rule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "factor"),
    [("none", 1.0), ("original", (48 / 12) ** 0.5), ("match_rms_adamw", 0.2 * 48**0.5), ("spectral", (48 / 12) ** 0.5)],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_scale_is_taken_once_from_the_logical_shape(rule: str, factor: float, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(48, 12, generator=generator)
    stored = gradient.mT.contiguous() if transposed else gradient
    model = nn.Sequential(nn.Linear(stored.shape[1], stored.shape[0], bias=False))
    dmuon.dedicate_params(
        model, None, lambda name, param: True, matrix_spec_fn=lambda n, p: dmuon.MatrixSpec(transposed=transposed)
    )
    optimizer = dmuon.Muon(model, lr=1.0, weight_decay=0.0, lr_scale=rule)  # type: ignore[arg-type]
    before = model[0].weight.detach().clone()
    model[0].weight.grad = stored
    optimizer.step()
    singular = torch.linalg.svdvals(before - model[0].weight.detach()) / factor
    assert singular.min() > 0.7 and singular.max() < 1.3


# -- many shapes -------------------------------------------------------------------------------------------------------


def test_more_shapes_than_the_recompile_limit_step_without_compiling() -> None:
    limit = torch._dynamo.config.recompile_limit
    shapes = [(4 + i, 6 + (i * 7) % 11) for i in range(2 * limit)]
    model = nn.Sequential(*(nn.Linear(columns, rows, bias=False) for rows, columns in shapes))
    dmuon.dedicate_params(model, None, lambda name, param: True)
    optimizer = dmuon.Muon(model, lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for layer in model:
        layer.weight.grad = torch.randn(layer.weight.shape, generator=generator)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        optimizer.step()
    assert optimizer.ns_matrices == len(shapes)
    assert not torch._dynamo.utils.counters["frames"]
