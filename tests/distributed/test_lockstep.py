"""What ranks may do at their own pace or in their own way, and the life of the monitor itself."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.lockstep import Channel, LockstepMonitor, meet
from dmuon_hf.core.runtime import runtime_of
from tests.distributed.lockstep_setup import HYPER, batch_of, is_matrix, make_net, part_of, prepare
from tests.distributed.training import full
from tests.harness import init_gloo, run_ranks
from tests.harness.reference import ReferenceOptimizer

LIMIT = 1.0
ENV = {"DMUON_HANG_SECONDS": str(LIMIT), "DMUON_HANG_ABORT_SECONDS": "1"}
STEPS = 3

Losses = Callable[[torch.nn.Module, int, int, int], torch.Tensor]


def two_forwards(model: torch.nn.Module, step: int, rank: int, world: int) -> torch.Tensor:
    """A chosen and a rejected batch, as preference losses have it."""
    chosen, rejected = part_of(step, rank, world), part_of(step + 100, rank, world)
    return torch.nn.functional.softplus(model(rejected) - model(chosen))


def layers_run_twice(model: torch.nn.Module, step: int, rank: int, world: int) -> torch.Tensor:
    return model(part_of(step, rank, world), twice=(1, 2))


def same_layers_dropped(model: torch.nn.Module, step: int, rank: int, world: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    skip = [i for i in range(4) if torch.rand((), generator=draw) < 0.5]
    return model(part_of(step, rank, world), skip=skip)


def layer_without_gradient_on_one_rank(model: torch.nn.Module, step: int, rank: int, world: int) -> torch.Tensor:
    return model(part_of(step, rank, world), unused=(1,) if rank == 1 else ())


def layers_without_gradient_on_one_rank(model: torch.nn.Module, step: int, rank: int, world: int) -> torch.Tensor:
    return model(part_of(step, rank, world), unused=(1, 2) if rank == 1 else ())


def layer_without_gradient_anywhere(model: torch.nn.Module, step: int, rank: int, world: int) -> torch.Tensor:
    return model(part_of(step, rank, world), unused=(2,) if step == 1 else ())


LOSSES: dict[str, Losses] = {
    loss.__name__: loss
    for loss in (
        two_forwards,
        layers_run_twice,
        same_layers_dropped,
        layer_without_gradient_on_one_rank,
        layers_without_gradient_on_one_rank,
        layer_without_gradient_anywhere,
    )
}


def train(rank: int, world: int, losses: str, mode: str, norm: bool) -> list[dict[str, torch.Tensor]]:
    model, optimizer = prepare(world, mode, norm=norm)
    weights = []
    for step in range(STEPS):
        LOSSES[losses](model, step, rank, world).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: full(param) for name, param in model.named_parameters()})
    return weights


def reference(world: int, losses: str, norm: bool) -> list[dict[str, torch.Tensor]]:
    """The mean of all ranks' losses, in one process."""
    model = make_net(norm=norm)
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    weights = []
    for step in range(STEPS):
        for rank in range(world):
            (LOSSES[losses](model, step, rank, world) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: param.detach().clone() for name, param in model.named_parameters()})
    return weights


def assert_same_weights(got: list[dict[str, torch.Tensor]], want: list[dict[str, torch.Tensor]]) -> None:
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for name, value in theirs.items():
            error = (mine[name].double() - value.double()).norm() / value.double().norm().clamp_min(1e-12)
            assert error < 2e-4, f"{name} after step {step}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("losses", "mode", "norm", "world"),
    [
        ("two_forwards", "z3", True, 2),
        ("two_forwards", "hsdp", True, 4),
        ("layers_run_twice", "z3", True, 2),
        ("layers_run_twice", "hsdp", True, 4),
        ("same_layers_dropped", "z3", False, 2),
        ("same_layers_dropped", "hsdp", False, 4),
        ("layer_without_gradient_anywhere", "z3", False, 2),
        ("layer_without_gradient_anywhere", "z3", True, 2),
        ("layer_without_gradient_on_one_rank", "z2", False, 2),
        ("layer_without_gradient_on_one_rank", "z3", False, 2),
        ("layer_without_gradient_on_one_rank", "hsdp", False, 4),
        ("layers_without_gradient_on_one_rank", "z2", False, 2),
    ],
)
def test_unusual_pass_trains_like_one_process(losses: str, mode: str, norm: bool, world: int) -> None:
    expected = reference(world, losses, norm)
    for weights in run_ranks(train, world, losses, mode, norm, env=ENV):
        assert_same_weights(weights, expected)


