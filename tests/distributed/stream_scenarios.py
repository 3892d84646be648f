"""Programs of one rank, each run on the pretended accelerator; the result is what is wrong with their stream order."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime import DedicatedCommContext, placement, row_shards
from dmuon_hf.core.runtime.collectives import InFlight, issue_on
from dmuon_hf.core.runtime.placement import OwnerBroadcast
from dmuon_hf.core.runtime.publish import ColumnCopy, PublishBucket
from tests.distributed import tp_training
from tests.distributed.test_interleaving import interleave
from tests.distributed.tp_training import TpRun
from tests.distributed.training import Run, backward, batch_of, full, prepare
from tests.harness import models
from tests.harness.stream_order import Stream, StreamOrder
from tests.harness.streams import FakeHandle, fake_accelerator

Judged = tuple[list[str], dict[str, int]]


class Job:
    """A model in training on this rank, its weight buffers named in the order's problems."""

    def __init__(self, order: StreamOrder, rank: int, world: int, run: Run | TpRun) -> None:
        self.order, self.rank, self.world, self.run = order, rank, world, run
        self.model, self.optimizer = prepare(run, world) if isinstance(run, Run) else tp_training.prepare(run)
        for unit in self.optimizer.runtime.units:
            view = unit.weights.buffer.new_empty(0).set_(unit.weights.buffer.untyped_storage())
            order.name(view, f"the weights of {unit.name}")

    def backward(self, step: int) -> None:
        if isinstance(self.run, Run):
            backward(self.model, self.run, step, self.rank, self.world)
        else:
            tp_training.backward(self.model, self.run, step, self.rank)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int = 2) -> None:
        for step in range(steps):
            self.backward(step)
            self.step()

    def load(self, saved: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for param in dmuon.get_dedicated_params(self.model):
                param.param.copy_(saved[param.name])

    def evaluate(self) -> None:
        run = self.run if isinstance(self.run, Run) else self.run.run
        copies = 1 if isinstance(self.run, Run) else tp_training.MODES[self.run.mode]["tp"]
        part = models.rank_part(batch_of(run, 9), self.rank // copies, self.world // copies)
        with torch.no_grad():
            models.loss_of(self.model, part)


def train(job: Job) -> None:
    job.train()


def clip(job: Job) -> None:
    job.backward(0)
    job.optimizer.clip_grad_norm_(0.1)
    job.step()
    job.backward(1)
    job.step()


def evaluate(job: Job) -> None:
    job.evaluate()
    job.train(1)
    job.evaluate()
    job.evaluate()
    job.train(1)


def evaluate_between_backward_and_step(job: Job) -> None:
    for step in range(2):
        job.backward(step)
        job.evaluate()
        job.step()


def save_and_load(job: Job) -> None:
    job.train(1)
    weights = dmuon.get_model_state_dict(job.model, rank0_only=False)
    state = dmuon.get_optimizer_state_dict(job.model, job.optimizer, rank0_only=False)
    job.train(1)
    dmuon.set_model_state_dict(job.model, weights)
    dmuon.set_optimizer_state_dict(job.model, job.optimizer, state)
    job.train(1)


def save_and_load_sharded(job: Job, directory: Path) -> None:
    job.train(1)
    state = {
        "model": get_model_state_dict(job.model),
        "optim": get_optimizer_state_dict(job.model, job.optimizer),
    }
    dcp.save(state, checkpoint_id=directory)
    job.train(1)
    dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(job.model, state["model"])
    set_optimizer_state_dict(job.model, job.optimizer, state["optim"])
    job.train(1)


def load_weights_after_step(job: Job) -> None:
    saved = {name: full(param) for name, param in job.model.named_parameters()}
    job.train(1)
    job.load(saved)
    job.train(1)


def step_twice(job: Job) -> None:
    job.backward(0)
    job.optimizer.step()
    job.step()
    job.train(1)


def discard(job: Job) -> None:
    job.backward(0)
    job.optimizer.zero_grad()
    job.train(1)


def fail_in_both_passes(job: Job) -> None:
    def fail(*args: Any) -> None:
        raise ArithmeticError

    for register in ("register_full_backward_hook", "register_forward_pre_hook"):
        handle = getattr(job.model.layers[1], register)(fail)
        with contextlib.suppress(ArithmeticError):
            job.backward(0)
        handle.remove()
        job.optimizer.zero_grad()
        job.train(1)


def drop_the_model_after_step(job: Job) -> None:
    job.train(1)
    _drop(job)


def drop_the_model_after_evaluation(job: Job) -> None:
    job.evaluate()
    _drop(job)


def _drop(job: Job) -> None:
    job.model, job.optimizer = None, None  # type: ignore[assignment]
    gc.collect()
    torch.zeros(1)


def load_weights_after_a_gather_ahead(job: Job) -> None:
    """Nobody waits for the gather before the weights change."""
    saved = {name: full(param) for name, param in job.model.named_parameters()}
    job.optimizer.runtime.units[0].weights.gather()
    job.load(saved)
    job.train(1)


def publish_after_a_gather_ahead(job: Job) -> None:
    """What a gather that nobody has waited for still reads is published anew.

    By the caller: in a step the host has waited before for an agreement, which follows the gather on its group.
    """
    job.train(1)
    job.optimizer.runtime.units[0].weights.gather()
    with torch.no_grad():
        for matrix in job.optimizer.runtime.dedicated.values():
            matrix.param.mul_(0.5)
    dmuon.broadcast_all_updates_async(job.model)
    job.train(1)


def train_on_a_stream_of_the_caller(job: Job) -> None:
    own = Stream(job.order, "the caller's stream")
    own.wait_stream(job.order.default)
    with job.order.on(own):
        job.train()


PROGRAMS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        train,
        clip,
        evaluate,
        evaluate_between_backward_and_step,
        save_and_load,
        save_and_load_sharded,
        load_weights_after_step,
        step_twice,
        discard,
        load_weights_after_a_gather_ahead,
        publish_after_a_gather_ahead,
        fail_in_both_passes,
        drop_the_model_after_step,
        drop_the_model_after_evaluation,
        train_on_a_stream_of_the_caller,
    )
}


