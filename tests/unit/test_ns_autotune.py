from __future__ import annotations

import logging
import pickle

import pytest
import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns import NewtonSchulz, graph, support
from dmuon_hf.core.ns.autotune import Choice, tuner
from dmuon_hf.core.ns.autotune.product import Product, ProductRecorder, TunedKernel
from dmuon_hf.core.ns.library import LibraryKernel
from tests.unit.ns_autotune_fakes import CPU, Bench, product
from tests.unit.ns_reference import exact, gaussian, relative_error
from tests.unit.test_ns_dispatch_graph import RecordingDevice

TWO = Choice("cublas", (2,))


@pytest.fixture
def bench(monkeypatch, tmp_path):
    support.log_once.cache_clear()
    made = Bench(monkeypatch, tmp_path)
    made.seconds = {TWO: 0.5}
    return made


def choices(ns: NewtonSchulz) -> set[Choice]:
    assert ns.tuner is not None
    return set(ns.tuner.choices.values())


def test_nothing_is_tuned_by_default(bench):
    ns = NewtonSchulz()
    ns(gaussian(64, 96))
    assert ns.tuner is None
    assert bench.total == 0


def test_first_call_of_a_shape_tunes_it(bench):
    ns = NewtonSchulz(autotune=True)
    ns(gaussian(64, 96))
    assert choices(ns) == {TWO}


def test_second_call_of_a_shape_times_nothing(bench):
    ns = NewtonSchulz(autotune=True)
    ns(gaussian(64, 96))
    slow = bench.calls(Choice("cublas", (4,)))
    ns(gaussian(64, 96))
    assert bench.calls(Choice("cublas", (4,))) == slow


def test_products_of_a_shape_are_recorded_once(bench, monkeypatch):
    recorded, products = [], NewtonSchulz.products
    monkeypatch.setattr(
        NewtonSchulz, "products", lambda ns, shape, **of: recorded.append(shape) or products(ns, shape, **of)
    )
    ns = NewtonSchulz(autotune=True)
    for G in (gaussian(64, 96), gaussian(64, 96), gaussian(96, 64)):
        ns(G)
    assert recorded == [(64, 96), (96, 64)]


def test_iteration_runs_on_the_kernel_that_was_chosen(bench):
    ns = NewtonSchulz(autotune=True)
    ns(gaussian(64, 96))
    before = {choice: bench.calls(choice) for choice in bench.built}
    ns(gaussian(64, 96))
    more = {choice: bench.calls(choice) - count for choice, count in before.items()}
    assert more.pop(TWO) > 10
    assert set(more.values()) == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["gram", "direct"])
@pytest.mark.parametrize("shape", [(64, 96), (160, 64), (3, 64, 96)], ids=str)
def test_tuned_result_is_as_exact_as_the_untuned_one(bench, shape, backend, dtype):
    G = gaussian(*shape)
    tuned, plain = (NewtonSchulz(backend, dtype=dtype, autotune=autotune)(G) for autotune in (True, False))
    for mine, theirs, matrix in zip(*(x.reshape(-1, *shape[-2:]) for x in (tuned, plain, G)), strict=True):
        bound = 1.5 * relative_error(theirs, exact(matrix)) + 4 * torch.finfo(dtype).eps
        assert relative_error(mine, exact(matrix)) < bound


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_environment_counts_without_an_argument(bench, monkeypatch, value):
    monkeypatch.setenv("DMUON_NS_AUTOTUNE", value)
    assert (NewtonSchulz().tuner is not None) is (value == "1")


def test_arguments_win_over_the_environment(bench, monkeypatch):
    monkeypatch.setenv("DMUON_NS_AUTOTUNE", "1")
    assert NewtonSchulz(autotune=False).tuner is None
    assert NewtonSchulz(deterministic=True).tuner is None
    monkeypatch.setenv("DMUON_NS_AUTOTUNE", "0")
    assert NewtonSchulz(autotune=True).tuner is not None


def test_autotune_with_deterministic_raises(bench):
    with pytest.raises(ConfigurationError, match="autotune=True and deterministic=True disagree"):
        NewtonSchulz(autotune=True, deterministic=True)


def test_copy_tunes_for_itself(bench):
    ns = NewtonSchulz(autotune=True)
    ns(gaussian(64, 96))
    copy = pickle.loads(pickle.dumps(ns))
    assert copy == ns
    assert copy.tuner.choices == {}


def test_settings_and_choices_are_in_the_fingerprint(bench):
    plain, tuned = NewtonSchulz(), NewtonSchulz(autotune=True)
    assert plain.fingerprint != tuned.fingerprint
    before = tuned.fingerprint
    tuned(gaussian(64, 96))
    assert "gram 64x96 float32 on cpu: cublas(2)" in tuned.fingerprint
    assert tuned.fingerprint != before
    assert tuned.settings in before


def test_order_of_the_calls_does_not_change_the_fingerprint(bench):
    there, back = NewtonSchulz(autotune=True), NewtonSchulz(autotune=True)
    shapes = [(64, 96), (48, 64), (96, 64)]
    for shape in shapes:
        there(gaussian(*shape))
    for shape in reversed(shapes):
        back(gaussian(*shape))
    assert there.fingerprint == back.fingerprint


