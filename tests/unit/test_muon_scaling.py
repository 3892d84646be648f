"""Learning-rate rules and the conversion between them."""

from __future__ import annotations

import itertools
import math

import pytest

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.optim import LR_SCALES, convert_lr, lr_scale_factor


@pytest.mark.parametrize(
    ("rule", "shape", "expected"),
    [
        ("match_rms_adamw", (64, 256), 0.2 * 16.0),
        ("match_rms_adamw", (256, 64), 0.2 * 16.0),
        ("original", (256, 64), 2.0),
        ("original", (64, 256), 1.0),
        ("spectral", (256, 64), 2.0),
        ("spectral", (64, 256), 0.5),
        ("none", (64, 256), 1.0),
    ],
)
def test_each_rule_gives_its_documented_factor(rule: str, shape: tuple[int, int], expected: float) -> None:
    assert lr_scale_factor(shape, rule) == pytest.approx(expected)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(LR_SCALES, repeat=2)))
def test_converted_lr_takes_the_same_step(source: str, target: str) -> None:
    for shape in [(8, 8), (3, 50), (50, 3), (1, 7)]:
        converted = convert_lr(0.02, shape, source, target)
        assert converted * lr_scale_factor(shape, target) == pytest.approx(0.02 * lr_scale_factor(shape, source))
        assert convert_lr(converted, shape, target, source) == pytest.approx(0.02)


def test_rms_of_an_orthogonal_update_under_match_rms_adamw_is_a_fifth() -> None:
    out, inner = 32, 128
    frobenius = math.sqrt(min(out, inner))
    rms = frobenius / math.sqrt(out * inner)
    assert lr_scale_factor((out, inner), "match_rms_adamw") * rms == pytest.approx(0.2)


def test_unknown_rule_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigurationError, match=r"match_rms_adamw.*'moonlight'"):
        lr_scale_factor((2, 2), "moonlight")


def test_empty_matrix_has_no_factor() -> None:
    with pytest.raises(ConfigurationError, match="no learning-rate scale"):
        lr_scale_factor((0, 4), "original")
