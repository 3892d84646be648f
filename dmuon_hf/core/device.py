"""Streams, events and devices behind one interface, so that the same runtime drives CUDA/NCCL and CPU/gloo.

On the CPU every stream and event is torch's own no-op and a collective is waited for through its work handle; on an
accelerator a collective is ordered by events on side streams and the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DeviceHandle", "device_of_mesh", "host_to_device"]


class DeviceHandle:
    """Access to the streams and events of one device.

    Attributes:
        host_wait: How the host waits for a work handle of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host_wait: Callable[[Any], object] = _wait

    @property
    def _module(self) -> ModuleType:
        # Looked up each time: a module object as an attribute would make everything that holds this uncopyable.
        module: ModuleType = torch.get_device_module(self.device.type)
        return module

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    def new_stream(self, *, high_priority: bool) -> Any:
        """A side stream; high priority for what the next computation waits for."""
        priority = -1 if high_priority else 0
        if self.is_cpu:
            return self._module.Stream(priority=priority)
        return self._module.Stream(device=self.device, priority=priority)

    def current_stream(self) -> Any:
        return self._module.current_stream(self.device)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def record_event(self, stream: Any) -> Any:
        return stream.record_event()

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of ``tensor``, once it is dropped, until ``stream`` has done what it was given by then."""
        tensor.record_stream(stream)


def _wait(work: Any) -> None:
    work.wait()


def host_to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small tensor of the host to ``device``; the host does not wait for what the device is doing.

    A copy from ordinary memory would: CUDA waits for its stream first. The pinned copy is kept by torch's allocator for
    pinned memory until the device has read it.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    """The device this rank computes on: the CPU, or the current accelerator of the mesh's type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
