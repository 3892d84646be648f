"""Ranks that do different things get an error that says who waits where, on every rank, and never hang."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.lockstep import LockstepMonitor, watch
from tests.distributed.lockstep_setup import HYPER, Net, is_matrix, make_net, part_of, prepare
from tests.harness import RankOutcome, run_ranks_outcomes
from tests.harness.faults import die, fail

ODD = 1  # the rank that does something else
HANG_GUARD = 120.0
ENV = {"DMUON_HANG_SECONDS": "2"}
# A rank that raises waits until the others know why, and a process in a foreign collective stays for that long.
PATIENCE = 100


def train_step(model: Net, optimizer: dmuon.Muon, step: int, rank: int, world: int, **options: Any) -> None:
    model(part_of(step, rank, world), **options).backward()
    optimizer.step()
    optimizer.zero_grad()


def drop_layer(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    train_step(model, optimizer, 1, rank, world, skip=(2,) if rank == ODD else ())


def drop_layer_unasked(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    """As on an accelerator, where nobody asks before leaving the order."""
    LockstepMonitor.before = lambda *_: None  # type: ignore[method-assign]
    drop_layer(model, optimizer, rank, world)


def drop_two_layers(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    train_step(model, optimizer, 1, rank, world, skip=(1, 2) if rank == ODD else ())


def lose_gradient(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    train_step(model, optimizer, 1, rank, world, unused=(2,) if rank == ODD else ())


def skip_backward(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    loss = model(part_of(1, rank, world))
    if rank != ODD:
        loss.backward()
    optimizer.step()


def skip_step(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    model(part_of(1, rank, world)).backward()
    if rank != ODD:
        optimizer.step()


def skip_batch(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    if rank != ODD:
        train_step(model, optimizer, 1, rank, world)


def save_alone(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    if rank == ODD:
        dmuon.get_model_state_dict(model)


def save_alone_with_torch(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    if rank == ODD:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def break_in_backward(model: Net, rank: int, action: Any) -> None:
    """Do `action` on the odd rank between the backward of two layers."""
    model.layers[1].register_full_backward_hook(lambda *_: action() if rank == ODD else None)


def swallow_error(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    break_in_backward(model, rank, fail)
    try:
        train_step(model, optimizer, 1, rank, world)
    except RuntimeError:
        optimizer.zero_grad()


def raise_in_backward(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    break_in_backward(model, rank, fail)
    train_step(model, optimizer, 1, rank, world)


def die_in_backward(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    break_in_backward(model, rank, die)
    train_step(model, optimizer, 1, rank, world)


def one_pass_more(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    for _ in range(2 if rank == ODD else 1):
        model(part_of(1, rank, world)).backward()
    optimizer.step()
    optimizer.zero_grad()


def raise_before_step(model: Net, optimizer: dmuon.Muon, rank: int, world: int) -> None:
    model(part_of(1, rank, world)).backward()
    if rank == ODD:
        fail()
    optimizer.step()


FAULTS = {
    fault.__name__: fault
    for fault in (
        drop_layer,
        drop_layer_unasked,
        drop_two_layers,
        lose_gradient,
        skip_backward,
        skip_step,
        skip_batch,
        save_alone,
        save_alone_with_torch,
        swallow_error,
        raise_in_backward,
        die_in_backward,
        one_pass_more,
        raise_before_step,
    )
}


def train_with_fault(rank: int, world: int, fault: str, mode: str, norm: bool) -> None:
    watch._TELLING = PATIENCE
    model, optimizer = prepare(world, mode, norm=norm)
    train_step(model, optimizer, 0, rank, world)
    FAULTS[fault](model, optimizer, rank, world)
    for step in range(2, 5):
        train_step(model, optimizer, step, rank, world)
    dist.barrier()


def run_fault(
    fault: str, mode: str, *, norm: bool, world: int = 2, abort: int = PATIENCE, linger: float = 0.0, **env: str
) -> list[RankOutcome]:
    """What became of the ranks; all of them ended by themselves.

    Args:
        abort: Seconds until a process ends that stands in a foreign collective; needed where all do.
        linger: As for `run_ranks`.
        env: Further variables.
    """
    variables = {**ENV, "DMUON_HANG_ABORT_SECONDS": str(abort), **env}
    outcomes = run_ranks_outcomes(
        train_with_fault, world, fault, mode, norm, timeout=HANG_GUARD, env=variables, linger=linger
    )
    for outcome in outcomes:
        assert outcome.status in ("raised", "died"), outcome.report()
    return outcomes


def said(outcome: RankOutcome) -> str:
    """What a rank raised and printed."""
    return outcome.log + (f"{outcome.exception.type_name}: {outcome.exception.message}" if outcome.exception else "")


def raised_lockstep_error(outcome: RankOutcome) -> bool:
    return outcome.exception is not None and outcome.exception.is_a(LockstepError)


@pytest.mark.parametrize(
    ("fault", "mode", "norm", "world", "words"),
    [
        ("drop_two_layers", "z3", False, 2, ["gather of unit layers.2", "gather of unit layers.3"]),
        ("lose_gradient", "z3", False, 2, ["reduction of unit layers.2", "gather of unit layers.0"]),
        ("lose_gradient", "hsdp", False, 4, ["reduction of unit layers.2", "gather of unit layers.0"]),
        ("skip_backward", "z3", True, 2, ["unit layers.3", "optimizer agreement"]),
        ("skip_step", "z2", True, 2, ["optimizer agreement", "FSDP2 all-gather of the root module"]),
        ("skip_step", "hsdp", False, 4, ["optimizer agreement", "FSDP2 all-gather of the root module"]),
        ("save_alone", "z3", True, 2, ["get_model_state_dict", "FSDP2 all-gather of the root module"]),
        ("save_alone_with_torch", "hsdp", True, 4, ["get_model_state_dict", "FSDP2"]),
        ("swallow_error", "z3", False, 2, ["reduction of unit layers.1", "FSDP2 all-gather of the root module"]),
    ],
)
def test_rank_that_leaves_the_order_is_named_on_every_rank(
    fault: str, mode: str, norm: bool, world: int, words: list[str]
) -> None:
    outcomes = run_fault(fault, mode, norm=norm, world=world)
    assert any(raised_lockstep_error(outcome) for outcome in outcomes)
    for outcome in outcomes:
        assert "ranks disagree" in said(outcome), outcome.report()
        for word in words:
            assert word in said(outcome), outcome.report()


def test_rank_one_batch_short_is_named_although_every_wait_is_torchs_own() -> None:
    for outcome in run_fault("skip_batch", "z3", norm=True, abort=8):
        assert "rank 0 waits in FSDP2 all-gather of the root module (step 4)" in said(outcome)
        assert "rank 1 waits in torch.distributed.barrier (step 4)" in said(outcome)
        assert "train_with_fault" in said(outcome)


def test_layer_dropped_on_one_rank_is_named_although_every_wait_is_torchs_own() -> None:
    for outcome in run_fault("drop_layer", "z3", norm=True, abort=8):
        assert "rank 0 waits in FSDP2 all-gather of layers.2" in said(outcome), outcome.report()
        assert "rank 1 waits in FSDP2 all-gather of layers.3 in place of" in said(outcome), outcome.report()


def test_order_of_fsdp_is_compared_where_every_wait_is_its_own() -> None:
    """FSDP2 reduces no gradients of a layer that has none on this rank, and the others reduce something else then."""
    for outcome in run_fault("lose_gradient", "z2", norm=True, abort=8):
        assert "ranks disagree about collective number" in said(outcome), outcome.report()
        assert "FSDP2 gradient reduction of layers.2.norm.weight" in said(outcome), outcome.report()


def test_layer_dropped_on_one_rank_is_found_by_the_next_step_where_no_wait_shows_it() -> None:
    # The ranks gather equally often, units of one size. No thread looks before the guard has expired.
    for outcome in run_fault("drop_layer_unasked", "z2", norm=False, linger=HANG_GUARD, DMUON_HANG_SECONDS="1000"):
        assert raised_lockstep_error(outcome), outcome.report()
        assert "rank 0 issued the gather of unit layers.2, rank 1 the gather of unit layers.3" in said(outcome)


@pytest.mark.parametrize("fault", ["raise_in_backward", "die_in_backward"])
def test_rank_that_is_gone_is_an_error_on_the_others_at_once(fault: str) -> None:
    # At once: nothing that the limit has to run out for can end this run within its guard.
    survivor = run_fault(fault, "z3", norm=False, DMUON_HANG_SECONDS="1000")[1 - ODD]
    assert raised_lockstep_error(survivor)
    assert re.search(r"a peer was lost while this rank waited for \w+ of unit layers\.\d", said(survivor))


@pytest.mark.parametrize("fault", ["raise_in_backward", "die_in_backward"])
def test_rank_that_is_gone_in_fsdp_is_an_error_on_the_others(fault: str) -> None:
    survivor = run_fault(fault, "hsdp", norm=True, world=4)[0]
    assert survivor.exception is not None
    assert "peer" in said(survivor)


@pytest.mark.parametrize("fault", ["skip_step", "one_pass_more"])
def test_rank_that_leaves_the_order_is_named_by_the_step_where_fsdp_alone_shards(fault: str) -> None:
    outcomes = run_fault(fault, "sharded", norm=True)
    assert any(raised_lockstep_error(outcome) for outcome in outcomes)
    for outcome in outcomes:
        assert "ranks disagree" in said(outcome), outcome.report()
        assert "rank 0 waits in optimizer agreement (step 1)" in said(outcome), outcome.report()
        assert "rank 1 waits in FSDP2 all-gather of the root module (step 1)" in said(outcome), outcome.report()


@pytest.mark.parametrize("fault", ["raise_before_step", "die_in_backward"])
def test_rank_that_is_gone_is_an_error_on_the_others_where_fsdp_alone_shards(fault: str) -> None:
    survivor = run_fault(fault, "sharded", norm=True)[1 - ODD]
    assert survivor.exception is not None
    assert "peer" in said(survivor)
    assert fault == "die_in_backward" or raised_lockstep_error(survivor)


def leave_out_a_block(rank: int, world: int, mode: str) -> None:
    """FSDP2 wraps the root alone, so that one collective carries the norms of all layers."""
    model = make_net(norm=True)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    dmuon.dedicate_params(model, mesh, is_matrix, reshard_after_forward=mode == "z3")
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, **HYPER)
    for step in range(2):
        # First on all ranks, then on one.
        train_step(model, optimizer, step, rank, world, unused=(2,) if step == 0 or rank == ODD else ())
    dist.barrier()


@pytest.mark.parametrize("mode", ["z2", "z3"])
def test_block_that_one_rank_leaves_out_is_named_before_sizes_differ_where_the_root_holds_all_norms(mode: str) -> None:
    env = {**ENV, "DMUON_HANG_ABORT_SECONDS": "8"}
    for outcome in run_ranks_outcomes(leave_out_a_block, 2, mode, timeout=HANG_GUARD, env=env):
        assert outcome.status in ("raised", "died"), outcome.report()
        assert "ranks disagree" in said(outcome), outcome.report()
        assert "layers.2" in said(outcome) or "every gradient again" in said(outcome), outcome.report()
        assert "preamble" not in said(outcome), outcome.report()
