"""Newton-Schulz replayed as one CUDA graph per shape: small matrices need not wait for the launches of the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dmuon_hf.core.environment import switch
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns.support import log_once

__all__ = ["ENVIRONMENT_VARIABLE", "MOST_BUCKETS", "MOST_NUMEL", "GraphReplay", "wants_graphs"]

ENVIRONMENT_VARIABLE = "DMUON_NS_CUDA_GRAPH"

# A bucket keeps its input, its output and the largest intermediate results: larger inputs would cost memory and gain
# nothing, since their products take longer than their launches.
MOST_NUMEL = 1 << 24
MOST_BUCKETS = 64


def wants_graphs(choice: bool | None) -> bool:
    """``choice``, or if that is ``None`` what the environment variable ``DMUON_NS_CUDA_GRAPH`` says; off by default.

    Raises:
        ConfigurationError: the variable is no switch, or graphs on a machine without a CUDA device.
    """
    wants = switch(ENVIRONMENT_VARIABLE, given=choice)
    if wants and not _has_cuda():
        asked_by = f"{ENVIRONMENT_VARIABLE}=1" if choice is None else f"cuda_graph={choice}"
        raise ConfigurationError(f"{asked_by} has no effect on a machine without a CUDA device: leave it out there.")
    return wants


def _has_cuda() -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "cuda"


class Device(Protocol):
    """What ``GraphReplay`` needs of a device that captures graphs."""

    def stream(self, device: torch.device) -> Hashable:
        """The current stream: buffers of a graph belong to the stream that replays it."""

    def capture(self, run: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
        """Record ``run`` without executing it: what replays it, and the tensor that each replay fills anew."""


class CudaDevice:
    """The graphs of PyTorch's CUDA module. All graphs of a stream share one pool of memory for intermediate results."""

    def __init__(self) -> None:
        self._pools: dict[Hashable, Any] = {}

    def stream(self, device: torch.device) -> Hashable:
        number: int = torch.get_device_module(device).current_stream(device).cuda_stream
        return number

    def capture(self, run: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
        """As ``torch.cuda.graph``, which waits for the device and empties the allocator, for once per pool."""
        cuda = torch.get_device_module(device)
        key = (device, self.stream(device))
        with cuda.device(device):
            if key not in self._pools:
                # A capture cannot make room for itself: what the allocator keeps goes back once, before the first.
                cuda.empty_cache()
                self._pools[key] = cuda.graph_pool_handle()
            graph = cuda.CUDAGraph()
            with cuda.stream(cuda.graph(graph).capture_stream):
                # Other threads, NCCL's watchdog among them, may go on calling CUDA during the capture.
                graph.capture_begin(self._pools[key], capture_error_mode="thread_local")
                try:
                    output = run()
                finally:
                    graph.capture_end()
        return graph.replay, output


@dataclass(frozen=True, slots=True)
class _Bucket:
    replay: Callable[[], None]
    input: Tensor
    output: Tensor


class GraphReplay:
    """Runs a function of one tensor eagerly the first time it meets a shape, and as a captured graph from then on.

    The first call compiles kernels and creates library handles, which a capture must not. Inputs on a CPU or of more
    than ``MOST_NUMEL`` elements, shapes beyond the first ``MOST_BUCKETS``, and shapes whose capture failed stay eager;
    all but the second are logged once.
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device = device if device is not None else CudaDevice()
        self._buckets: dict[Hashable, _Bucket | None] = {}
        self._met: set[Hashable] = set()

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return sum(bucket is not None for bucket in self._buckets.values())

    @torch.no_grad()
    def __call__(self, function: Callable[[Tensor], Tensor], G: Tensor, variant: Hashable) -> Tensor:
        """``function(G)``, a new tensor without history; ``variant`` tells functions of different results apart."""
        if not self._may_capture(G):
            return function(G)
        key = (G.shape, G.dtype, G.device, self._device.stream(G.device), variant)
        if key not in self._met:
            if len(self._met) == MOST_BUCKETS:
                log_once(f"Newton-Schulz: only the first {MOST_BUCKETS} shapes are replayed as CUDA graphs")
            else:
                self._met.add(key)
            return function(G)
        if key not in self._buckets:
            self._buckets[key] = self._captured(function, G)
        bucket = self._buckets[key]
        if bucket is None:
            return function(G)
        bucket.input.copy_(G)
        bucket.replay()
        return bucket.output.clone()

    def _may_capture(self, G: Tensor) -> bool:
        if G.device.type == "cpu" and isinstance(self._device, CudaDevice):
            log_once("Newton-Schulz: tensors on a CPU are not replayed as CUDA graphs")
            return False
        return 0 < G.numel() <= MOST_NUMEL

    def _captured(self, function: Callable[[Tensor], Tensor], G: Tensor) -> _Bucket | None:
        static = G.detach().clone(memory_format=torch.contiguous_format)
        try:
            replay, output = self._device.capture(lambda: function(static), G.device)
        except RuntimeError as error:
            log_once(f"Newton-Schulz runs eagerly where its capture as a CUDA graph failed: {error}")
            return None
        return _Bucket(replay, static, output)