def test_adopted_choices_replace_all_and_end_tuning(bench, caplog):
    ns = NewtonSchulz(autotune=True)
    ns(gaussian(64, 96))
    ns.adopt({product(): Choice("cublas", (4,))})
    with caplog.at_level(logging.INFO, logger="dmuon_hf"):
        ns(gaussian(64, 96))
        ns(gaussian(48, 64))
    assert choices(ns) == {Choice("cublas", (4,))}
    assert "gram 48x64 float32 on cpu was not tuned and runs on the default kernel, cublas" in caplog.text


def test_adopting_without_autotune_raises(bench):
    with pytest.raises(ConfigurationError, match="does not tune"):
        NewtonSchulz().adopt({})


def test_nothing_is_tuned_while_a_graph_is_captured(bench, monkeypatch, caplog):
    monkeypatch.setattr(tuner, "_is_capturing", lambda device: True)
    ns = NewtonSchulz(autotune=True)
    with caplog.at_level(logging.INFO, logger="dmuon_hf"):
        ns(gaussian(64, 96))
    assert bench.total == 0
    assert "nothing is tuned while a graph is captured" in caplog.text
    monkeypatch.setattr(tuner, "_is_capturing", lambda device: False)
    ns(gaussian(64, 96))
    assert choices(ns) == {TWO}


def test_shape_is_tuned_before_its_graph_is_captured(bench):
    device = RecordingDevice()
    ns = NewtonSchulz(autotune=True)
    object.__setattr__(ns, "_graphs", graph.GraphReplay(device))
    for _ in range(3):
        ns(gaussian(64, 96))
    assert device.captures == 1
    assert choices(ns) == {TWO}


def test_adopting_drops_the_graphs_of_other_kernels(bench):
    ns = NewtonSchulz(autotune=True)
    old = graph.GraphReplay(RecordingDevice())
    object.__setattr__(ns, "_graphs", old)
    ns.adopt({})
    assert ns.graphs is not None
    assert ns.graphs is not old


def test_wrong_shape_raises_before_anything_is_tuned(bench):
    with pytest.raises(ConfigurationError, match="takes a matrix"):
        NewtonSchulz(autotune=True)(torch.ones(3))


def test_empty_matrix_needs_no_tuning(bench):
    assert NewtonSchulz(autotune=True)(torch.ones(0, 3)).shape == (0, 3)
    assert bench.total == 0


class Listening(ProductRecorder):
    """Notes products of real tensors, computes them, and answers about the device that they are on."""

    def one_by_one(self, rows, dtype, device):
        return self.model.one_by_one(rows, dtype, device)

    def symmetric_share(self, rows, depth, dtype, device):
        return self.model.symmetric_share(rows, depth, dtype, device)

    def gram(self, X):
        super().gram(X)
        return self.model.gram(X)

    def symmetric(self, A, B, C=None, **scalars):
        super().symmetric(A, B, C, **scalars)
        return self.model.symmetric(A, B, C, **scalars)


def products_of_a_real_call(ns: NewtonSchulz, G: torch.Tensor, steps: int | None) -> set[Product]:
    listening = Listening(ns._kernel, CPU)
    object.__setattr__(ns, "_kernel", listening)
    ns(G, steps=steps)
    return listening.products


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backend": "direct"},
        {"backend": "auto", "dtype": torch.bfloat16},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16, "gram_dtype": torch.float32},
        {"restart_iterations": [1, 2]},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(70, 70), (300, 420), (420, 300), (2, 300, 300), (5, 20, 40), (1, 40, 20)], ids=str)
@pytest.mark.parametrize("steps", [None, 4])
def test_recorded_products_are_those_of_a_real_call(shape, options, steps):
    recorded = NewtonSchulz(**options).products(shape, dtype=torch.float32, device=CPU, steps=steps)
    assert recorded == products_of_a_real_call(NewtonSchulz(**options), gaussian(*shape), steps)
    assert recorded


def test_products_of_a_tall_matrix_are_of_columns():
    for shape, row_major in [((40, 60), True), ((60, 40), False)]:
        products = NewtonSchulz().products(shape, dtype=torch.float32, device=CPU)
        assert {product.row_major for product in products if product.gram} == {row_major}


def test_products_of_a_gpu_are_those_of_its_dtype_and_device(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr("torch.empty", lambda *args, device=None, **kw: empty(*args, device="meta", **kw))
    found = NewtonSchulz().products((2, 64, 96), dtype=torch.float32, device=torch.device("cuda", 3))
    assert {(product.device, product.dtype, product.batch) for product in found} == {("cuda", torch.float16, 2)}


def test_tuned_kernel_answers_about_costs_as_its_default():
    kernel, library = TunedKernel(LibraryKernel(), {}), LibraryKernel()
    for rows in (64, 640):
        assert kernel.one_by_one(rows, torch.float32, CPU) == library.one_by_one(rows, torch.float32, CPU)
        share = library.symmetric_share(rows, rows, torch.float32, CPU)
        assert kernel.symmetric_share(rows, rows, torch.float32, CPU) == share
    assert kernel.name == "cublas"
