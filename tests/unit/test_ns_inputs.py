from __future__ import annotations

import pytest
import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns import (
    NewtonSchulz,
    direct_newton_schulz,
    gram_newton_schulz,
    gram_newton_schulz_factors,
    gram_newton_schulz_q,
    newton_schulz,
)
from dmuon_hf.core.ns.inputs import compute_dtype
from tests.unit.ns_reference import exact, gaussian, low_rank, relative_error

FUNCTIONS = [newton_schulz, gram_newton_schulz, direct_newton_schulz]
functions = pytest.mark.parametrize("function", FUNCTIONS)


@functions
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_result_has_shape_and_dtype_of_the_input(function, dtype):
    for shape in [(6, 10), (10, 6), (1, 7), (7, 1), (1, 1), (3, 6, 10), (1, 10, 6)]:
        result = function(gaussian(*shape).to(dtype))
        assert (result.shape, result.dtype) == (shape, dtype)
        assert result.is_contiguous()


@functions
def test_input_is_unchanged(function):
    for G in (gaussian(12, 20), gaussian(20, 12), gaussian(2, 12, 20), gaussian(200, 300).double()):
        before = G.clone()
        function(G)
        assert torch.equal(G, before)


@functions
def test_zero_matrix_gives_exact_zero(function):
    assert torch.equal(function(torch.zeros(5, 9)), torch.zeros(5, 9))
    assert torch.equal(function(torch.zeros(5, 9), eps=0.0), torch.zeros(5, 9))


@functions
def test_zero_matrix_in_a_batch_leaves_the_others_alone(function):
    G = gaussian(3, 5, 9)
    G[1] = 0.0
    result = function(G)
    assert torch.equal(result[1], torch.zeros(5, 9))
    assert relative_error(result[0], exact(G[0])) < 1e-4


@functions
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_entry_shows_in_its_own_matrix_only(function, value):
    G = gaussian(3, 5, 9)
    G[1, 2, 3] = value
    result = function(G)
    assert not result[1].isfinite().any()
    assert result[0].isfinite().all()
    assert result[2].isfinite().all()


@functions
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4), (2, 0, 4)])
def test_empty_matrix_comes_back_empty(function, shape):
    assert function(torch.empty(shape)).shape == shape


@functions
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4, 5)])
def test_input_that_is_no_matrix_raises(function, shape):
    with pytest.raises(ConfigurationError, match="takes a matrix"):
        function(torch.ones(shape))


@functions
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_input_that_is_not_real_floating_point_raises(function, dtype):
    with pytest.raises(ConfigurationError, match="floating-point"):
        function(torch.ones(2, 3, dtype=dtype))


@functions
@pytest.mark.parametrize("eps", [-1e-7, float("nan"), float("inf")])
def test_eps_that_is_no_small_number_raises(function, eps):
    with pytest.raises(ConfigurationError, match="eps"):
        function(torch.ones(2, 3), eps=eps)


@functions
def test_compute_dtype_that_is_not_floating_point_raises(function):
    with pytest.raises(ConfigurationError, match="iterates in"):
        function(torch.ones(2, 3), dtype=torch.int32)


@functions
def test_input_that_requires_grad_gives_a_detached_result(function):
    assert not function(gaussian(4, 6).requires_grad_()).requires_grad


@functions
@pytest.mark.parametrize("shape", [(12, 20), (170, 300)])
def test_transposed_input_gives_the_transposed_result(function, shape):
    G = gaussian(*shape)
    for transposed in (G.T, G.T.contiguous()):
        torch.testing.assert_close(function(transposed), function(G).T, rtol=0.0, atol=2e-5)


@functions
def test_strided_input_gives_the_result_of_its_copy(function):
    wide = gaussian(12, 40)
    torch.testing.assert_close(function(wide[:, ::2]), function(wide[:, ::2].contiguous()))
    torch.testing.assert_close(function(wide[::3, 5:25]), function(wide[::3, 5:25].contiguous()))
    torch.testing.assert_close(function(wide[0].expand(5, 40)), function(wide[0].repeat(5, 1)))


