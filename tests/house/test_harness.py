"""The harness itself: what it returns, and what it reports when a rank fails, dies or hangs."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.harness import RanksFailedError, init_gloo, run_ranks, run_ranks_outcomes
from tests.harness.comm import CollectiveCounter
from tests.harness.fake import fake_world
from tests.harness.faults import die, fail, hang, on_call


def _all_reduce(rank: int, world: int, scale: float) -> torch.Tensor:
    value = torch.full((3,), float(rank + 1)) * scale
    dist.all_reduce(value)
    return value


def test_ranks_that_return_give_results_in_rank_order():
    results = run_ranks(_rank_and_world, 3)
    assert results == [(0, 3), (1, 3), (2, 3)]


def _rank_and_world(rank: int, world: int) -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def test_tensor_results_are_copies_of_each_ranks_value():
    results = run_ranks(_all_reduce, 4, 0.5)
    for result in results:
        torch.testing.assert_close(result, torch.full((3,), 5.0))


def test_dtensor_result_is_refused_with_advice():
    with pytest.raises(RanksFailedError, match="full_tensor"):
        run_ranks(_return_dtensor, 1)


def _return_dtensor(rank: int, world: int) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(torch.ones(2), init_device_mesh("cpu", (world,)))


def test_forked_ranks_find_imports_preloaded():
    (loaded,) = run_ranks(_preloaded, 1, init=False)
    assert loaded == []


def _preloaded(rank: int, world: int) -> list[str]:
    from tests.harness import preload

    return [name for name in preload.MODULES if name not in sys.modules]


@pytest.mark.parametrize("asked", [True, False])
def test_preloaded_package_looks_at_the_environment_of_the_rank(asked: bool):
    env = {"ACCELERATE_USE_FSDP": "true" if asked else None}
    assert run_ranks(_hooked, 1, init=False, env=env) == [asked]


def _hooked(rank: int, world: int) -> bool:
    from dmuon_hf import hooks

    return hooks.installed()


def test_failing_rank_is_reported_with_its_traceback_first():
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_fail_on_one, 2, 1)
    text = str(caught.value)
    assert "deliberate trouble" in text
    assert "in _fail_on_one" in text
    assert text.index("rank 1 raised") < text.index("rank 0")


def _fail_on_one(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        raise ValueError("deliberate trouble")
    dist.barrier()


def test_outcomes_name_exception_type_and_message_per_rank():
    outcomes = run_ranks_outcomes(_fail_on_one, 2, 0, timeout=30)
    assert outcomes[0].status == "raised"
    assert outcomes[0].exception is not None
    assert outcomes[0].exception.is_a(ValueError)
    assert not outcomes[0].exception.is_a(KeyError)
    assert outcomes[0].exception.message == "deliberate trouble"
    # gloo tells the other rank that its peer is gone.
    assert outcomes[1].status == "raised"


def test_hanging_rank_is_reported_with_stacks_of_all_ranks():
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_hang_on_one, 2, timeout=3)
    text = str(caught.value)
    assert "rank 0 hung" in text
    assert "rank 1 hung" in text
    assert "in hang" in text
    assert "in _wait_in_barrier" in text


def _hang_on_one(rank: int, world: int) -> None:
    if rank == 1:
        hang()
    _wait_in_barrier()


def _wait_in_barrier() -> None:
    dist.barrier()


def test_killed_rank_is_reported_with_its_signal():
    outcomes = run_ranks_outcomes(_die_on_one, 2, timeout=30)
    assert (outcomes[1].status, outcomes[1].exit_code) == ("died", -9)
    assert outcomes[0].status == "raised"


def _die_on_one(rank: int, world: int) -> None:
    if rank == 1:
        die()
    dist.barrier()


def test_survivors_of_a_failure_are_stopped_after_the_grace_time():
    outcomes = run_ranks_outcomes(_fail_while_other_sleeps, 2, timeout=3600, grace=0.5)
    assert [o.status for o in outcomes] == ["raised", "hung"]


def _return() -> None:
    pass


def _fail_while_other_sleeps(rank: int, world: int) -> None:
    if rank == 0:
        fail()
    hang()


@pytest.mark.parametrize("end", [_return, fail, die])
def test_lingering_rank_leaves_when_the_others_have_ended(end: Callable[[], None]):
    outcomes = run_ranks_outcomes(_fail_before, 2, end, timeout=3600, linger=3600)
    assert outcomes[0].status == "raised"


def _fail_before(rank: int, world: int, end: Callable[[], None]) -> None:
    if rank == 0:
        fail()
    end()


def test_expected_failure_that_does_not_come_is_an_error():
    with pytest.raises(RanksFailedError, match="a failure was expected"):
        run_ranks(_rank_and_world, 1, expect_failure=True)


def test_environment_is_set_for_all_ranks_or_for_each():
    assert run_ranks(_getenv, 2, "DMUON_TEST", env={"DMUON_TEST": "x"}) == ["x", "x"]
    assert run_ranks(_getenv, 2, "DMUON_TEST", env=[{"DMUON_TEST": "a"}, {}]) == ["a", None]


def _getenv(rank: int, world: int, name: str) -> str | None:
    return os.environ.get(name)


def test_single_rank_without_init_is_a_plain_process():
    assert run_ranks(_plain_process, 1, init=False) == [(False, None)]


def _plain_process(rank: int, world: int) -> tuple[bool, str | None]:
    return dist.is_initialized(), os.environ.get("RANK")


def test_ranks_without_init_can_initialise_from_the_environment():
    assert run_ranks(_init_from_environment, 2, init=False) == [3.0, 3.0]


def _init_from_environment(rank: int, world: int) -> float:
    dist.init_process_group("gloo")
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return value.item()


def test_process_group_can_be_made_again_after_destroy():
    assert run_ranks(_init_twice, 2) == [6.0, 6.0]


def _init_twice(rank: int, world: int) -> float:
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    dist.destroy_process_group()
    init_gloo("again")
    dist.all_reduce(value)
    return value.item()


def test_slow_rank_is_not_disturbed_by_ranks_that_finished():
    assert run_ranks(_receive_late, 2) == [0.0, 7.0]


def _receive_late(rank: int, world: int) -> float:
    value = torch.zeros(1)
    if rank == 0:
        dist.send(torch.tensor([7.0]), 1)
        return value.item()
    time.sleep(0.3)
    dist.recv(value, 0)
    return value.item()


def test_fault_on_nth_call_fires_once_and_is_undone():
    seen: list[int] = []
    holder = _Holder()
    with on_call(_Holder, "work", lambda: seen.append(1), nth=2, when="after"):
        for _ in range(3):
            holder.work()
        assert seen == [1]
    holder.work()
    holder.work()
    assert seen == [1]


class _Holder:
    def work(self) -> int:
        return 1


def test_output_of_a_failing_rank_is_shown():
    with pytest.raises(RanksFailedError, match="a line on stderr"):
        run_ranks(_print_and_fail, 1)


def _print_and_fail(rank: int, world: int) -> None:
    os.write(2, b"a line on stderr\n")
    fail()


def test_deprecated_call_made_by_the_package_fails_the_rank():
    outcomes = run_ranks_outcomes(_deprecated_call, 2, timeout=30)
    assert [o.status for o in outcomes] == ["raised", "returned"]


def _deprecated_call(rank: int, world: int) -> None:
    module = "dmuon_hf.core.runtime" if rank == 0 else "torch.distributed"
    warnings.warn_explicit("old", FutureWarning, "file.py", 1, module=module)


def test_fake_world_counts_collectives_of_a_thousand_ranks():
    assert run_ranks(_collective_in_fake_world, 1, init=False) == [(1024, pytest.approx(2 * 1023 / 1024 * 400))]


def _collective_in_fake_world(rank: int, world: int) -> tuple[int, float]:
    with fake_world(1024, rank=5), CollectiveCounter() as counter:
        dist.all_reduce(torch.ones(100))
        return counter.records[0].group_size, counter.ring_bytes()


def test_bad_world_size_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(_rank_and_world, 0)
