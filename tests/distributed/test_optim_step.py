"""`Muon.step` on several ranks: parity with one process, and decisions that all ranks take together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.optim import sweep
from dmuon_hf.core.optim.progress import FirstStepProgress
from tests.distributed.optim_setup import (
    MODES,
    assert_close,
    backward,
    batch_part,
    reference_weights,
    sharded_mlp,
    train,
    whole,
    whole_weights,
)
from tests.harness import run_ranks

LOGICAL_MATRICES = 12
OPTIONS: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.1, "adamw_lr": 0.01, "momentum": 0.9}


def _parity(rank: int, world: int, mode: str) -> tuple[int, int]:
    model = sharded_mlp(mode)
    optimizer = dmuon.Muon(model, **OPTIONS)
    for last in range(5):
        train(model, optimizer, [last])
        assert_close(whole_weights(model), reference_weights(range(last + 1), **OPTIONS))
    return optimizer.ns_matrices, optimizer.skipped_steps


@pytest.mark.parametrize("mode", list(MODES))
def test_weights_equal_the_single_process_reference_after_every_step(mode: str) -> None:
    results = run_ranks(_parity, MODES[mode], mode, timeout=120)
    assert sum(count for count, _ in results) == 5 * LOGICAL_MATRICES
    assert all(skipped == 0 for _, skipped in results)


def _small_windows(rank: int, world: int, mode: str) -> list[str]:
    whole_sweep, log = sweep.windows, []
    sweep.windows = lambda units, mine: whole_sweep(units, mine, 1)  # type: ignore[assignment]
    model = sharded_mlp(mode)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, [0, 1])
    assert_close(whole_weights(model), reference_weights(range(2), **OPTIONS))
    for unit in optimizer.runtime.units:
        placement = unit.weights.placement

        def publish(plain: Any = placement.publish, at: int = unit.index) -> None:
            log.append(f"publish {at}")
            plain()

        placement.publish = publish
    unit_of = {name: matrix.unit for name, matrix in optimizer.runtime.dedicated.items()}
    index = {unit.name: unit.index for unit in optimizer.runtime.units}
    optimizer._progress = FirstStepProgress(1)
    optimizer._progress.on_batch = lambda batch: log.extend(f"update {index[unit_of[m.name]]}" for m in batch)
    optimizer.zero_grad()
    backward(model, 2)
    log.clear()
    optimizer.step()
    in_step = list(log)
    assert_close(whole_weights(model), reference_weights(range(3), **OPTIONS))
    return in_step


@pytest.mark.parametrize("mode", list(MODES))
def test_units_are_published_in_plan_order_each_after_its_own_matrices(mode: str) -> None:
    for log in run_ranks(_small_windows, MODES[mode], mode, timeout=120):
        numbers = [int(entry.split()[1]) for entry in log]
        assert numbers == sorted(numbers)
        assert [entry for entry in log if entry.startswith("publish")] == [
            f"publish {i}" for i in range(max(numbers) + 1)
        ]
        assert all(log.index(f"update {i}") < log.index(f"publish {i}") for i in numbers if f"update {i}" in log)


def _overflow(rank: int, world: int, mode: str, route: str) -> None:
    model = sharded_mlp(mode)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, [0])
    before = whole_weights(model)
    versions = [p.param.content.version for p in optimizer.runtime.dedicated.values()]
    optimizer.zero_grad()
    backward(model, 1)
    _poison(model, rank, route)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_equal = whole_weights(model)
    assert all(torch.equal(before[name], assert_equal[name]) for name in before)
    assert versions == [p.param.content.version for p in optimizer.runtime.dedicated.values()]
    train(model, optimizer, [2])
    assert_close(whole_weights(model), reference_weights([0, 2], **OPTIONS))


def _poison(model: torch.nn.Module, rank: int, route: str) -> None:
    """An infinity in one local gradient of the last rank that holds any of that route."""
    holders = [
        param.grad.to_local()
        for name, param in model.named_parameters()
        if ("proj" in name) == (route == "muon") and param.grad.to_local().numel() > 0
    ]
    last = torch.tensor([rank if holders else -1])
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    if rank == last.item():
        holders[0].view(-1)[-1] = float("inf")


@pytest.mark.parametrize("mode", ["fsdp", "hsdp"])
@pytest.mark.parametrize("route", ["muon", "adamw"])
def test_nonfinite_gradient_on_one_rank_skips_the_step_on_all(mode: str, route: str) -> None:
    run_ranks(_overflow, MODES[mode], mode, route)


def _unequal_backwards(rank: int, world: int) -> str:
    model = sharded_mlp("fsdp")
    optimizer = dmuon.Muon(model, **OPTIONS)
    backward(model, 0)
    backward(model, 0)
    if rank == 1:
        optimizer.runtime.backward.synchronised = 1
    with pytest.raises(LockstepError) as error:
        optimizer.step()
    return str(error.value)


def test_ranks_that_ran_different_numbers_of_backward_passes_all_say_so() -> None:
    messages = run_ranks(_unequal_backwards, 2)
    assert all("between 1 and 2 backward passes since zero_grad()" in message for message in messages)
    assert "2 on this one" in messages[0]
    assert "1 on this one" in messages[1]


def _versions(rank: int, world: int, mode: str) -> list[int]:
    model = sharded_mlp(mode)
    optimizer = dmuon.Muon(model, **OPTIONS)
    start = [p.param.content.version for p in optimizer.runtime.dedicated.values()]
    train(model, optimizer, [0, 1])
    return [p.param.content.version - v for p, v in zip(optimizer.runtime.dedicated.values(), start, strict=True)]


def test_a_step_marks_gathered_copies_stale_on_every_rank() -> None:
    results = run_ranks(_versions, 4, "hsdp")
    assert all(result == results[0] for result in results)
    assert all(bumps >= 2 for bumps in results[0])


def _sync_and_async(rank: int, world: int, asynchronous: bool) -> dict[str, torch.Tensor]:
    model = sharded_mlp("hsdp")
    train(model, dmuon.Muon(model, replicate_async=asynchronous, **OPTIONS), range(4))
    return whole_weights(model)


def test_synchronous_and_asynchronous_publish_are_equal_to_the_bit() -> None:
    left, right = (run_ranks(_sync_and_async, 4, value)[0] for value in (True, False))
    assert all(torch.equal(left[name], right[name]) for name in left)


def _unreached(rank: int, world: int) -> None:
    model = sharded_mlp("fsdp")
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, [0])
    before = whole_weights(model)
    momentum = {n: whole(optimizer.state[p]["momentum_buffer"]) for n, p in model.named_parameters() if "proj" in n}
    optimizer.zero_grad()
    dropped = model.layers[1]
    del model.layers[1]
    model(batch_part(1)).backward()
    model.layers.insert(1, dropped)
    optimizer.step()
    after = whole_weights(model)
    for name in before:
        if "proj" in name:
            same = torch.equal(before[name], after[name])
            assert same == ("layers.1." in name), name
            kept = torch.equal(momentum[name], whole(optimizer.state[model.get_parameter(name)]["momentum_buffer"]))
            assert kept == ("layers.1." in name), name


def test_matrix_that_no_rank_reached_is_left_alone() -> None:
    run_ranks(_unreached, 2)


def _scaled(rank: int, world: int, mode: str) -> None:
    model = sharded_mlp(mode)
    optimizer = dmuon.Muon(model, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(batch_part(step))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_close(whole_weights(model), reference_weights(range(3), **OPTIONS))
    before = whole_weights(model)
    optimizer.zero_grad()
    scaler.scale(model(batch_part(3))).backward()
    _poison(model, rank, "muon")
    scaler.step(optimizer)
    scaler.update()
    after = whole_weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert optimizer.skipped_steps == 1
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize("mode", ["fsdp", "hsdp"])
def test_grad_scaler_trains_and_backs_off_together(mode: str) -> None:
    run_ranks(_scaled, MODES[mode], mode)
