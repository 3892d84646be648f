from __future__ import annotations

import inspect

import pytest
import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns import (
    DEFAULT_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    YOU_COEFFICIENTS,
    NewtonSchulz,
    direct_newton_schulz,
    gram_newton_schulz,
    gram_newton_schulz_factors,
    newton_schulz,
)
from dmuon_hf.core.ns.coefficients import schedule
from dmuon_hf.core.ns.restarts import default_restarts, segments
from tests.unit.ns_reference import JORDAN, POLAR_EXPRESS, YOU, exact, gaussian, relative_error

ROWS = tuple(POLAR_EXPRESS_COEFFICIENTS)


def test_public_tables_hold_the_published_numbers():
    torch.testing.assert_close(torch.tensor(POLAR_EXPRESS_COEFFICIENTS), torch.tensor(POLAR_EXPRESS))
    assert [tuple(row) for row in YOU_COEFFICIENTS] == YOU
    assert DEFAULT_COEFFICIENTS is POLAR_EXPRESS_COEFFICIENTS


def test_tables_have_names():
    assert schedule("polar_express", 6) == schedule(POLAR_EXPRESS_COEFFICIENTS, 6)
    assert schedule("you") == tuple(YOU)
    assert schedule("quintic", 5) == tuple(JORDAN)
    with pytest.raises(ConfigurationError, match="'polar_express', 'you', 'quintic'"):
        schedule("septic")


def test_polar_express_maps_singular_values_close_to_one():
    values = torch.linspace(0.05, 1.0, 500, dtype=torch.float64)
    for a, b, c in POLAR_EXPRESS_COEFFICIENTS:
        values = a * values + b * values**3 + c * values**5
    assert 0.8 < values.min() < values.max() < 1.2


def test_fewer_steps_than_rows_takes_the_first_rows():
    assert schedule(YOU_COEFFICIENTS, 3) == tuple(YOU[:3])


def test_more_steps_than_rows_repeats_the_last_row():
    assert schedule(YOU_COEFFICIENTS, 7) == (*YOU, YOU[-1], YOU[-1])


def test_no_steps_given_takes_every_row_once():
    assert schedule([[1.5, -0.5, 0.0]]) == ((1.5, -0.5, 0.0),)
    assert schedule() == schedule(POLAR_EXPRESS_COEFFICIENTS, 5)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_steps_that_are_no_positive_count_raise(steps):
    with pytest.raises(ConfigurationError, match="at least 1"):
        schedule(None, steps)


@pytest.mark.parametrize("table", [[[1.0, 2.0]], [[1.0, 2.0, float("nan")]], [[1.0, 2.0, 3.0, 4.0]]])
def test_a_malformed_row_raises(table):
    with pytest.raises(ConfigurationError, match="row 0"):
        schedule(table)


def test_an_empty_table_raises():
    with pytest.raises(ConfigurationError, match="empty"):
        schedule([])


@pytest.mark.parametrize("function", [direct_newton_schulz, gram_newton_schulz, newton_schulz])
@pytest.mark.parametrize("steps", [1, 3, 5, 8])
def test_steps_argument_runs_that_many_rows(function, steps):
    G = gaussian(24, 40)
    rows = [*POLAR_EXPRESS, *[POLAR_EXPRESS[-1]] * 3][:steps]
    assert relative_error(function(G, steps), exact(G, rows)) < 1e-4
    assert relative_error(NewtonSchulz()(G, steps=steps), exact(G, rows)) < 1e-4


@pytest.mark.parametrize("function", [direct_newton_schulz, gram_newton_schulz, newton_schulz])
@pytest.mark.parametrize("table", [YOU, JORDAN, YOU[:2]])
def test_explicit_table_without_steps_runs_every_row(function, table):
    G = gaussian(24, 40)
    assert relative_error(function(G, coefficients=table), exact(G, table)) < 1e-4


@pytest.mark.parametrize("table", [POLAR_EXPRESS_COEFFICIENTS, YOU_COEFFICIENTS])
def test_default_restarts_of_five_steps_are_the_documented_ones(table):
    rows = schedule(table)
    assert default_restarts(rows, torch.float16) == (2,)
    assert default_restarts(rows, torch.float32) == (2,)
    assert default_restarts(rows, torch.float64) == (2,)
    assert default_restarts(rows, torch.bfloat16) == (2, 4)


def test_default_restarts_follow_long_schedules():
    assert default_restarts(schedule(None, 12), torch.float16) == (2, 5, 9)
    assert default_restarts(schedule(None, 2), torch.float16) == ()


def test_segments_split_the_rows_at_the_restarts():
    assert segments(ROWS, [3, 1, 3], torch.float32) == (ROWS[:1], ROWS[1:3], ROWS[3:])
    assert segments(ROWS, [], torch.bfloat16) == (ROWS,)


@pytest.mark.parametrize("restarts", [[0], [-1], [1.0], [True]])
def test_a_restart_that_is_no_later_iteration_raises(restarts):
    with pytest.raises(ConfigurationError, match="from 1 on"):
        segments(ROWS, restarts, torch.float32)


def test_a_restart_beyond_the_last_step_raises():
    with pytest.raises(ConfigurationError, match=r"\[5\].*from 1 to 4"):
        gram_newton_schulz(gaussian(4, 8), restart_iterations=[5])


def test_functions_take_the_documented_arguments_in_order():
    shared = ["G", "steps", "eps", "coefficients"]
    assert list(inspect.signature(direct_newton_schulz).parameters) == [*shared, "dtype"]
    assert list(inspect.signature(newton_schulz).parameters) == [*shared, "restart_iterations", "dtype"]
    assert list(inspect.signature(gram_newton_schulz).parameters) == [
        *shared,
        "restart_iterations",
        "deterministic",
        "dtype",
    ]


FUNCTIONS = [newton_schulz, gram_newton_schulz, direct_newton_schulz]


@pytest.mark.parametrize("function", [*FUNCTIONS, gram_newton_schulz_factors], ids=lambda f: f.__name__)
def test_functions_run_five_steps_by_default(function):
    assert inspect.signature(function).parameters["steps"].default == 5


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_table_says_how_many_steps_there_are(function):
    G = gaussian(6, 9)
    for table in (YOU_COEFFICIENTS[:3], [*YOU_COEFFICIENTS, *YOU_COEFFICIENTS[-2:]]):
        assert torch.equal(function(G, steps=5, coefficients=table), function(G, coefficients=table))
        assert relative_error(function(G, coefficients=table), exact(G, schedule(table))) < 1e-4


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_steps_count_where_no_table_is_given(function):
    G = gaussian(6, 9)
    for steps in (2, 5, 7):
        assert relative_error(function(G, steps), exact(G, schedule(None, steps))) < 1e-4
