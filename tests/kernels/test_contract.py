"""The checks that every backend makes before it launches anything."""

from __future__ import annotations

import pytest
import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.backends.contract import syrk_operands
from tests.kernels.reference import syrk_reference

A = torch.randn(4, 6).half()
SQUARE = torch.zeros(4, 4, dtype=torch.float16)


def test_one_matrix_gets_a_batch_dimension_and_loses_it_again():
    operands = syrk_operands(A, None, SQUARE)
    assert operands.A.shape == (1, 4, 6)
    assert operands.C is not None and operands.C.shape == (1, 4, 4)
    assert (operands.batch, operands.rows, operands.depth) == (1, 4, 6)
    assert operands.result().shape == (4, 4)
    assert operands.result().dtype == A.dtype


def test_batch_stays_a_batch():
    operands = syrk_operands(A.expand(3, 4, 6))
    assert operands.result().shape == (3, 4, 4)


def test_same_operand_twice_is_a_gram_matrix():
    assert syrk_operands(A).gram
    assert syrk_operands(A, A).gram
    assert not syrk_operands(A, A.clone()).gram


def test_output_of_the_caller_is_used():
    out = torch.empty(4, 4, dtype=torch.float16)
    assert syrk_operands(A, out=out).result().data_ptr() == out.data_ptr()


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"A": A[0]}, r"A must be \(M, K\) or \(L, M, K\)"),
        ({"A": A.float()}, "float16 or bfloat16"),
        ({"A": A, "B": A.mT}, r"B must be \(4, 6\)"),
        ({"A": A, "B": A.bfloat16()}, "B must have the dtype of A"),
        ({"A": A, "C": SQUARE[None]}, r"C must be \(4, 4\)"),
        ({"A": A, "C": SQUARE.to("meta")}, "C must be on the device of A"),
        ({"A": A, "out": SQUARE[:3]}, r"out must be \(4, 4\)"),
        ({"A": A, "C": SQUARE, "out": SQUARE}, "out and C share memory"),
        ({"A": A, "out": SQUARE[:1].expand(4, 4)}, "out repeats elements"),
        ({"A": A.clone().requires_grad_()}, "no backward"),
    ],
)
def test_wrong_operands_are_refused_with_the_reason(operands, message):
    with pytest.raises(ConfigurationError, match=message):
        syrk_operands(**operands)


def test_output_beside_an_operand_in_one_buffer_is_allowed():
    buffer = torch.zeros(40, dtype=torch.float16)
    syrk_operands(buffer[:24].view(4, 6), out=buffer[24:].view(4, 4))


def test_reference_takes_the_lower_triangle():
    B, C = torch.randn(4, 6).half(), torch.randn(4, 4).half()
    result = syrk_reference(A, B, C, alpha=2.0, beta=3.0, diag=5.0)
    expected = 2 * A.double() @ B.double().T + 3 * C.double() + 5 * torch.eye(4)
    torch.testing.assert_close(result.tril(), expected.tril(), rtol=1e-12, atol=1e-12)
    assert torch.equal(result, result.T)