@functions
@pytest.mark.parametrize("shape", [(4, 12, 20), (4, 20, 12), (2, 170, 300), (2, 300, 170), (5, 1, 8)])
def test_batch_equals_its_matrices_one_by_one(function, shape):
    G = gaussian(*shape)
    G[0] = low_rank(*shape[1:], rank=1)
    one_by_one = torch.stack([function(matrix) for matrix in G])
    assert relative_error(function(G), one_by_one) < 1e-3
    torch.testing.assert_close(function(G)[1:], one_by_one[1:], rtol=0.0, atol=2e-5)


@functions
def test_batch_of_matrices_of_different_scales_normalizes_each(function):
    G = gaussian(3, 8, 12)
    scaled = G * torch.tensor([1e-15, 1.0, 1e15]).view(3, 1, 1)
    torch.testing.assert_close(function(scaled), function(G), rtol=0.0, atol=2e-5)


def test_float64_input_is_computed_in_float64():
    G = gaussian(12, 20).double()
    assert relative_error(newton_schulz(G, eps=0.0), exact(G)) < 1e-9


def test_explicit_dtype_changes_the_result():
    G = gaussian(12, 20)
    assert not torch.equal(newton_schulz(G, dtype=torch.bfloat16), newton_schulz(G))


def test_compute_dtype_on_a_cpu_is_never_half_unless_asked(monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    found = [compute_dtype(torch.ones(1, 1, dtype=dtype)) for dtype in (torch.float16, torch.float32, torch.float64)]
    assert found == [torch.float32, torch.float32, torch.float64]
    assert compute_dtype(torch.ones(1, 1), torch.float16) == torch.float16


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "avx2": True}, torch.float32),
    ],
)
def test_bfloat16_input_on_a_cpu_stays_bfloat16_only_if_native(monkeypatch, capabilities, expected):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    assert compute_dtype(torch.ones(1, 1, dtype=torch.bfloat16)) == expected


def test_compute_dtype_on_an_accelerator_is_half():
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        found = [
            compute_dtype(torch.empty(1, 1, dtype=dtype, device="cuda"))
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        ]
    assert found == [torch.float16, torch.float16, torch.float16, torch.float64]


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (170, 300), (300, 170), (3, 12, 20), (3, 20, 12)])
@pytest.mark.parametrize("restarts", [None, [], [1, 3]])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_factors_reproduce_gram_newton_schulz_exactly(shape, restarts, dtype):
    G = gaussian(*shape)
    factors, transposed, normalizer = gram_newton_schulz_factors(G, restart_iterations=restarts, dtype=dtype)
    X = (G.mT if transposed else G).div(normalizer).to(factors[0].dtype)
    for factor in factors:
        X = factor @ X
    expected = gram_newton_schulz(G, restart_iterations=restarts, dtype=dtype)
    assert torch.equal((X.mT if transposed else X).float(), expected)


def test_factors_count_one_per_segment():
    G = gaussian(12, 20)
    assert len(gram_newton_schulz_factors(G, restart_iterations=[])[0]) == 1
    assert len(gram_newton_schulz_factors(G)[0]) == 2
    assert len(gram_newton_schulz_factors(G, restart_iterations=[1, 2, 4])[0]) == 4


def test_factors_are_square_on_the_short_side_and_the_normalizer_is_the_norm():
    factors, transposed, normalizer = gram_newton_schulz_factors(gaussian(20, 12))
    assert transposed
    assert [tuple(factor.shape) for factor in factors] == [(12, 12), (12, 12)]
    torch.testing.assert_close(normalizer, gaussian(20, 12).norm())


def test_old_name_of_the_factors_is_the_same_function():
    assert gram_newton_schulz_q is gram_newton_schulz_factors


def test_local_takes_one_matrix_only():
    ns = NewtonSchulz()
    torch.testing.assert_close(ns.local(gaussian(4, 6)), ns(gaussian(4, 6)))
    with pytest.raises(ConfigurationError, match="one matrix"):
        ns.local(gaussian(2, 4, 6))
