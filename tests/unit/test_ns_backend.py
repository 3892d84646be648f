from __future__ import annotations

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns import (
    YOU_COEFFICIENTS,
    NewtonSchulz,
    direct_newton_schulz,
    gram_newton_schulz,
)
from dmuon_hf.core.ns.flops import direct_flops, gram_flops
from tests.unit.ns_reference import gaussian

CONFIGURED = NewtonSchulz(
    "gram", "cublas", YOU_COEFFICIENTS, restart_iterations=[3, 1], deterministic=True, dtype=torch.bfloat16
)


@pytest.fixture(autouse=True)
def _no_kernel_from_the_environment(monkeypatch):
    monkeypatch.delenv("DMUON_NS_KERNEL", raising=False)


@pytest.mark.parametrize("ns", [NewtonSchulz(), NewtonSchulz("direct"), CONFIGURED], ids=repr)
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda ns: pickle.loads(pickle.dumps(ns))])
def test_a_copy_is_equal_and_computes_the_same(ns, clone):
    other = clone(ns)
    assert other == ns
    assert hash(other) == hash(ns)
    assert torch.equal(other(gaussian(8, 12)), ns(gaussian(8, 12)))


def test_any_differing_argument_makes_it_unequal():
    others = [
        NewtonSchulz("direct"),
        NewtonSchulz(kernel="cublas"),
        NewtonSchulz(coefficients=YOU_COEFFICIENTS),
        NewtonSchulz(restart_iterations=[1]),
        NewtonSchulz(deterministic=True),
        NewtonSchulz(dtype=torch.float32),
        NewtonSchulz(dtype=torch.bfloat16, gram_dtype=torch.float32),
    ]
    assert all(other != NewtonSchulz() for other in others)
    assert NewtonSchulz(dtype=torch.bfloat16, gram_dtype=torch.float32) != NewtonSchulz(dtype=torch.bfloat16)


def test_lists_and_tuples_make_equal_objects():
    assert NewtonSchulz(coefficients=[[1, -1, 0.5]]) == NewtonSchulz(coefficients=((1.0, -1.0, 0.5),))
    assert NewtonSchulz(restart_iterations=[3, 1, 3]) == NewtonSchulz(restart_iterations=(1, 3))


def test_repr_gives_back_an_equal_object():
    namespace = {"NewtonSchulz": NewtonSchulz, "torch": torch}
    assert eval(repr(CONFIGURED), namespace) == CONFIGURED  # noqa: S307


def test_it_cannot_be_changed():
    with pytest.raises(AttributeError):
        NewtonSchulz().backend = "direct"  # type: ignore[misc]


def test_backends_call_their_functions():
    G = gaussian(12, 20)
    assert torch.equal(NewtonSchulz()(G), gram_newton_schulz(G))
    assert torch.equal(NewtonSchulz("gram")(G, steps=3), gram_newton_schulz(G, 3))
    assert torch.equal(NewtonSchulz("direct")(G), direct_newton_schulz(G))


@pytest.mark.parametrize("option", ["backend", "coefficients", "restart_iterations", "dtype"])
def test_every_numerical_option_changes_the_result(option):
    value = {
        "backend": "direct",
        "coefficients": YOU_COEFFICIENTS,
        "restart_iterations": [1, 4],
        "dtype": torch.bfloat16,
    }[option]
    G = gaussian(24, 40)
    assert not torch.equal(NewtonSchulz(**{option: value})(G), NewtonSchulz()(G))


def test_auto_takes_direct_for_squares_and_gram_for_elongated_matrices():
    square, elongated = gaussian(64, 64), gaussian(64, 256)
    assert torch.equal(NewtonSchulz("auto")(square), direct_newton_schulz(square))
    assert torch.equal(NewtonSchulz("auto")(elongated), gram_newton_schulz(elongated))
    assert torch.equal(NewtonSchulz("auto")(elongated.T), gram_newton_schulz(elongated.T))


def test_auto_uses_the_restarts_it_was_given():
    G = gaussian(64, 256)
    expected = gram_newton_schulz(G, restart_iterations=[1])
    assert torch.equal(NewtonSchulz("auto", restart_iterations=[1])(G), expected)


def test_flop_counts_are_those_of_the_algorithms():
    m, n = 3, 7
    assert direct_flops(m, n, steps=5, share=1.0) == 20 * m * m * n + 10 * m**3
    assert direct_flops(m, n, steps=5, share=0.5) == 15 * m * m * n + 5 * m**3
    assert gram_flops(m, n, segment_lengths=(2, 3), share=1.0) == 8 * m * m * n + 28 * m**3
    assert gram_flops(m, n, segment_lengths=(2, 3), share=0.5) == 6 * m * m * n + 14 * m**3
    assert gram_flops(m, n, segment_lengths=(5,), share=1.0) == 4 * m * m * n + 34 * m**3


@pytest.mark.parametrize("shape", [(640, 640), (640, 2560), (2560, 640)], ids=str)
@pytest.mark.parametrize("backend", ["gram", "direct", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flops_are_those_that_pytorch_counts(monkeypatch, backend, shape, dtype):
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    ns = NewtonSchulz(backend, dtype=dtype)
    with FlopCounterMode(display=False) as counter, FakeTensorMode():
        ns(torch.empty(shape))
    assert ns.flops(*shape, dtype=dtype) == pytest.approx(counter.get_total_flops(), rel=1e-12)


class ProductDtypes(TorchDispatchMode):
    """Counts matrix products by the dtype of their operands and whether the result is square."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[torch.dtype, bool]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm"):
            self.counts[args[-1].dtype, out.shape[-1] == out.shape[-2]] += 1
        return out


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)], ids=str)
def test_mixed_precision_forms_the_short_side_wide_and_the_long_side_narrow(shape):
    with ProductDtypes() as products:
        result = NewtonSchulz(dtype=torch.bfloat16, gram_dtype=torch.float32)(gaussian(*shape))
    # Two segments, of two and three steps: a Gram matrix each, 5 squares, 3 updates of R in two products, 3 of Q.
    assert products.counts == {(torch.float32, True): 16, (torch.bfloat16, False): 2}
    assert result.dtype == torch.float32


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "direct", "dtype": torch.bfloat16},
        {"backend": "auto", "dtype": torch.bfloat16},
        {},
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16, "gram_dtype": torch.float16},
    ],
    ids=str,
)
def test_gram_dtype_that_is_no_wider_than_dtype_or_has_no_effect_raises(arguments):
    with pytest.raises(ConfigurationError, match="gram_dtype"):
        NewtonSchulz(**{"gram_dtype": torch.float32, **arguments})


def test_unknown_backend_raises_with_the_choices():
    with pytest.raises(ConfigurationError, match="'gram', 'direct', 'auto'"):
        NewtonSchulz("svd")


def test_restarts_say_nothing_to_direct():
    G = gaussian(12, 20)
    assert torch.equal(NewtonSchulz("direct", restart_iterations=[2])(G), NewtonSchulz("direct")(G))


@pytest.mark.parametrize(
    "arguments",
    [{"coefficients": [[1.0]]}, {"coefficients": []}, {"restart_iterations": [0]}, {"dtype": torch.int8}],
    ids=str,
)
def test_malformed_argument_raises_at_construction(arguments):
    with pytest.raises(ConfigurationError):
        NewtonSchulz(**arguments)
