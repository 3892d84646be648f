"""``torch.distributed.pipelining`` over stages that each have their own owners: equal to one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.stage import _PipelineStageBase

from tests.distributed import training
from tests.distributed.pipeline_setup import (
    STAGES,
    Run,
    assert_same_training,
    feed,
    pipeline_mesh,
    prepare,
    reference,
    schedule_of,
    stages_of,
    train,
    whole_model,
)
from tests.harness import run_ranks


@pytest.fixture(scope="module")
def expected():
    return reference()


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [
        ("z3", "gpipe"),
        ("z3", "1f1b"),
        ("z3", "interleaved"),
        ("z2", "interleaved"),
        ("hsdp", "1f1b"),
        ("ddp", "1f1b"),  # torch's DDP itself fails under GPipe
        ("replicate", "gpipe"),
        ("replicate", "interleaved"),
        ("pure", "1f1b"),
        ("tp", "1f1b"),
        ("sharded", "interleaved"),
    ],
)
def test_pipeline_of_two_stages_equals_one_process(mode, schedule, expected):
    assert_same_training(run_ranks(train, 4, Run(mode, schedule)), expected)


@pytest.mark.parametrize(
    ("mode", "schedule"), [("z3", "1f1b"), ("z2", "interleaved"), ("pure", "gpipe"), ("ddp", "1f1b")]
)
def test_microbatches_of_a_step_are_reduced_once(mode, schedule):
    for issued in run_ranks(_reductions, 4, Run(mode, schedule)):
        assert issued and len(set(issued)) == len(issued), issued


def _reductions(rank, world, run):
    """What is reduced in the second step."""
    mesh = pipeline_mesh()
    _, wrapped, optimizer = prepare(run, mesh, stages_of(whole_model(), STAGES * run.chunks))
    schedule = schedule_of(run, mesh, wrapped)
    feed(schedule, mesh, 0)
    optimizer.step()
    optimizer.zero_grad()
    issued = []
    monitor = optimizer.runtime.context.monitor
    original = monitor.issue
    monitor.issue = lambda channel, what: (issued.append(what), original(channel, what))
    feed(schedule, mesh, 1)
    return [what for what in issued if what.startswith(("reduction", "gradient average"))]


@pytest.mark.parametrize("mode", ["z3", "ddp"])
def test_schedule_that_splits_backward_is_refused(mode):
    for refused in run_ranks(_split_backward, 2, training.Run(mode=mode)):
        assert "zero bubble" in refused


def _split_backward(rank, world, run):
    model, _ = training.prepare(run, world)
    training.backward(model, run, 0, rank, world)
    stage = SimpleNamespace(submod=model)
    with pytest.raises(NotImplementedError) as refused:
        _PipelineStageBase.backward_maybe_with_nosync(stage, "input", {})
    return str(refused.value)
