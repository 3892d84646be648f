"""What is said to CUDA, without one: calls fit torch's own signatures, and streams end where they began."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dmuon_hf.core import device as devices
from dmuon_hf.core.device import DeviceHandle, host_to_device
from dmuon_hf.core.ns.graph import CudaDevice
from dmuon_hf.core.optim.gradients import check_and_unscale_
from dmuon_hf.core.optim.state import follow_parameters, fresh_state
from dmuon_hf.core.runtime.collectives import uses_nccl
from dmuon_hf.core.runtime.comm_context import DedicatedCommContext


class Recorded:
    """A device module that accepts what the real one of ``kind`` accepts, and keeps it."""

    def __init__(self, kind: str) -> None:
        self.calls: dict[str, dict[str, Any]] = {}
        real = torch.get_device_module(kind)
        self.signatures = {
            "Stream": inspect.signature(real.Stream.__new__ if kind != "cpu" else real.Stream.__init__),
            "current_stream": inspect.signature(real.current_stream),
            "stream": inspect.signature(real.stream),
        }

    def __getattr__(self, name: str) -> Any:
        signature = self.signatures[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*(("self",) if name == "Stream" else ()), *args, **kwargs)
            self.calls[name] = dict(bound.arguments)
            return SimpleNamespace()

        return call


@pytest.mark.parametrize("kind", ["cuda", "xpu", "cpu"])
def test_streams_are_asked_for_as_the_device_module_wants(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Recorded(kind)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = torch.device(kind, 1) if kind != "cpu" else torch.device(kind)
    handle = DeviceHandle(device)
    handle.stream(handle.new_stream(high_priority=True))
    handle.current_stream()
    assert module.calls["Stream"]["priority"] == -1
    assert module.calls["current_stream"] == {"device": device}
    if kind != "cpu":
        assert module.calls["Stream"]["device"] == device


def test_device_without_streams_can_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    context = DedicatedCommContext(torch.device("mps"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(AttributeError, match="Stream"):
        _ = context.broadcast_stream


class HostTensor:
    """A tensor of the host that writes down how it is copied."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def pin_memory(self) -> HostTensor:
        self.log.append("pin")
        return self

    def to(self, device: torch.device, *, non_blocking: bool = False) -> HostTensor:
        self.log.append(f"to {device.type}{' without waiting' if non_blocking else ''}")
        return self


def test_small_vector_goes_to_cuda_from_pinned_memory_without_waiting() -> None:
    log: list[str] = []
    host_to_device(HostTensor(log), torch.device("cuda", 0))  # type: ignore[arg-type]
    assert log == ["pin", "to cuda without waiting"]
    log.clear()
    host_to_device(HostTensor(log), torch.device("cpu"))  # type: ignore[arg-type]
    assert log == ["to cpu"]


def test_nccl_is_known_in_a_group_of_several_backends() -> None:
    names = {"cpu": "gloo", "cuda": "nccl"}
    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(name=lambda: names[device.type]))
    assert uses_nccl(group, torch.device("cuda", 0))  # type: ignore[arg-type]
    assert not uses_nccl(group, torch.device("cpu"))  # type: ignore[arg-type]


class Cuda:
    """The streams of ``torch.cuda`` without a device; ``torch.cuda.graph`` and ``torch.cuda.stream`` are torch's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failing: bool) -> None:
        stream = SimpleNamespace
        device = torch.device("cuda", 0)
        self.current = stream(device=device, cuda_stream=1)
        self.modes: list[str] = []
        self.emptied = 0
        side = stream(device=device, cuda_stream=2)
        cuda = self

        class Graph:
            def capture_begin(self, *pool: Any, capture_error_mode: str, **kwargs: Any) -> None:
                assert pool == (("pool", 0),)
                assert cuda.current is side
                cuda.modes.append(capture_error_mode)

            def capture_end(self) -> None:
                if failing:
                    raise RuntimeError("operation failed due to a previous error during capture")

            def replay(self) -> None: ...

        replaced = {
            "current_stream": lambda device=None: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "synchronize": lambda: None,
            "empty_cache": lambda: setattr(self, "emptied", self.emptied + 1),
            "graph_pool_handle": lambda: ("pool", 0),
            "device": lambda device: contextlib.nullcontext(),
            "_get_device_index": lambda device, optional=False: 0,
            "CUDAGraph": Graph,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", side)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)


@pytest.mark.parametrize("failing", [False, True])
def test_capture_leaves_the_current_stream_as_it_was(failing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, failing=failing)
    before = cuda.current
    expected = pytest.raises(RuntimeError, match="during capture") if failing else contextlib.nullcontext()
    with expected:
        CudaDevice().capture(lambda: torch.ones(1), torch.device("cuda", 0))
    assert cuda.current is before


def test_captures_share_a_pool_and_empty_the_allocator_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, device = Cuda(monkeypatch, failing=False), CudaDevice()
    for size in range(1, 4):
        device.capture(lambda n=size: torch.ones(n), torch.device("cuda", 0))  # type: ignore[misc]
    assert cuda.emptied == 1


def test_capture_of_a_function_that_raises_ends_and_gives_back_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, failing=False)
    before = cuda.current

    def raising() -> torch.Tensor:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        CudaDevice().capture(raising, torch.device("cuda", 0))
    assert cuda.current is before


def test_other_threads_may_call_cuda_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog does."""
    cuda = Cuda(monkeypatch, failing=False)
    CudaDevice().capture(lambda: torch.ones(1), torch.device("cuda", 0))
    assert cuda.modes == ["thread_local"]


@pytest.mark.parametrize("route", ["muon", "adamw"])
def test_state_follows_a_model_that_was_moved_after_the_optimizer_was_built(route: str) -> None:
    state = fresh_state(torch.zeros(3, 4), route)
    moved = torch.nn.Parameter(torch.zeros(3, 4, device="meta"))
    follow_parameters({moved: state})
    assert {key: value.device.type for key, value in state.items()} == {
        key: "cpu" if key == "step" else "meta" for key in state
    }


def test_device_of_a_cuda_mesh_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    mesh = SimpleNamespace(device_type="cuda")
    assert devices.device_of_mesh(mesh) == torch.device("cuda", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_are_checked_and_unscaled_in_every_type_with_what_cuda_has(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = torch._amp_foreach_non_finite_check_and_unscale_

    def of_cuda(grads: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        if grads[0].dtype == torch.bfloat16:
            raise NotImplementedError("_amp_foreach_non_finite_check_and_unscale_cuda not implemented for 'BFloat16'")
        kernel(grads, found, inverse)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", of_cuda)
    cpu = torch.device("cpu")
    for bad in (None, torch.inf, -torch.inf, torch.nan):
        grads = [torch.full((2, 3), 8.0, dtype=dtype), torch.ones(5, dtype=dtype), torch.empty(0, 3, dtype=dtype)]
        if bad is not None:
            grads[1][4] = bad
        found = check_and_unscale_(grads, torch.tensor(4.0), cpu)
        assert found.shape == (1,)
        assert bool(found > 0) is (bad is not None)
        assert torch.equal(grads[0], torch.full((2, 3), 2.0, dtype=dtype))
        again = check_and_unscale_(grads, None, cpu)
        assert bool(again > 0) is (bad is not None)
        assert torch.equal(grads[0], torch.full((2, 3), 2.0, dtype=dtype))
