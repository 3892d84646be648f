"""A rank of one stage that fails is named to its peers, and with an agreement group to the other stages that wait."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

import dmuon_hf.core as dmuon
from tests.distributed.pipeline_setup import STAGES, batch_of, pipeline_mesh, stages_of, whole_model, wrap
from tests.harness import run_ranks

ENV = {"DMUON_HANG_SECONDS": "1", "DMUON_HANG_ABORT_SECONDS": "0"}
NAMED = "rank 3 ended with ValueError: bad batch"


def _stage(which, mode="z3"):
    mesh = pipeline_mesh()
    model = stages_of(whole_model(), STAGES)[mesh.get_local_rank("pp")]
    wrap(model, [model], mesh, mode)
    return model, dmuon.Muon(model, agreement_group=mesh[which] if which == "pp" else mesh)


def _fail():
    with contextlib.suppress(ValueError):
        try:
            raise ValueError("bad batch")
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("which", ["pp", "all"])
def test_rank_that_raised_is_named_to_the_stages_that_wait_for_its_agreement(which):
    *others, failed = run_ranks(_before_the_step, 4, which, env=ENV)
    assert failed is None
    assert all(NAMED in text for text in others), others


def _before_the_step(rank, world, which):
    model, optimizer = _stage(which)
    model(batch_of(0)[0][:2]).square().mean().backward()
    if rank == 3:
        return _fail()
    with pytest.raises(dmuon.LockstepError) as error:
        optimizer.step()
    return _and_end(error)


def _and_end(error):
    """Leave as an uncaught error does, which tells those that wait for this rank."""
    with contextlib.suppress(dmuon.LockstepError):
        try:
            raise error.value
        finally:
            dist.destroy_process_group()
    return str(error.value)


def test_rank_that_raised_ends_the_gather_of_another_stage():
    """Rank 1 stands where nobody can wake it, as in a send to the stage that failed; rank 0 waits for it."""
    waiting, stuck, _, failed = run_ranks(_in_a_gather, 4, env=ENV)
    assert NAMED in waiting
    assert stuck is failed is None


def _in_a_gather(rank, world):
    model, optimizer = _stage("all", "pure")  # FSDP2's own collectives cannot be woken
    store = dist.distributed_c10d._get_default_store()
    if rank == 3:
        return _fail()
    if rank > 0:
        store.wait(["rank 0 knows"], timedelta(seconds=50))
        return None
    with pytest.raises(dmuon.LockstepError) as error:
        model(batch_of(0)[0][:2])
    store.set("rank 0 knows", "1")
    del optimizer
    return str(error.value)


def test_stage_that_waits_long_for_another_is_left_alone():
    """Ranks of one stage stand in different calls for ranks of the other: no proof that they part."""
    assert run_ranks(_slow, 4, env=ENV) == [None] * 4


def _slow(rank, world):
    mesh = pipeline_mesh()
    model = stages_of(whole_model(), STAGES)[mesh.get_local_rank("pp")]
    wrap(model, [model], mesh, "z3")
    optimizer = dmuon.Muon(model)
    group = mesh.get_group("pp")
    if rank == 3:
        dist.barrier(group)
    elif rank == 2:
        dist.all_gather_object([None, None], "ready", group=group)
    else:
        time.sleep(4)  # longer than a rank of the other stage has to stand still
        dist.barrier(group) if rank == 1 else dist.all_gather_object([None, None], "ready", group=group)
    model(batch_of(0)[0][:2]).square().mean().backward()
    optimizer.step()
    return optimizer.runtime.context.monitor.verdict
