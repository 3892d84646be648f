from __future__ import annotations

import logging
import pickle

import pytest
import torch

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns import NewtonSchulz, graph, support
from dmuon_hf.core.ns.graph import GraphReplay
from tests.unit.ns_reference import gaussian


class RecordingDevice:
    """A CPU that captures: a replay runs the function again on the same input and writes into the same output."""

    def __init__(self) -> None:
        self.current_stream = 0
        self.captures = 0
        self.replays = 0
        self.failing = False

    def stream(self, device):
        return self.current_stream

    def capture(self, run, device):
        if self.failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1
        output = torch.full_like(run(), float("nan"))

        def replay() -> None:
            self.replays += 1
            output.copy_(run())

        return replay, output


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("DMUON_NS_CUDA_GRAPH", raising=False)
    monkeypatch.delenv("DMUON_NS_KERNEL", raising=False)
    support.log_once.cache_clear()


@pytest.fixture
def device():
    return RecordingDevice()


@pytest.fixture
def ns(monkeypatch, device):
    """A ``NewtonSchulz`` that replays graphs of the recording device."""
    monkeypatch.setattr(graph, "_has_cuda", lambda: True)
    ns = NewtonSchulz(cuda_graph=True)
    object.__setattr__(ns, "_graphs", GraphReplay(device))
    return ns


def test_first_call_is_eager_second_captures_later_ones_replay(ns, device):
    counts = []
    for seed in range(4):
        G = gaussian(8, 12, seed=seed)
        assert torch.equal(ns(G), NewtonSchulz()(G))
        counts.append((device.captures, device.replays))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3)]


def test_results_of_two_replays_share_no_memory(ns):
    ns(gaussian(8, 12))
    first, G = ns(gaussian(8, 12, seed=1)), gaussian(8, 12, seed=2)
    kept = first.clone()
    ns(G)
    assert torch.equal(first, kept)


def test_the_caller_may_change_its_input_after_the_capture(ns):
    G = gaussian(8, 12)
    ns(G), ns(G)
    G.zero_()
    assert torch.equal(ns(gaussian(8, 12, seed=1)), NewtonSchulz()(gaussian(8, 12, seed=1)))
    assert torch.equal(ns(G), G)


def test_input_that_requires_grad_leaves_no_history(ns):
    for _ in range(3):
        assert not ns(gaussian(8, 12).requires_grad_()).requires_grad


def test_strided_input_is_replayed_with_its_own_values(ns, device):
    G = gaussian(12, 8).T
    ns(gaussian(8, 12)), ns(gaussian(8, 12))
    assert torch.equal(ns(G), NewtonSchulz()(G.contiguous()))
    assert device.captures == 1


@pytest.mark.parametrize("change", ["shape", "dtype", "steps", "stream"])
def test_each_kind_of_call_has_its_own_graph(ns, device, change):
    G, steps = gaussian(8, 12), 5
    ns(G, steps=steps), ns(G, steps=steps)
    if change == "shape":
        G = gaussian(8, 13)
    elif change == "dtype":
        G = G.double()
    elif change == "steps":
        steps = 4
    else:
        device.current_stream = 1
    for _ in range(2):
        assert torch.equal(ns(G, steps=steps), NewtonSchulz()(G, steps=steps))
    assert device.captures == 2


def test_failed_capture_stays_eager_and_is_logged_once(ns, device, caplog):
    device.failing = True
    with caplog.at_level(logging.INFO, logger="dmuon_hf.core.ns"):
        for _ in range(4):
            assert torch.equal(ns(gaussian(8, 12)), NewtonSchulz()(gaussian(8, 12)))
    messages = [record.getMessage() for record in caplog.records if "capture" in record.getMessage()]
    assert messages == [
        "Newton-Schulz runs eagerly where its capture as a CUDA graph failed: "
        "operation not permitted when stream is capturing"
    ]
    device.failing = False
    ns(gaussian(8, 12))
    assert device.captures == 0


def test_large_and_empty_inputs_stay_eager(ns, device, monkeypatch):
    monkeypatch.setattr(graph, "MOST_NUMEL", 95)
    for G in (gaussian(8, 12), gaussian(0, 12)):
        for _ in range(3):
            ns(G)
    assert device.captures == 0


def test_shapes_beyond_the_limit_stay_eager(ns, device, monkeypatch):
    monkeypatch.setattr(graph, "MOST_BUCKETS", 2)
    for n in (4, 5, 6):
        for _ in range(2):
            assert torch.equal(ns(gaussian(3, n)), NewtonSchulz()(gaussian(3, n)))
    assert device.captures == 2


def test_cpu_tensors_stay_eager_beside_a_gpu(monkeypatch, caplog):
    monkeypatch.setattr(graph, "_has_cuda", lambda: True)
    ns, G = NewtonSchulz(cuda_graph=True), gaussian(8, 12)
    with caplog.at_level(logging.INFO, logger="dmuon_hf.core.ns"):
        assert torch.equal(ns(G), ns(G))
    assert sum("CPU are not replayed" in record.getMessage() for record in caplog.records) == 1


def test_wrong_shape_raises_before_a_capture(ns, device):
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="takes a matrix"):
            ns(torch.ones(3))
    assert device.captures == 0


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_environment_counts_without_an_argument(monkeypatch, value, expected):
    monkeypatch.setattr(graph, "_has_cuda", lambda: True)
    monkeypatch.setenv("DMUON_NS_CUDA_GRAPH", value)
    assert (NewtonSchulz()._graphs is not None) is expected


def test_argument_wins_over_the_environment(monkeypatch):
    monkeypatch.setattr(graph, "_has_cuda", lambda: True)
    monkeypatch.setenv("DMUON_NS_CUDA_GRAPH", "1")
    assert NewtonSchulz(cuda_graph=False)._graphs is None
    monkeypatch.setenv("DMUON_NS_CUDA_GRAPH", "0")
    assert NewtonSchulz(cuda_graph=True)._graphs is not None


def test_graphs_without_cuda_raise_with_what_asked_for_them(monkeypatch):
    with pytest.raises(ConfigurationError, match="cuda_graph=True has no effect on a machine without a CUDA device"):
        NewtonSchulz(cuda_graph=True)
    monkeypatch.setenv("DMUON_NS_CUDA_GRAPH", "1")
    with pytest.raises(ConfigurationError, match="DMUON_NS_CUDA_GRAPH=1 has no effect"):
        NewtonSchulz()


def test_a_copy_captures_its_own_graphs(ns, device):
    ns(gaussian(8, 12)), ns(gaussian(8, 12))
    copy = pickle.loads(pickle.dumps(ns))
    assert copy == ns
    assert copy._graphs is not None
    assert copy._graphs is not ns._graphs
