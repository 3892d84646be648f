"""torch's own checkpoint functions on dedicated models with Muon: sharded, whole, and on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import dmuon_hf.core.checkpoint as whole_state
from dmuon_hf.core import Muon
from dmuon_hf.core.runtime import OwnedTensor
from tests.distributed.checkpoint_models import Layout, assert_close, build, single_run, train
from tests.harness import run_ranks
from tests.harness.faults import die
from tests.harness.models import tiny_llama

Stage = tuple[int, Layout]


def sharded(model: nn.Module, optimizer: Muon) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def load(model: nn.Module, optimizer: Muon, file: str) -> None:
    state = sharded(model, optimizer)
    dcp.load(state, checkpoint_id=file, no_dist=not dist.is_initialized())
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


def whole(model: nn.Module, optimizer: Muon) -> tuple[dict[str, Any], dict[str, Any]]:
    return whole_state.get_model_state_dict(model), whole_state.get_optimizer_state_dict(model, optimizer)


def first_stage(rank: int, world: int, kind: str, layout: Layout, file: str) -> None:
    model, optimizer = build(kind, layout, world, seed=1)
    train(kind, model, optimizer, rank, world, range(1))
    dcp.save(sharded(model, optimizer), checkpoint_id=file)


def next_stage(rank: int, world: int, kind: str, layout: Layout, stage: int, source: str, target: str) -> Any:
    model, optimizer = build(kind, layout, world, seed=7, lr=0.5)
    load(model, optimizer, source)
    for param, state in optimizer.state.items():
        assert (type(param) is OwnedTensor) == (type(state.get("momentum_buffer")) is OwnedTensor)
    train(kind, model, optimizer, rank, world, range(stage, stage + 1))
    dcp.save(sharded(model, optimizer), checkpoint_id=target, no_dist=not dist.is_initialized())
    return whole(model, optimizer)


def test_dcp_checkpoint_loads_into_a_plain_model(tmp_path: Path) -> None:
    run_ranks(first_stage, 2, "tied", "fsdp", str(tmp_path / "0"))
    model = tiny_llama(7, tied=True)
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path / "0", no_dist=True)
    expected = single_run("tied", range(1))[0].state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-5)


def gathered_formats(rank: int, world: int) -> None:
    model, optimizer = build("tied", "fsdp", world, seed=1)
    train("tied", model, optimizer, rank, world, range(1))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    theirs = get_model_state_dict(model, options=options)
    ours = whole_state.get_model_state_dict(model)
    assert_close(ours, theirs, atol=0.0)
    theirs = get_optimizer_state_dict(model, optimizer, options=options)["state"] if rank == 0 else {}
    if rank != 0:
        get_optimizer_state_dict(model, optimizer, options=options)
    ours = whole_state.get_optimizer_state_dict(model, optimizer)
    assert_close(ours["dedicated"] | ours["fsdp"], theirs, atol=0.0)


def test_whole_state_equals_what_torch_gathers() -> None:
    run_ranks(gathered_formats, 2)


class DyingWriter(dcp.FileSystemWriter):
    """A writer whose process is killed while it writes."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        die()


def killed_in_save(rank: int, world: int, complete: str, interrupted: str) -> None:
    model, optimizer = build("uneven", "fsdp", world, seed=1)
    train("uneven", model, optimizer, rank, world, range(1))
    dcp.save(sharded(model, optimizer), checkpoint_id=complete)
    train("uneven", model, optimizer, rank, world, range(1, 2))
    writer = DyingWriter(interrupted) if rank == 1 else dcp.FileSystemWriter(interrupted)
    dcp.save(sharded(model, optimizer), storage_writer=writer)


def test_kill_of_a_rank_in_a_save_leaves_the_last_checkpoint_loadable(tmp_path: Path) -> None:
    complete, interrupted = tmp_path / "1", tmp_path / "2"
    outcomes = run_ranks(killed_in_save, 2, str(complete), str(interrupted), expect_failure=True)
    assert outcomes[1].exit_code == -9
    assert (complete / ".metadata").exists() and not (interrupted / ".metadata").exists()
    result = run_ranks(next_stage, 2, "uneven", "fsdp", 1, str(complete), str(tmp_path / "3"))[0]
    assert_close(result, whole(*single_run("uneven", range(2))))


def flattened_round_trip(rank: int, world: int, file: str) -> Any:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = build("uneven", "fsdp", world, seed=1)
    train("uneven", model, optimizer, rank, world, range(1))
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=file)
    other, target = build("uneven", "fsdp", world, seed=1)
    set_model_state_dict(other, get_model_state_dict(model))
    state = {"optim": get_optimizer_state_dict(other, target, options=options)}
    dcp.load(state, checkpoint_id=file)
    set_optimizer_state_dict(other, target, state["optim"], options=options)
    return whole(other, target)


def test_flattened_optimizer_state_dict_round_trips(tmp_path: Path) -> None:
    result = run_ranks(flattened_round_trip, 2, str(tmp_path / "ck"))[0]
    assert_close(result, whole(*single_run("uneven", range(1))))
