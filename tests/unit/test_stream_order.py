"""The judge of stream orders itself: it finds each kind of fault, and nothing in a correct program."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.harness.stream_order import Stream, StreamOrder
from tests.harness.streams import fake_accelerator


class Program:
    """Two streams and shorthands for what they do."""

    def __init__(self) -> None:
        self.order = StreamOrder()
        self.compute = self.order.default
        self.side = Stream(self.order, "side")

    def allocate(self) -> torch.Tensor:
        tensor = torch.empty(4)
        self.order.allocated(tensor, "empty")
        return tensor

    def write(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.order.operation("write", reads=[], writes=[tensor], stream=stream)

    def read(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.order.operation("read", reads=[tensor], writes=[], stream=stream)

    def problems(self) -> list[str]:
        self.order.collect_freed()
        return self.order.problems


def test_read_after_a_write_on_another_stream_without_a_wait_is_a_race() -> None:
    program = Program()
    tensor = program.allocate()
    program.write(tensor, program.compute)
    program.read(tensor, program.side)
    assert len(program.problems()) == 1
    assert "race" in program.problems()[0]
    assert "wrote it on compute" in program.problems()[0]


def test_write_after_a_read_on_another_stream_without_a_wait_is_a_race() -> None:
    program = Program()
    tensor = program.allocate()
    program.read(tensor, program.side)
    program.write(tensor, program.compute)
    assert ["read it on side" in problem for problem in program.problems()] == [True]


def test_two_reads_on_two_streams_are_no_race() -> None:
    program = Program()
    tensor = program.allocate()
    program.read(tensor, program.side)
    program.read(tensor, program.compute)
    program.compute.wait_stream(program.side)
    assert program.problems() == []


def test_views_of_one_storage_race_like_the_whole() -> None:
    program = Program()
    tensor = program.allocate()
    program.write(tensor[:2], program.compute)
    program.read(tensor[1:], program.side)
    assert len(program.problems()) == 1


def test_event_orders_what_came_before_it_and_not_what_came_after() -> None:
    program = Program()
    tensor = program.allocate()
    program.write(tensor, program.side)
    event = program.side.record_event()
    program.compute.wait_event(event)
    program.read(tensor, program.compute)
    assert program.problems() == []
    program.side.wait_stream(program.compute)
    program.write(tensor, program.side)
    program.compute.wait_event(event)
    program.read(tensor, program.compute)
    assert len(program.problems()) == 1


def test_order_is_passed_on_through_a_third_stream() -> None:
    program = Program()
    third = Stream(program.order, "third")
    tensor = program.allocate()
    program.write(tensor, program.compute)
    third.wait_stream(program.compute)
    program.side.wait_stream(third)
    program.read(tensor, program.side)
    program.compute.wait_stream(program.side)
    assert program.problems() == []


def test_memory_dropped_while_another_stream_uses_it_is_an_early_free() -> None:
    program = Program()
    tensor = program.allocate()
    program.side.wait_stream(program.compute)
    program.read(tensor, program.side)
    del tensor
    program.compute.wait_stream(program.side)
    assert ["early free" in problem for problem in program.problems()] == [True]


def test_memory_dropped_after_its_stream_has_waited_is_in_order() -> None:
    program = Program()
    tensor = program.allocate()
    program.read(tensor, program.side)
    program.compute.wait_stream(program.side)
    del tensor
    assert program.problems() == []


def test_memory_recorded_on_the_other_stream_may_be_dropped_at_once() -> None:
    program = Program()
    tensor = program.allocate()
    program.read(tensor, program.side)
    program.order.record_stream(tensor, program.side)
    del tensor
    assert program.problems() == []


def test_memory_goes_back_to_the_stream_that_allocated_it() -> None:
    program = Program()
    with program.order.on(program.side):
        tensor = program.allocate()
    program.side.wait_stream(program.compute)
    program.write(tensor, program.compute)
    program.compute.wait_stream(program.side)
    del tensor
    assert ["goes back to side" in problem for problem in program.problems()] == [True]


def on_one_rank(rank: int, world: int, fault: str) -> tuple[list[str], dict[str, int]]:
    """A prefetch as the runtime does one, with a fault."""
    with fake_accelerator() as order:
        side = Stream(order, "side")
        source = torch.ones(4)
        buffer = torch.empty(4)
        source.mul_(2)
        if fault != "issues without waiting":
            side.wait_stream(order.current)
        with order.on(side):
            buffer.copy_(source)
            event = side.record_event()
        if fault == "empties in flight":
            buffer.untyped_storage().resize_(0)
        else:
            if fault != "uses without waiting":
                order.current.wait_event(event)
            buffer.sum()
    return order.problems, order.accesses


def test_operators_of_torch_are_seen_with_what_they_read_and_write() -> None:
    problems, accesses = run_ranks(on_one_rank, 1, "none", init=False)[0]
    assert problems == []
    assert accesses["side"] == 1


def test_faults_in_operators_of_torch_are_found() -> None:
    for fault, words in (
        ("issues without waiting", ["race", "mul_", "wrote it on compute", "copy_ reads it on side"]),
        ("uses without waiting", ["race", "copy_ wrote it on side", "sum reads it on compute"]),
        ("empties in flight", ["early free", "copy_ on side"]),
    ):
        problems, _ = run_ranks(on_one_rank, 1, fault, init=False)[0]
        assert any(all(word in problem for word in words) for problem in problems), (fault, problems)


def asynchronous_collective(rank: int, world: int, fault: str) -> list[str]:
    own = dist.new_group([0, 1], group_desc="dmuon_test")
    with fake_accelerator() as order:
        tensor = torch.ones(4)
        work = dist.all_reduce(tensor, group=own, async_op=True)
        if fault == "reads too soon":
            tensor.sum()
        work.wait()
        assert tensor.sum() == 8
    return order.problems


def test_asynchronous_collective_is_read_before_its_wait() -> None:
    assert run_ranks(asynchronous_collective, 2, "none") == [[], []]
    for problems in run_ranks(asynchronous_collective, 2, "reads too soon"):
        assert ["allreduce of dmuon_test wrote it" in problem for problem in problems] == [True]
