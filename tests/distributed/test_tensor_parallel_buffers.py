"""``tp_buffer_reuse``: the buffers of the exchange between tensor-parallel ranks are kept, and nothing else changes."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch

import dmuon_hf.core as dmuon
from dmuon_hf.core.optim import tensor_parallel
from dmuon_hf.core.scratch import Scratch
from dmuon_hf.core.sharded.plan import make_sharded_plan
from tests.distributed.tp_training import TpRun, backward, prepare, snapshot, world_of
from tests.distributed.training import Run
from tests.harness import run_ranks


def allocate_and_train(rank: int, world: int, mode: str, reuse: bool | str, dtype: str) -> dict[str, Any]:
    """Bytes of fresh buffers in each step, and the weights after the last one; with several buckets in a step."""
    ns = {"ns_backend": dmuon.NewtonSchulz(dtype=getattr(torch, dtype))}
    tp = TpRun(mode, Run("tp", "llama", dedicate={"tp_buffer_reuse": reuse}, muon=ns))
    allocated: list[int] = []
    small = functools.partial(make_sharded_plan, bucket_numel=2048)
    fresh = Scratch._fresh

    def counted(scratch: Scratch, numel: int, dtype: torch.dtype) -> torch.Tensor:
        allocated[-1] += numel * dtype.itemsize
        return fresh(scratch, numel, dtype)

    with mock.patch.object(tensor_parallel, "make_sharded_plan", small), mock.patch.object(Scratch, "_fresh", counted):
        model, optimizer = prepare(tp)
        for step in range(3):
            allocated.append(0)
            backward(model, tp, step, rank)
            optimizer.step()
            optimizer.zero_grad()
    return {"allocated": allocated, "weights": snapshot(model, optimizer, "weights")}


@pytest.mark.parametrize(("mode", "dtype"), [("tp", "float32"), ("ddp_tp", "bfloat16")])
def test_kept_buffers_are_allocated_once_and_give_the_same_bits(mode: str, dtype: str) -> None:
    runs = {
        reuse: run_ranks(allocate_and_train, world_of(mode), mode, reuse, dtype) for reuse in (False, "gather", True)
    }
    for rank, fresh in enumerate(runs[False]):
        bytes_of = {reuse: results[rank]["allocated"] for reuse, results in runs.items()}
        first, *later = bytes_of[False]
        assert later == [first, first] and first > 0
        assert bytes_of[True][0] < first and bytes_of[True][1:] == [0, 0]
        assert 0 < bytes_of["gather"][1] == bytes_of["gather"][2] < first
        for reuse in ("gather", True):
            for name, value in fresh["weights"].items():
                assert torch.equal(runs[reuse][rank]["weights"][name], value), name
