"""The sm_80 program that Triton generates, executed instruction by instruction."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from dmuon_hf.core.ns.backends.triton_syrk import TileConfig, choose_config
from tests.kernels.reference import make_case
from tests.kernels.triton_programs import SMALL, compiled, run_ptx

pytest.importorskip("triton", reason="the package triton is not installed")

FP16, BF16 = torch.float16, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])


def _check(case, config=SMALL, *, aligned=True, row_major=True):
    ptx, shared = compiled(case.A.dtype, config, has_C=case.C is not None, aligned=aligned, row_major=row_major)
    # An element away from any alignment that the program was not promised.
    misalignment = 0 if aligned else case.A.element_size()
    out, report = run_ptx(case, ptx, shared, config, row_major=row_major, misalignment=misalignment)
    case.check(out)
    assert report.clean, report


@DTYPES
@pytest.mark.parametrize(("M", "K"), [(64, 64), (80, 48), (16, 304)])
def test_aligned_operands_give_the_product(dtype, M, K):
    _check(make_case(M, K, dtype))


@DTYPES
@pytest.mark.parametrize(("M", "K"), [(1, 1), (33, 70), (65, 7)])
def test_shapes_that_divide_nothing_give_the_product(dtype, M, K):
    _check(make_case(M, K, dtype), aligned=False)


@DTYPES
def test_product_of_commuting_matrices_is_symmetric(dtype):
    _check(make_case(48, 48, dtype, product=True))


@DTYPES
def test_without_C_none_is_read(dtype):
    _check(make_case(48, 32, dtype, has_C=False))


def test_batch_gives_each_matrix_its_product():
    _check(make_case(48, 32, BF16, batch=3))


@pytest.mark.parametrize(("M", "K", "aligned"), [(48, 80, True), (37, 45, False)])
def test_transposed_operands_give_the_product(M, K, aligned):
    case = make_case(M, K, FP16)
    case = dataclasses.replace(case, A=case.A.mT.contiguous().mT)
    _check(case, aligned=aligned, row_major=False)


def test_rows_with_padding_are_read_without_it():
    case = make_case(40, 48, FP16)
    padded = torch.full((40, 64), float("nan"), dtype=FP16)
    padded[:, :48] = case.A
    _check(dataclasses.replace(case, A=padded[:, :48]))


def test_empty_product_leaves_the_other_terms():
    _check(make_case(40, 0, BF16), aligned=False)


@pytest.mark.parametrize(
    "config", [TileConfig(rows=64, depth=32, stages=4, warps=4), TileConfig(rows=16, depth=16, stages=2, warps=1)]
)
def test_other_tiles_and_depths_of_the_pipeline_give_the_product(config):
    _check(make_case(80, 208, FP16), config)


# Every layout that a launch can choose. The dtypes, which change one instruction of each kind, take turns, and so does
# the presence of C, which changes no load of A and B.
VARIANTS = list(itertools.product((4096, 1024, 64), (True, False), (True, False)))
TURNS = itertools.cycle([(FP16, True), (BF16, False), (BF16, True), (FP16, False), (BF16, True)])


@pytest.mark.parametrize(
    ("dtype", "has_C", "M", "aligned", "row_major"),
    [(*turn, *variant) for turn, variant in zip(TURNS, VARIANTS, strict=False)],
)
def test_every_variant_gives_the_product(dtype, has_C, M, aligned, row_major):
    config = choose_config(M)
    tail = 16 if aligned else 5
    case = make_case(config.rows + tail, 2 * config.depth + tail, dtype, has_C=has_C)
    if not row_major:
        case = dataclasses.replace(case, A=case.A.mT.contiguous().mT)
    _check(case, config, aligned=aligned, row_major=row_major)