def judge(rank: int, world: int, program: str, run: Run | TpRun, *args: Any, nccl: bool = True) -> Judged:
    with fake_accelerator(nccl=nccl) as order:
        PROGRAMS[program](Job(order, rank, world, run), *args)
    return order.problems, order.accesses


def judge_interleaving(rank: int, world: int, mode: str, seed: int, length: int) -> Judged:
    with fake_accelerator() as order:
        interleave(rank, world, mode, seed, length)
    return order.problems, order.accesses


def streams_of_gathers(rank: int, world: int, run: Run) -> tuple[set[str], set[str]]:
    """The side streams of the gathers of rows, and of all others."""
    found: tuple[set[str], set[str]] = (set(), set())

    def noting(place: int) -> Callable[..., InFlight]:
        def issue(device: Any, stream: Stream, *args: Any) -> InFlight:
            found[place].add(stream.name)
            return issue_on(device, stream, *args)

        return issue

    with contextlib.ExitStack() as patches:
        order = patches.enter_context(fake_accelerator())
        job = Job(order, rank, world, run)
        patches.enter_context(mock.patch.object(row_shards, "issue_on", noting(0)))
        patches.enter_context(mock.patch.object(placement, "issue_on", noting(1)))
        job.evaluate()
        job.train(1)
        job.evaluate()
    assert order.problems == []
    return found


def _in_place(buffer: torch.Tensor) -> list[Any]:
    buffer.mul_(2)
    return []


def compute_behind_a_publish(rank: int, world: int, run: Run) -> tuple[bool, bool]:
    """Whether computation has waited for the publish of the first unit: once its gather is issued, and once it runs."""

    def waited(order: StreamOrder, buffer: torch.Tensor) -> bool:
        writes = order._memory_of(buffer, "the published copy", home=order.default).writes
        return all(order.default.clock.get(stream, 0) >= access.count for stream, access in writes.items())

    with fake_accelerator() as order:
        job = Job(order, rank, world, run)
        job.train(1)
        weights = job.optimizer.runtime.units[0].weights
        assert isinstance(weights.placement, OwnerBroadcast)
        assert weights.placement._column is not None
        copy = weights.placement._column.buffer
        weights.gather()
        issued = waited(order, copy)
        weights.wait()
        used = waited(order, copy)
    assert order.problems == []
    return issued, used


