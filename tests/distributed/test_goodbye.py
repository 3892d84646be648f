"""A rank that leaves without an error, in whatever way, is named to those that wait for it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import LockstepError
from tests.distributed.lockstep_setup import part_of, prepare, run_script
from tests.harness import run_ranks

ENV = {"DMUON_HANG_SECONDS": "1", "DMUON_HANG_ABORT_SECONDS": "1"}


def destroy() -> None:
    dist.destroy_process_group()


def end_training() -> None:
    from accelerate.state import PartialState

    PartialState().destroy_process_group()


LEAVE = {leave.__name__: leave for leave in (destroy, end_training)}


def save(model: nn.Module) -> None:
    dmuon.get_model_state_dict(model)


def save_with_patience(model: nn.Module) -> None:
    dmuon.get_model_state_dict(model, timeout=timedelta(hours=1))


def run_layer(model: nn.Module) -> None:
    model.layers[1](part_of(0, 0, 2))  # without norms, so that its first collective is the package's own


WAIT = {wait.__name__: wait for wait in (save, save_with_patience, run_layer)}


def until(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def leave_and_stay(rank: int, world: int, leave: str, wait: str, directory: Path) -> str:
    """The last rank leaves its peers, but its process and its model live on; the others find out."""
    model, _ = prepare(world, "z3", norm=False)
    done = directory / "done"
    if rank == world - 1:
        LEAVE[leave]()
        until(done)
        assert model is not None
        return ""
    with pytest.raises(LockstepError) as caught:
        WAIT[wait](model)
    done.touch()
    return str(caught.value)


@pytest.mark.parametrize(
    ("leave", "wait"),
    [("destroy", "save"), ("destroy", "save_with_patience"), ("destroy", "run_layer"), ("end_training", "save")],
)
def test_rank_that_leaves_its_process_group_is_named_where_it_is_waited_for(
    leave: str, wait: str, tmp_path: Path
) -> None:
    message = run_ranks(leave_and_stay, 2, leave, wait, tmp_path, env=ENV)[0]
    assert "rank 1 has destroyed its process group" in message
    assert "never comes" in message


def leave_unwatched(rank: int, world: int, directory: Path) -> str:
    """A second group in the same store, as after a restart; then rank 1 leaves it, too."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = nn.Linear(2, 2)
    save(model)
    if rank == 1:
        dist.destroy_process_group()
        until(directory / "done")
        return ""
    with pytest.raises(LockstepError) as caught:
        save(model)
    (directory / "done").touch()
    return str(caught.value)


def test_rank_that_leaves_is_named_without_a_monitor(tmp_path: Path) -> None:
    assert "rank 1 has destroyed its process group" in run_ranks(leave_unwatched, 2, tmp_path)[0]


def fail_and_destroy() -> None:
    try:
        raise ValueError("boom")
    finally:
        dist.destroy_process_group()


def leave_in_finally(rank: int, world: int, directory: Path) -> str:
    model, _ = prepare(world, "z3", norm=False)
    if rank == 1:
        with pytest.raises(ValueError, match="boom"):
            fail_and_destroy()
        until(directory / "done")
        return ""
    with pytest.raises(LockstepError) as caught:
        save(model)
    (directory / "done").touch()
    return str(caught.value)


def test_error_that_makes_a_rank_leave_is_named(tmp_path: Path) -> None:
    assert "rank 1 ended with ValueError: boom" in run_ranks(leave_in_finally, 2, tmp_path, env=ENV)[0]


