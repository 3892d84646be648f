"""The CuTe DSL kernel, compiled for sm_80 and executed, against float64 on shapes that no tile divides."""

from __future__ import annotations

import pytest
import torch

from dmuon_hf.core.ns.backends.cute_config import TileConfig, Variant, common_width
from tests.kernels.cute_programs import (
    LARGE,
    SMALL,
    SMALLEST,
    compiled,
    interpret,
    needs_cutlass,
    operands_of,
    run_case,
)
from tests.kernels.reference import Case, make_case, syrk_reference

pytestmark = needs_cutlass

HALF, BFLOAT = torch.float16, torch.bfloat16
WIDE = Variant(HALF, SMALLEST)


@pytest.mark.parametrize(
    ("variant", "M", "K"),
    [
        pytest.param(Variant(HALF, LARGE), 136, 72, id="large tiles"),
        pytest.param(Variant(BFLOAT, SMALL), 72, 232, id="small tiles"),
        pytest.param(Variant(HALF, TileConfig(rows=32, depth=64, stages=2)), 72, 200, id="deep slices, two stages"),
        pytest.param(Variant(BFLOAT, SMALLEST, load_width=2, store_width=2), 50, 70, id="4-byte rows"),
        pytest.param(Variant(BFLOAT, SMALLEST, load_width=1, store_width=1), 45, 33, id="2-byte rows"),
        pytest.param(Variant(HALF, SMALLEST, load_width=8, store_width=1), 37, 104, id="odd M"),
    ],
)
def test_shape_that_tiles_do_not_divide_gives_float64_result(variant: Variant, M: int, K: int) -> None:
    report = run_case(make_case(M, K, variant.dtype), variant)
    assert report.clean, report


@pytest.mark.parametrize("K", [0, 8, 32, 96, 128, 320], ids="K={}".format)
def test_any_number_of_slices_around_the_ring_gives_float64_result(K: int) -> None:
    report = run_case(make_case(40, K, HALF), WIDE)
    assert report.clean, report


@pytest.mark.parametrize("M", [1, 8, 31, 32, 33], ids="M={}".format)
def test_rows_around_one_tile_give_float64_result(M: int) -> None:
    report = run_case(make_case(M, 40, HALF), Variant(HALF, SMALLEST, store_width=1))
    assert report.clean, report


def test_more_tile_rows_than_a_band_give_float64_result() -> None:
    report = run_case(make_case(304, 8, HALF), WIDE)
    assert report.clean, report


def test_product_of_commuting_matrices_is_symmetric_to_the_bit() -> None:
    report = run_case(make_case(72, 72, HALF, product=True), WIDE)
    assert report.clean, report


def test_batch_gives_the_result_of_each_matrix() -> None:
    report = run_case(make_case(40, 24, HALF, batch=3), WIDE)
    assert report.clean, report


def test_variant_without_C_reads_none() -> None:
    report = run_case(make_case(40, 24, HALF, has_C=False), Variant(HALF, SMALLEST, has_c=False))
    assert report.clean, report


def test_not_a_number_in_the_upper_triangle_of_C_is_not_used() -> None:
    case = make_case(40, 24, HALF)
    assert case.C is not None
    case.C.masked_fill_(torch.ones(40, 40, dtype=torch.bool).triu(1), float("nan"))
    assert run_case(case, WIDE).clean


def test_rows_with_gaps_are_read_and_written_by_their_strides() -> None:
    """What lies in the gaps belongs to no tensor, so that touching it is an error."""
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(2, 40, 64, generator=generator).to(HALF)[..., 8:48] for _ in range(2))
    A = A + A.mT
    B = (0.5 * A.float()).to(HALF)
    A, B = (torch.cat((x, x), dim=-1)[..., 40:] for x in (A, B))
    C = torch.randn(2, 48, 56, generator=generator).to(HALF)[:, 8:, 16:]
    out = torch.full((2, 40, 72), float("nan"), dtype=HALF)[..., 24:64]
    assert common_width(A, B) == common_width(C, out) == 8
    case = Case(A, B, C, 0.1, 2.0, -1.0, syrk_reference(A, B, C, alpha=0.1, beta=2.0, diag=-1.0))
    report = interpret(compiled(WIDE), WIDE, operands_of(case, out), (case.alpha, case.beta, case.diag))
    case.check(out)
    assert report.clean, report


def test_terms_are_rounded_once() -> None:
    """A sum of two terms that cancel to far below their own rounding."""
    A = torch.eye(32, 32, dtype=HALF)
    C = torch.eye(32, dtype=HALF)
    alpha = 1.0 + 2.0**-20
    case = Case(A, None, C, alpha, -1.0, 0.0, syrk_reference(A, None, C, alpha=alpha, beta=-1.0))
    operands = operands_of(case)
    interpret(compiled(WIDE), WIDE, operands, (alpha, -1.0, 0.0))
    assert torch.equal(operands.result().double(), case.expected)


def test_sum_overflowing_half_precision_on_the_way_is_finite() -> None:
    A = torch.full((32, 64), 64.0, dtype=HALF)
    case = Case(A, None, None, 2.0**-6, 0.0, 0.0, syrk_reference(A, alpha=2.0**-6))
    variant = Variant(HALF, SMALLEST, has_c=False)
    assert A.float().square().sum(dim=1).max() > torch.finfo(HALF).max
    assert run_case(case, variant).clean