def wait_on_another_stream(rank: int, world: int, told: bool) -> list[str]:
    """A backward pass may end on another stream than it began on. ``told``: the allocator hears of it."""

    def unheard(handle: FakeHandle, tensor: torch.Tensor, stream: Stream) -> None: ...

    def reduce_and_read(order: StreamOrder, buffer: torch.Tensor) -> None:
        context = DedicatedCommContext(torch.device("cpu"))
        flight = issue_on(context.device, context.reduce_stream, [buffer], lambda: _in_place(buffer))
        with order.on(Stream(order, "the caller's stream")):
            flight.wait()
            buffer.sum()

    with contextlib.ExitStack() as patches:
        order = patches.enter_context(fake_accelerator())
        if not told:
            patches.enter_context(mock.patch.object(FakeHandle, "record_stream", unheard))
        reduce_and_read(order, torch.ones(4))
        torch.zeros(1)
    return order.problems


def judge_with_a_fault(rank: int, world: int, fault: str, program: str, run: Run | TpRun) -> Judged:
    """The same with one line of the runtime undone, or of how it uses streams."""
    with _FAULTS[fault]():
        return judge(rank, world, program, run)


def _use_without_waiting() -> AbstractContextManager[Any]:
    def wait(flight: InFlight) -> None:
        flight._event = None
        flight._kept.clear()

    return mock.patch.object(InFlight, "wait", wait)


def _copy_masters_on_the_side() -> AbstractContextManager[Any]:
    copy_in = OwnerBroadcast._copy_in

    def beside(placement: OwnerBroadcast, buffer: torch.Tensor) -> None:
        context = placement._context
        context.broadcast_stream.wait_stream(context.device.current_stream())
        with context.device.stream(context.broadcast_stream):
            copy_in(placement, buffer)

    return mock.patch.object(OwnerBroadcast, "_copy_in", beside)


def _forget_the_reader() -> AbstractContextManager[Any]:
    issue = PublishBucket.issue

    def forgetful(bucket: PublishBucket) -> None:
        bucket._reads.clear()
        issue(bucket)

    return mock.patch.object(PublishBucket, "issue", forgetful)


_FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "issues without waiting": lambda: mock.patch.object(Stream, "wait_stream", return_value=None),
    "uses without waiting": _use_without_waiting,
    "drops in flight": lambda: mock.patch.object(InFlight, "__del__", return_value=None),
    "copies masters on the side": _copy_masters_on_the_side,
    "gathers without the publish": lambda: mock.patch.object(ColumnCopy, "wait", return_value=None),
    "publishes over a copy that is read": _forget_the_reader,
}


def poisoned(rank: int, world: int, run: Run) -> list[str]:
    """Collectives of the package that send what was never written, when new memory is full of NaN."""
    found: list[str] = []

    def checked(name: str) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, name)

        @functools.wraps(original)
        def issued(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if group.group_desc.startswith("dmuon_"):
                sent = args[1] if name == "all_to_all_single" else args[0][0]
                root = getattr(args[-1], "rootRank", rank)
                if group.rank() == root or name != "broadcast":
                    found.extend([f"{name} of {group.group_desc}"] if sent.isnan().any() else [])
            return original(group, *args, **kwargs)

        return issued

    resize = torch.UntypedStorage.resize_

    def filled(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        if size:
            torch.empty(0, dtype=torch.float32).set_(storage).fill_(torch.nan)
        return result

    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", filled))
        for name in ("broadcast", "all_to_all_single"):
            patches.enter_context(mock.patch.object(dist.ProcessGroup, name, checked(name)))
        model, optimizer = prepare(run, world)
        backward(model, run, 0, rank, world)
        optimizer.step()
    return sorted(set(found))


def survivors(rank: int, world: int, run: Run) -> list[str]:
    """What is left of a model and its optimizer after both were dropped."""
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    optimizer.step()
    optimizer.zero_grad()
    runtime = optimizer.runtime
    watched = {
        "model": model,
        "runtime": runtime,
        "unit": runtime.units[0],
        "weights": runtime.units[0].weights.unsharded[0],
    }
    references = {name: weakref.ref(thing) for name, thing in watched.items()}
    del model, optimizer, runtime, watched
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]
