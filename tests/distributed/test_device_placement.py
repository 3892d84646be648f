"""On an accelerator everything stays on the device, and a step waits for it once.

The meta device stands for the accelerator: like CUDA it refuses operators that mix its tensors with the host's.
Collectives move nothing; each asserts that its tensors are on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import dmuon_hf.core as dmuon
from dmuon_hf.core import mesh as meshes
from dmuon_hf.core.runtime import collectives, comm_context, reduction, require_runtime
from tests.harness import run_ranks
from tests.harness.fake import fake_world
from tests.harness.models import uneven_model
from tests.harness.stream_order import StreamOrder
from tests.harness.streams import FakeHandle

DEVICE = torch.device("meta")


class Transfers(TorchDispatchMode):
    """Counts copies from the host to the device; with ``to_host`` the other way."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device = 0
        self.to_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::_to_copy", "aten::copy_") and result.is_meta:
            self.to_device += not args[-1 if name == "aten::copy_" else 0].is_meta
        return result


class Done:
    def wait(self, timeout: Any = None) -> bool:
        return True


def collective(name: str) -> Callable[..., Any]:
    def issued(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        assert tensors, name
        assert all(tensor.is_meta for tensor in tensors), f"{name} of a tensor of the host"
        return Done() if async_op else None

    return issued


@contextmanager
def coalescing(group: Any, device: torch.device, async_ops: bool) -> Iterator[Any]:
    assert device == DEVICE
    assert async_ops
    yield dist.distributed_c10d._CoalescingManager()


@contextmanager
def on_the_device(transfers: Transfers) -> Iterator[None]:
    """The path for accelerators with the meta device."""
    cpu, equal = torch.Tensor.cpu, torch.equal

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        transfers.to_host += tensor.is_meta
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else cpu(tensor)

    with ExitStack() as patches:
        for where, name, value in (
            (comm_context, "DeviceHandle", functools.partial(FakeHandle, order=StreamOrder())),
            (meshes, "device_of_mesh", lambda mesh: DEVICE),
            (collectives, "uses_nccl", lambda group, device: True),
            (reduction, "uses_nccl", lambda group, device: True),
            (collectives, "_coalescing_manager", coalescing),
            *((dist, name, collective(name)) for name in ("broadcast", "reduce", "all_reduce")),
            (torch.Tensor, "cpu", to_host),
            # Once, when the optimizer is built.
            (torch, "equal", lambda a, b: True if a.is_meta else equal(a, b)),
        ):
            patches.enter_context(mock.patch.object(where, name, value))
        patches.enter_context(transfers)
        yield


def build(world: int, options: dict[str, Any]) -> nn.Module:
    model = uneven_model()
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if not is_matrix(f"layers.{name}" if module is not model.head else "head", param):
                module._parameters[name] = nn.Parameter(param.detach().to(DEVICE), requires_grad=False)
    if options.pop("hsdp"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(model, mesh["shard"], is_matrix, replicate_mesh=mesh["replicate"], **options)
    else:
        dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), is_matrix, **options)
    return model


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return "layers" in name and param.ndim == 2


def all_finite(runtime: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The agreement with what it would have found."""
    agree = runtime.agree

    def agreed(values: torch.Tensor) -> torch.Tensor:
        assert values.is_meta
        flags = agree(values)
        assert flags.device.type == "cpu"
        count = runtime.backward_count
        # That no rank has a problem, and two digests and their negatives, come before the flags.
        return torch.tensor([0.0, count, -count] + [0.0] * 5 + [1.0] * (len(flags) - 8))

    return agreed


def train(rank: int, world: int, of: int, as_rank: int, options: dict[str, Any]) -> list[tuple[int, int]]:
    """Copies to the device and to the host in each of three steps."""
    transfers = Transfers()
    seen = []
    with fake_world(of, rank=as_rank), on_the_device(transfers):
        model = build(of, options)
        optimizer = dmuon.Muon(model)
        runtime = require_runtime(model)
        runtime.context.monitor.compare = lambda agreed: None  # type: ignore[method-assign]
        runtime.agree = all_finite(runtime)  # type: ignore[method-assign]
        for _ in range(3):
            with dmuon.no_sync(model):
                model(torch.empty(4, 64, device=DEVICE)).backward()
            model(torch.empty(4, 64, device=DEVICE)).backward()
            assert all(param.param.grad._local_tensor.is_meta for param in runtime.dedicated.values())
            transfers.to_device = transfers.to_host = 0
            optimizer.step()
            seen.append((transfers.to_device, transfers.to_host))
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"hsdp": False},
        {"hsdp": False, "compute_dtype": torch.bfloat16},
        {"hsdp": True},
        {"hsdp": True, "compute_dtype": torch.bfloat16, "reshard_after_forward": False},
    ],
    ids=str,
)
def test_nothing_leaves_the_device_but_what_a_step_agrees_on(options: dict[str, Any], rank: int) -> None:
    """Two small vectors go to it, without waiting, and one comes back."""
    assert run_ranks(train, 1, 4, rank, options, init=False) == [[(2, 1)] * 3]
