"""`CollectiveCounter` against bytes computed by hand."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import run_ranks
from tests.harness.comm import CollectiveCounter
from tests.harness.models import dense_batch, tiny_mlp

WORLD = 4
SHARE = (WORLD - 1) / WORLD
BYTES = 240 * 4  # one fp32 tensor of 240 numbers


def _new(name: str) -> Any:
    """The collective under its present name."""
    return getattr(dist, name)


def _collectives(rank: int, world: int) -> dict[str, Any]:
    whole = torch.ones(240)
    part = torch.ones(240 // world)
    return {
        "broadcast": lambda: dist.broadcast(whole, 1),
        "reduce": lambda: dist.reduce(whole, 2),
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather([torch.empty(60) for _ in range(world)], part),
        "all_gather_single": lambda: _new("all_gather_single")(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, list(whole.chunk(world))),
        "reduce_scatter_single": lambda: _new("reduce_scatter_single")(part, whole),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(240), whole),
        "gather": lambda: dist.gather(part, [torch.empty(60) for _ in range(world)] if rank == 0 else None),
        "scatter": lambda: dist.scatter(part, list(whole.chunk(world)) if rank == 0 else None),
        "barrier": dist.barrier,
    }


def _count_each(rank: int, world: int) -> dict[str, tuple[int, int, float, str]]:
    counted = {}
    for name, call in _collectives(rank, world).items():
        with CollectiveCounter() as counter:
            call()
        (record,) = counter.records
        counted[name] = (counter.calls(), record.payload, counter.ring_bytes(), record.kind)
    return counted


def test_eager_collectives_count_ring_bytes():
    for counted in run_ranks(_count_each, WORLD):
        barrier = counted.pop("barrier")
        assert barrier == (1, 0, 0, "barrier")
        for name, (calls, payload, ring, kind) in counted.items():
            assert calls == 1, name
            assert payload == BYTES, name
            assert ring == pytest.approx(BYTES * SHARE * (2 if name == "all_reduce" else 1)), name
            assert name.startswith(kind), name


def _count_uneven(rank: int, world: int) -> tuple[float, float]:
    rows = [1, 2, 3, 4]
    sent = torch.ones(sum(rows), 5)
    received = torch.empty(rows[rank] * world, 5)
    with CollectiveCounter() as counter:
        dist.all_to_all_single(received, sent, [rows[rank]] * world, rows)
        dist.all_to_all_single(sent, received, rows, [rows[rank]] * world)
    return counter.records[0].ring_bytes, counter.records[1].ring_bytes


def test_uneven_all_to_all_counts_what_each_rank_sends_to_others():
    results = run_ranks(_count_uneven, WORLD)
    row = 5 * 4
    assert results == [((10 - n) * row, n * 3 * row) for n in (1, 2, 3, 4)]
    # The mean over ranks is the ring formula, in both directions.
    for direction in (0, 1):
        assert sum(r[direction] for r in results) / WORLD == SHARE * 10 * row


def _count_p2p(rank: int, world: int) -> dict[str, tuple[int, float]]:
    other = 1 - rank
    value, into = torch.ones(8), torch.empty(8)
    with CollectiveCounter() as counter:
        ops = [dist.P2POp(dist.isend, value, other), dist.P2POp(dist.irecv, into, other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return counter.by_kind()


def test_point_to_point_bytes_count_once_at_the_sender():
    assert run_ranks(_count_p2p, 2) == [{"recv": (1, 0), "send": (1, 32)}] * 2


def _count_functional(rank: int, world: int) -> dict[str, tuple[int, float]]:
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    sharded = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    with CollectiveCounter() as counter:
        sharded.full_tensor()
        funcol.all_reduce(torch.ones(16), "sum", mesh).sum().item()
        sharded.redistribute(mesh, [Shard(1)]).to_local().sum().item()
    return counter.by_kind()


def test_functional_collectives_of_dtensor_are_counted_once():
    for counted in run_ranks(_count_functional, 2):
        # On CPU DTensor moves a shard to another dimension by a second all-gather.
        assert counted == {"all_gather": (2, 256), "all_reduce": (1, 64)}


class _ReduceInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad, async_op=True).wait()
        return grad


def _count_everywhere(rank: int, world: int) -> tuple[int, int, int, list[str]]:
    x = torch.ones(4, requires_grad=True)
    group = dist.new_group([0, 1], group_desc="made by the test")
    with CollectiveCounter(tags={"mine": group}) as counter:
        with counter.phase("backward"):
            _ReduceInBackward.apply(x).sum().backward()
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),), kwargs={"group": group}, name="worker")
        thread.start()
        thread.join()
    dist.all_reduce(torch.ones(2))  # outside: not counted
    return (
        counter.calls(),
        counter.calls(phase="backward"),
        counter.calls(tag="mine"),
        [r.thread for r in counter.records],
    )


def test_async_backward_and_thread_collectives_are_counted_with_phase_and_tag():
    assert run_ranks(_count_everywhere, 2) == [(2, 1, 1, ["MainThread", "worker"])] * 2


def _count_fsdp2(rank: int, world: int) -> tuple[dict[str, tuple[int, float]], int]:
    from torch.distributed.fsdp import fully_shard

    model: nn.Module = tiny_mlp(n_layers=2)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with CollectiveCounter() as counter:
        model(dense_batch(0)).backward()
    return counter.by_kind(), sum(p.numel() for p in model.layers.parameters())


def test_fsdp2_step_counts_its_gathers_and_scatters():
    for counted, block_numel in run_ranks(_count_fsdp2, 2):
        # Two blocks and the root: gathered in forward, blocks again in backward (but the last), scattered once.
        gathers, gathered = counted["all_gather"]
        scatters, scattered = counted["reduce_scatter"]
        assert scatters == 3
        assert gathers in (4, 5)
        head = 2 * 16 * 4  # one row, padded to two ranks
        assert scattered == pytest.approx((block_numel * 4 + head) / 2)
        assert gathered > scattered


def _patch_state(rank: int, world: int) -> bool:
    def wrapped() -> tuple[object, object]:
        return dist.ProcessGroup.__dict__["allreduce"], torch.ops._c10d_functional.all_reduce

    before = wrapped()
    with CollectiveCounter() as counter:
        during = wrapped()
    dist.all_reduce(torch.ones(1))
    return wrapped() == before and not set(map(id, before)) & set(map(id, during)) and counter.calls() == 0


def test_leaving_the_counter_restores_what_it_wrapped():
    assert run_ranks(_patch_state, 1) == [True]


def _nested(rank: int, world: int) -> tuple[int, int]:
    with CollectiveCounter() as outer:
        dist.all_reduce(torch.ones(1))
        with CollectiveCounter() as inner:
            dist.all_reduce(torch.ones(1))
    return outer.calls(), inner.calls()


def test_nested_counters_both_record():
    assert run_ranks(_nested, 1) == [(2, 1)]