def leave_with_the_store(rank: int, world: int, wait: str, directory: Path) -> str:
    """Rank 0 hosts the rendezvous store, which goes when it leaves."""
    address = directory / "address"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address.with_suffix(".part").write_text(str(store.port))
        address.with_suffix(".part").rename(address)
    else:
        until(address)
        store = dist.TCPStore("127.0.0.1", int(address.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    del store
    model, _ = prepare(world, "z3", norm=False)
    if rank == 0:
        dist.destroy_process_group()
        until(directory / "done")
        assert model is not None
        return ""
    with pytest.raises(LockstepError) as caught:
        WAIT[wait](model)
    if wait == "save":  # and again, now that the store is known to be gone
        with pytest.raises(LockstepError, match="cannot be called any more"):
            WAIT[wait](model)
    (directory / "done").touch()
    return str(caught.value)


@pytest.mark.parametrize("wait", ["save", "run_layer"])
def test_rank_that_takes_the_store_with_it_is_named(wait: str, tmp_path: Path) -> None:
    env = {**ENV, "TORCHELASTIC_USE_AGENT_STORE": None}
    message = run_ranks(leave_with_the_store, 2, wait, tmp_path, init=False, env=env)[1]
    assert "rank 0 has destroyed its process group" in message


def finish_together(rank: int, world: int) -> None:
    model, optimizer = prepare(world, "z3", norm=True)
    model(part_of(0, rank, world)).backward()
    optimizer.step()
    save(model)
    dist.destroy_process_group()


def test_ranks_that_leave_together_are_left_in_peace() -> None:
    run_ranks(finish_together, 2, env=ENV)


ENDINGS = """
import multiprocessing, sys, threading, time
import torch, torch.distributed as dist
from pathlib import Path
import dmuon_hf.core as dmuon
from tests.distributed.lockstep_setup import prepare

def main(ending, directory):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = prepare(2, "z3", norm=False)
    if rank == 0:
        try:
            dmuon.get_model_state_dict(model)
        finally:
            (Path(directory) / "done").touch()
    if ending == "thread":
        threading.Thread(target=stay, args=(directory,)).start()
    sys.exit(0)

def stay(directory):
    while not (Path(directory) / "done").exists():
        time.sleep(0.05)

if sys.argv[1] == "child":
    child = multiprocessing.get_context("fork").Process(target=main, args=sys.argv[1:])
    child.start()
    child.join()
    sys.exit(child.exitcode)
main(*sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("ending", "agent", "said"),
    [
        ("exit", True, "rank 1 has ended"),
        ("exit", False, "rank 1 has ended"),
        ("child", True, "rank 1 has ended"),
        ("thread", True, "rank 1 has come to the end of its main thread"),
    ],
)
def test_program_that_ends_is_named_to_a_rank_that_saves(ending: str, agent: bool, said: str, tmp_path: Path) -> None:
    (code, error), (ended, _) = run_script(ENDINGS, ending, str(tmp_path), agent=agent, **ENV)
    assert code == 1
    assert f"LockstepError: {said}" in error
    assert ended == 0


def log_in_a_thread(rank: int, world: int, directory: Path) -> list[Any]:
    """Rank 2 is late. Ranks 0 and 1 wait at different places, the thread of rank 1 being ahead of that of rank 0."""
    model, _ = prepare(world, "z3", norm=False)
    log, pair = dist.new_group([0, 1, 2]), dist.new_group([1, 2])
    go = threading.Event()

    def write() -> None:
        if rank != 1:
            go.wait()
        works = [dist.all_reduce(torch.ones(1), group=log, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()

    thread = threading.Thread(target=write)
    thread.start()
    if rank == 2:
        time.sleep(5)
    if rank > 0:
        dist.barrier(group=pair)
    loss = model(part_of(0, rank, world))
    go.set()
    thread.join()
    return loss.item()


def test_collectives_of_another_thread_prove_nothing(tmp_path: Path) -> None:
    losses = run_ranks(log_in_a_thread, 3, tmp_path, env=ENV)
    assert all(torch.tensor(losses).isfinite())


def save_alone_while_a_thread_logs(rank: int, world: int, directory: Path) -> str:
    model, _ = prepare(world, "z3", norm=False)
    log = dist.new_group([0, 1])
    done = threading.Event()

    def write() -> None:
        more = torch.ones(1)
        while more.item() > 0:
            more.fill_(0.0 if done.is_set() else 1.0)
            dist.all_reduce(more, op=dist.ReduceOp.MIN, group=log)
            time.sleep(0.02)

    thread = threading.Thread(target=write)
    thread.start()
    with pytest.raises(LockstepError) as caught:
        save(model) if rank == 0 else run_layer(model)
    done.set()
    thread.join()
    return str(caught.value)


def test_thread_that_keeps_communicating_does_not_hide_a_divergence(tmp_path: Path) -> None:
    for message in run_ranks(save_alone_while_a_thread_logs, 2, tmp_path, env=ENV):
        assert "rank 0 waits in get_model_state_dict" in message
        assert "rank 1 waits in gather of unit" in message
