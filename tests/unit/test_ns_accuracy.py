"""Newton-Schulz against its exact polynomial in float64.

float16 products are emulated as a GPU does them. In 16 bits the input itself is rounded once, which no 16-bit method
can avoid and which dominates on ill-conditioned input; so the bounds over all shapes compare with the polynomial of the
rounded input, and the bounds by condition number, at one shape, with the polynomial of the input as given.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import pytest
import torch

from dmuon_hf.core.ns import NewtonSchulz, direct_newton_schulz, gram_newton_schulz
from dmuon_hf.core.ns.inputs import normalizer
from tests.unit.ns_reference import (
    JORDAN,
    POLAR_EXPRESS,
    YOU,
    HalfProducts,
    exact,
    gaussian,
    low_rank,
    normalized,
    polynomial,
    relative_error,
    sampled_shapes,
    spectrum,
)

TABLES = {"polar_express": POLAR_EXPRESS, "you": YOU}
CONDITIONS = (1.0, 10.0, 1e3, 1e5, 1e9)

# Largest relative error over every shape, conditioning and rank, against the polynomial of the input as rounded.
BOUND = {torch.float64: 1e-10, torch.float32: 5e-4, torch.float16: 5e-2, torch.bfloat16: 1.8e-1}
# Direct Newton-Schulz takes its Gram matrix anew in every step and keeps more of the wide types' precision.
DIRECT_BOUND = {torch.float64: 1e-11, torch.float32: 2e-4, torch.float16: 5e-2, torch.bfloat16: 3.5e-1}

# By condition number at 256x1024, against the polynomial of the input as given, for the default backend.
BY_CONDITION = {
    torch.float32: {1.0: 1e-5, 10.0: 1e-5, 1e3: 1.5e-4, 1e5: 1.5e-4, 1e9: 1.5e-4},
    torch.float16: {1.0: 8e-3, 10.0: 4e-3, 1e3: 4.5e-2, 1e5: 4.5e-2, 1e9: 4.5e-2},
    torch.bfloat16: {1.0: 2.5e-2, 10.0: 2.5e-2, 1e3: 1.2e-1, 1e5: 1.4e-1, 1e9: 1.6e-1},
}

# The Gram side in float32, the long side in the key: over every shape, and by condition number.
MIXED_BOUND = {torch.float16: 2.5e-2, torch.bfloat16: 1.2e-1}
MIXED_BY_CONDITION = {
    torch.float16: {1.0: 1.5e-3, 10.0: 1.5e-3, 1e3: 1e-2, 1e5: 1.8e-2, 1e9: 2.5e-2},
    torch.bfloat16: {1.0: 6e-3, 10.0: 9e-3, 1e3: 7e-2, 1e5: 1.1e-1, 1e9: 1.6e-1},
}


def products_of(dtype: torch.dtype):
    return HalfProducts() if dtype == torch.float16 else nullcontext()


@cache
def sampled_inputs() -> list[tuple[str, torch.Tensor]]:
    inputs = []
    for m, n in sampled_shapes(12):
        inputs.append((f"{m}x{n} gaussian", gaussian(m, n)))
        inputs.append((f"{m}x{n} rank 1", low_rank(m, n, 1)))
        if min(m, n) > 1:
            inputs += [(f"{m}x{n} condition {value:.0e}", spectrum(m, n, value)) for value in (10.0, 1e3, 1e9)]
        if min(m, n) > 8:
            inputs.append((f"{m}x{n} quarter rank", low_rank(m, n, min(m, n) // 4)))
    return inputs


@pytest.mark.parametrize("backend", ["gram", "direct"])
@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("table", TABLES)
def test_any_shape_and_conditioning_stays_within_the_bound(table, dtype, backend):
    rows, bound = TABLES[table], (BOUND if backend == "gram" else DIRECT_BOUND)[dtype]
    function = gram_newton_schulz if backend == "gram" else direct_newton_schulz
    failures = []
    for name, G in sampled_inputs():
        G = G.double() if dtype == torch.float64 else G
        reference = polynomial(normalized(G).to(dtype), rows)
        with products_of(dtype):
            error = relative_error(function(G, eps=0.0, coefficients=rows, dtype=dtype), reference)
        if not error <= bound:
            failures.append(f"{name}: {error:.1e}")
    assert not failures, f"over {bound:.1e}: {failures}"


@pytest.mark.parametrize("dtype", list(MIXED_BOUND), ids=str)
@pytest.mark.parametrize("table", TABLES)
def test_mixed_precision_stays_within_its_bound_on_any_shape_and_conditioning(table, dtype):
    ns = NewtonSchulz(coefficients=TABLES[table], dtype=dtype, gram_dtype=torch.float32)
    failures = []
    for name, G in sampled_inputs():
        with products_of(dtype):
            error = relative_error(ns(G), polynomial(normalized(G).to(dtype), TABLES[table]))
        if not error <= MIXED_BOUND[dtype]:
            failures.append(f"{name}: {error:.1e}")
    assert not failures, f"over {MIXED_BOUND[dtype]:.1e}: {failures}"


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("dtype", list(MIXED_BOUND), ids=str)
def test_mixed_precision_meets_the_bound_of_each_condition_number(dtype, condition):
    G = spectrum(256, 1024, condition)
    with products_of(dtype):
        result = NewtonSchulz(dtype=dtype, gram_dtype=torch.float32)(G)
    assert relative_error(result, exact(G)) <= MIXED_BY_CONDITION[dtype][condition]


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("dtype", list(BY_CONDITION), ids=str)
def test_default_backend_meets_the_bound_of_each_condition_number(dtype, condition):
    G = spectrum(256, 1024, condition)
    with products_of(dtype):
        result = NewtonSchulz(dtype=dtype)(G)
    assert relative_error(result, exact(G)) <= BY_CONDITION[dtype][condition]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ill_conditioned_squares_meet_the_same_bound(dtype):
    for condition in (1e3, 1e5, 1e9):
        G = spectrum(257, 257, condition)
        with products_of(dtype):
            error = relative_error(NewtonSchulz(dtype=dtype)(G), exact(G))
        assert error <= BY_CONDITION[dtype][condition], condition


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [8, 12])
def test_long_schedules_do_not_amplify_rounding(steps, dtype):
    G = low_rank(96, 200, 24)
    rows = [*POLAR_EXPRESS, *[POLAR_EXPRESS[-1]] * (steps - 5)]
    reference = polynomial(normalized(G).to(dtype), rows)
    with products_of(dtype):
        gram = relative_error(NewtonSchulz(dtype=dtype)(G, steps=steps), reference)
        direct = relative_error(NewtonSchulz("direct", dtype=dtype)(G, steps=steps), reference)
    assert gram < 3 * direct + 1e-3


def test_half_precision_needs_its_restart():
    G = spectrum(256, 1024, 1e5)
    with HalfProducts() as half:
        without = gram_newton_schulz(G, restart_iterations=[], dtype=torch.float16)
        restarted = gram_newton_schulz(G, restart_iterations=[2], dtype=torch.float16)
        default = gram_newton_schulz(G, dtype=torch.float16)
    assert half.products > 0
    assert relative_error(without, exact(G)) > 1e-1
    assert relative_error(restarted, exact(G)) < 4.5e-2
    assert torch.equal(restarted, default)


@pytest.mark.parametrize("restarts", [[], [1], [2], [4], [1, 3], [1, 2, 3, 4]])
@pytest.mark.parametrize("rows", [POLAR_EXPRESS, YOU, JORDAN], ids=["polar_express", "you", "jordan"])
def test_any_restarts_compute_the_same_polynomial(rows, restarts):
    G = spectrum(40, 56, 100.0).double()
    result = gram_newton_schulz(G, eps=0.0, coefficients=rows, restart_iterations=restarts)
    assert relative_error(result, exact(G, rows)) < 1e-11


def test_restarts_change_the_rounding():
    G = spectrum(64, 64, 1e3)
    assert not torch.equal(gram_newton_schulz(G, restart_iterations=[1]), gram_newton_schulz(G, restart_iterations=[3]))


@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1e-3, 1e5, 1e20])
@pytest.mark.parametrize("function", [gram_newton_schulz, direct_newton_schulz])
def test_scaled_input_gives_the_same_result(function, scale):
    G = spectrum(48, 100, 100.0)
    torch.testing.assert_close(function(G * scale), function(G), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("exponent", [-66, -20, 20, 66, 100])
def test_input_scaled_by_a_power_of_two_gives_the_same_bits(exponent):
    G = gaussian(48, 100)
    assert torch.equal(gram_newton_schulz(G * 2.0**exponent), gram_newton_schulz(G))


def test_entries_near_the_ends_of_float32_are_orthogonalized():
    G = spectrum(16, 32, 10.0)
    for scale in (1e-37, 1e38):
        assert relative_error(gram_newton_schulz(G * scale), exact(G * scale)) < 1e-3


def test_subnormal_entries_are_orthogonalized():
    G = torch.eye(8) * 1e-41
    assert relative_error(gram_newton_schulz(G), exact(G)) < 1e-3


def test_a_large_matrix_is_normalized_to_full_precision():
    X, scale, norm = normalizer(gaussian(2000, 3000), 0.0)
    assert float(X.double().norm()) == pytest.approx(1.0, abs=1e-6)
    assert float(scale * norm) == pytest.approx(float(gaussian(2000, 3000).double().norm()), rel=1e-6)


def test_eps_damps_the_normalized_matrix():
    G = torch.tensor([[1.0]])
    assert float(direct_newton_schulz(G, eps=1.0, coefficients=[(1.0, 0.0, 0.0)])) == pytest.approx(0.5)
    assert float(gram_newton_schulz(G, eps=1.0, coefficients=[(1.0, 0.0, 0.0)])) == pytest.approx(0.5)
