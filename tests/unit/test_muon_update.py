"""The Muon update against an independent float64 computation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dmuon_hf.core.ns import NewtonSchulz
from dmuon_hf.core.optim.update import MuonRule, OwnedMatrix, apply_muon
from dmuon_hf.core.plan import MatrixSpec
from tests.harness.reference import newton_schulz_reference


def rule(**changes: object) -> MuonRule:
    values = {
        "lr": 0.02,
        "momentum": 0.9,
        "nesterov": True,
        "ns_steps": 5,
        "weight_decay": 0.1,
        "lr_scale": "match_rms_adamw",
    }
    return MuonRule(**{**values, **changes})  # type: ignore[arg-type]


def matrix(
    shape: tuple[int, int], seed: int, spec: MatrixSpec | None = None, dtype: torch.dtype = torch.float32
) -> OwnedMatrix:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(shape, generator=generator) for _ in range(3)]
    momentum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return OwnedMatrix(
        name=f"m{seed}",
        weight=draw[0].to(dtype),
        grad=draw[1].to(dtype),
        momentum=draw[2].to(momentum_dtype),
        spec=spec or MatrixSpec(),
    )


def expected(
    owned: OwnedMatrix, r: MuonRule, parts: list[list[int]] | None = None, *, transposed: bool = False
) -> Tensor:
    """The new weight in float64: `parts` are the rows of each logical matrix, `transposed` is stored `(in, out)`."""
    momentum = r.momentum * owned.momentum.double() + owned.grad.double()
    direction = owned.grad.double() + r.momentum * momentum if r.nesterov else momentum
    weight = owned.weight.double() * (1 - r.lr * r.weight_decay)
    if transposed:
        direction, weight = direction.T, weight.T
    for rows in parts or [list(range(direction.shape[0]))]:
        part = direction[rows]
        scale = 0.2 * math.sqrt(max(part.shape))
        weight[rows] = weight[rows] - r.lr * scale * newton_schulz_reference(part, r.ns_steps)
    return weight.T if transposed else weight


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (33, 64), (7, 32), (1, 9), (9, 1), (1, 1)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_whole_matrix_moves_as_the_formulas_say(shape: tuple[int, int], nesterov: bool) -> None:
    owned, r = matrix(shape, 1), rule(nesterov=nesterov)
    weight, momentum = expected(owned, r), 0.9 * owned.momentum.double() + owned.grad.double()
    assert apply_muon([owned], r, NewtonSchulz()) == 1
    torch.testing.assert_close(owned.weight.double(), weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(owned.momentum.double(), momentum, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (MatrixSpec(sections=(10, 4, 4)), [range(10), range(10, 14), range(14, 18)]),
        (MatrixSpec(sections=(9, 9)), [range(9), range(9, 18)]),
        (MatrixSpec(groups=3, sections=(4, 2)), [[0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15], [4, 5, 10, 11, 16, 17]]),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_matrix_is_orthogonalised_by_its_logical_matrices(
    spec: MatrixSpec, parts: list[list[int]], transposed: bool
) -> None:
    spec = MatrixSpec(groups=spec.groups, sections=spec.sections, transposed=transposed)
    owned = matrix((12, 18) if transposed else (18, 12), 2, spec)
    weight = expected(owned, rule(), [list(rows) for rows in parts], transposed=transposed)
    assert apply_muon([owned], rule(), NewtonSchulz()) == len(parts)
    torch.testing.assert_close(owned.weight.double(), weight, rtol=1e-5, atol=1e-5)


def test_small_section_of_a_fused_matrix_moves_as_far_as_the_large_one() -> None:
    owned = matrix((12, 6), 3, MatrixSpec(sections=(6, 6)))
    owned.grad[6:] *= 1e-4
    owned.momentum.zero_()
    before = owned.weight.clone()
    apply_muon([owned], rule(weight_decay=0.0), NewtonSchulz())
    moved = (owned.weight - before).norm(dim=1)
    assert 0.5 < moved[6:].norm() / moved[:6].norm() < 2.0


@pytest.mark.parametrize("max_batch_numel", [1, 300, 1 << 20])
def test_batched_matrices_equal_single_ones(max_batch_numel: int) -> None:
    shapes = [(16, 8), (8, 16), (16, 8), (16, 8), (4, 4), (8, 16)]
    together = [matrix(shape, seed) for seed, shape in enumerate(shapes)]
    alone = [matrix(shape, seed) for seed, shape in enumerate(shapes)]
    assert apply_muon(together, rule(), NewtonSchulz(), max_batch_numel=max_batch_numel) == len(shapes)
    for single in alone:
        apply_muon([single], rule(), NewtonSchulz())
    for left, right in zip(together, alone, strict=True):
        torch.testing.assert_close(left.weight, right.weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(left.momentum, right.momentum)


def test_same_shapes_share_one_newton_schulz_call_within_the_bound() -> None:
    shapes: list[tuple[int, ...]] = []

    def record(matrices: Tensor, *, steps: int | None = None) -> Tensor:
        shapes.append(tuple(matrices.shape))
        return matrices.clone()

    owned = [matrix((4, 8), seed) for seed in range(5)] + [matrix((8, 4), 9)]
    apply_muon(owned, rule(), record, max_batch_numel=3 * 32)
    assert shapes == [(3, 4, 8), (2, 4, 8), (1, 8, 4)]


def test_ns_steps_and_rule_reach_the_computation() -> None:
    steps_seen = []

    def record(matrices: Tensor, *, steps: int | None = None) -> Tensor:
        steps_seen.append(steps)
        return torch.ones_like(matrices)

    owned = matrix((4, 9), 0)
    before = owned.weight.clone()
    apply_muon([owned], rule(ns_steps=7, lr=0.5, weight_decay=0.0, lr_scale="none"), record)
    assert steps_seen == [7]
    torch.testing.assert_close(owned.weight, before - 0.5)


def test_zero_gradient_and_momentum_leave_the_weight_but_for_decay() -> None:
    owned = matrix((6, 5), 4)
    owned.grad.zero_()
    owned.momentum.zero_()
    before = owned.weight.clone()
    apply_muon([owned], rule(weight_decay=0.0), NewtonSchulz())
    assert torch.equal(owned.weight, before)
    apply_muon([owned], rule(weight_decay=0.5, lr=0.1), NewtonSchulz())
    torch.testing.assert_close(owned.weight, before * 0.95)


def test_gradient_is_left_as_it_was() -> None:
    for nesterov in (True, False):
        owned = matrix((6, 5), 5)
        before = owned.grad.clone()
        apply_muon([owned], rule(nesterov=nesterov), NewtonSchulz())
        assert torch.equal(owned.grad, before)


def test_bf16_master_is_updated_in_fp32_and_rounded_once() -> None:
    owned = matrix((16, 24), 6, dtype=torch.bfloat16)
    weight = expected(owned, rule())
    apply_muon([owned], rule(), NewtonSchulz())
    assert owned.momentum.dtype == torch.float32
    assert (
        torch.equal(owned.weight, weight.bfloat16())
        or ((owned.weight.double() - weight).abs() <= weight.abs() * 2**-8 + 1e-5).all()
    )


def test_bf16_gradient_enters_an_fp32_master_in_fp32() -> None:
    owned = matrix((16, 24), 7)
    low = OwnedMatrix(owned.name, owned.weight, owned.grad.bfloat16(), owned.momentum, owned.spec)
    weight = expected(low, rule())
    apply_muon([low], rule(), NewtonSchulz())
    torch.testing.assert_close(low.weight.double(), weight, rtol=1e-5, atol=1e-5)


def test_fp64_parameter_is_updated_in_fp64() -> None:
    owned = matrix((16, 24), 8, dtype=torch.float64)
    weight = expected(owned, rule())
    apply_muon([owned], rule(), NewtonSchulz())
    torch.testing.assert_close(owned.weight, weight, rtol=1e-8, atol=1e-8)