def discard_then_step(rank: int, world: int, mode: str, how: str) -> dict[str, torch.Tensor]:
    model, optimizer = prepare(world, mode, norm=True)
    model(part_of(7, rank, world)).backward()
    (model if how == "module" else optimizer).zero_grad()
    model(part_of(0, rank, world)).backward()
    optimizer.step()
    return {name: full(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("how", ["optimizer", "module"])
@pytest.mark.parametrize(("mode", "world"), [("z3", 2), ("hsdp", 4)])
def test_discarded_batch_leaves_no_trace(mode: str, world: int, how: str) -> None:
    model = make_net(norm=True)
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    model(batch_of(0, 2 * world)).backward()
    optimizer.step()
    expected = {name: param.detach() for name, param in model.named_parameters()}
    for weights in run_ranks(discard_then_step, world, mode, how, env=ENV):
        assert_same_weights([weights], [expected])


class _Said(logging.Handler):
    """Keeps messages, and leaves those that say who is waited for in a directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._directory = directory

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if "still waiting" in record.getMessage():
            (self._directory / f"{os.getpid()}-{len(self.messages)}").write_text(record.getMessage())


def be_slow(directory: Path, until: str) -> None:
    """Do something else until some rank has said `until` of those it waits for."""
    while not any(until in file.read_text() for file in directory.iterdir()):
        time.sleep(0.05)


def train_with_pauses(rank: int, world: int, directory: Path) -> tuple[list[str], int]:
    said = _Said(directory)
    logging.getLogger("dmuon_hf").addHandler(said)
    model, optimizer = prepare(world, "z3", norm=True)
    if rank == 0:
        be_slow(directory, "rank 0 is busy")
    model(part_of(0, rank, world)).backward()
    if rank == 1:
        be_slow(directory, "rank 1 is busy")
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        be_slow(directory, "rank 1 waits in get_model_state_dict")
    dmuon.get_model_state_dict(model)
    model(part_of(1, rank, world)).backward()
    optimizer.step()
    dist.barrier()
    return said.messages, optimizer.skipped_steps


def test_rank_that_is_slow_anywhere_is_waited_for_and_named(tmp_path: Path) -> None:
    results = run_ranks(train_with_pauses, 2, tmp_path, env=ENV)
    assert [skipped for _, skipped in results] == [0, 0]
    text = "\n".join(message for messages, _ in results for message in messages)
    assert "still waiting: rank 0 is busy with work of its own" in text
    assert "in train_with_pauses" in text
    # Once per wait.
    assert text.count("rank 1 waits in get_model_state_dict") == 1


def watching_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dmuon-lockstep")]


def train_one_step(rank: int, world: int) -> tuple[torch.nn.Module, dmuon.Muon]:
    model, optimizer = prepare(world, "z3", norm=False)
    model(part_of(0, rank, world)).backward()
    optimizer.step()
    return model, optimizer


def outlive_groups(rank: int, world: int) -> None:
    for tag in ("second", "third"):
        held = train_one_step(rank, world)
        assert watching_threads()
        dist.barrier()
        dist.destroy_process_group()
        while watching_threads():
            time.sleep(0.05)
        del held
        init_gloo(tag)
    dist.barrier()


def test_thread_ends_with_its_process_group() -> None:
    run_ranks(outlive_groups, 2, env=ENV)


def outlive_model(rank: int, world: int) -> None:
    held = train_one_step(rank, world)
    assert watching_threads()
    del held
    gc.collect()
    while watching_threads():
        time.sleep(0.05)
    dist.barrier()


def test_thread_ends_with_its_model() -> None:
    run_ranks(outlive_model, 2, env=ENV)


def two_models(rank: int, world: int) -> None:
    first, _ = prepare(world, "z3", norm=False)
    second, _ = prepare(world, "z3", norm=False)
    for model in (first, second):
        if rank == 0:
            time.sleep(LIMIT / 2)
        runtime = runtime_of(model)
        assert runtime is not None
        meet("test", runtime.topology.grid, monitor=runtime.context.monitor)


def test_models_meet_apart() -> None:
    run_ranks(two_models, 2, env=ENV)


def start_with(rank: int, world: int) -> None:
    with pytest.raises(ConfigurationError, match=r"DMUON_HANG\w+ must be a number of seconds"):
        prepare(world, "z3", norm=False)


@pytest.mark.parametrize("variable", ["DMUON_HANG_SECONDS", "DMUON_HANG_ABORT_SECONDS"])
@pytest.mark.parametrize("value", ["soon", "-1", "inf"])
def test_limit_that_is_no_number_of_seconds_is_refused(variable: str, value: str) -> None:
    run_ranks(start_with, 2, env={variable: value})


def train_unwatched(rank: int, world: int) -> list[str]:
    train_one_step(rank, world)
    return watching_threads()


def test_zero_seconds_start_no_thread() -> None:
    assert run_ranks(train_unwatched, 2, env={"DMUON_HANG_SECONDS": "0"}) == [[], []]


def test_monitor_without_peers_waits_plainly() -> None:
    class Work:
        waited: tuple[Any, ...] | None = None

        def wait(self, *arguments: Any) -> None:
            self.waited = arguments

    monitor, work = LockstepMonitor(), Work()
    with monitor.at("something"):
        monitor.issue(Channel.SHARD, "gather")
        monitor.wait(work)
    assert work.waited == ()
    assert not monitor.is_open
    assert monitor.digests().numel() == 0
