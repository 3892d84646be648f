"""Section of the GPU check about what the runtime says to the device: streams, NCCL, copies, checks of gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_model import one_rank
from gpu_timing import Report, Setting
from torch import Tensor
from torch.distributed import ProcessGroup

from dmuon_hf.core.device import host_to_device
from dmuon_hf.core.optim.gradients import check_and_unscale_
from dmuon_hf.core.process_groups import clone_group
from dmuon_hf.core.runtime import DedicatedCommContext
from dmuon_hf.core.runtime.collectives import (
    broadcast_segments,
    exchange_to_owners,
    issue_on,
    reduce_segments_to_owners,
    uses_nccl,
)

__all__ = ["check_runtime"]

Issue = Callable[[Tensor, ProcessGroup], list[Any]]


def check_runtime(setting: Setting) -> Report:
    """Collectives on side streams in a group of one rank, in every order of waiting and dropping; gradient checks."""
    report = Report()
    with one_rank(setting.device) as mesh:
        group = clone_group([0], like=mesh.get_group(), purpose="check")
        device = host_to_device(torch.zeros(1), setting.device).device
        context = DedicatedCommContext(device)
        report.check(uses_nccl(group, device) is setting.cuda, f"NCCL is taken for {dist.get_backend(group)}")
        for (name, issue), waited in itertools.product(_collectives().items(), (True, False)):
            with report.part(name):
                _check_collective(name, issue, waited, context, group, report)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        with report.part(f"gradients in {dtype}"):
            _check_gradients(dtype, device, report)
    return report


def _collectives() -> dict[str, Issue]:
    def broadcast(buffer: Tensor, group: ProcessGroup) -> list[Any]:
        return broadcast_segments([buffer[:24], buffer[24:]], [0, 0], group)

    def reduce(buffer: Tensor, group: ProcessGroup) -> list[Any]:
        return reduce_segments_to_owners([buffer[:24], buffer[24:]], [0, 0], group)

    def exchange(buffer: Tensor, group: ProcessGroup) -> list[Any]:
        received = torch.empty_like(buffer)
        for work in exchange_to_owners(buffer, received, [len(buffer)], len(buffer), group):
            work.wait()
        buffer.copy_(received)
        return []

    return {"broadcast": broadcast, "reduce": reduce, "exchange": exchange}


def _check_collective(
    name: str, issue: Issue, waited: bool, context: DedicatedCommContext, group: ProcessGroup, report: Report
) -> None:
    """A collective of one rank changes nothing, and later memory of the same size is not written by it."""
    device = context.device.device
    for round_ in range(20):
        expected = torch.arange(1 << 20, dtype=torch.float32, device=device) + round_
        buffer = expected.clone()
        flight = issue_on(
            context.device,
            context.broadcast_stream,
            [buffer],
            lambda buffer=buffer: issue(buffer, group),
        )
        if waited:
            flight.wait()
            report.check(torch.equal(buffer, expected), f"{name}: round {round_} changed its values")
        del flight, buffer
        fresh = torch.full_like(expected, -1.0)
        report.check(bool((fresh == -1.0).all()), f"{name}: round {round_} wrote into memory that was given back")


def _check_gradients(dtype: torch.dtype, device: torch.device, report: Report) -> None:
    for bad in (None, math.inf, math.nan):
        grads = [torch.full((33, 7), 8.0, dtype=dtype, device=device), torch.ones(5, dtype=dtype, device=device)]
        if bad is not None:
            grads[1][4] = bad
        found = bool(check_and_unscale_(grads, torch.tensor(4.0, device=device), device) > 0)
        report.check(found is (bad is not None), f"{dtype}: {bad} among the gradients")
        report.check(bool((grads[0] == 2.0).all()), f"{dtype}: not divided by the loss scale")
