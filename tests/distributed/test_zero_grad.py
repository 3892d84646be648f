"""Zeroing gradients drops all that FSDP2 keeps of earlier backward passes, also what torch itself would apply later."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon_hf.core as dmuon
from tests.distributed.lockstep_setup import HYPER, Net, batch_of, is_matrix, make_net, part_of, prepare
from tests.distributed.training import full
from tests.harness import run_ranks

MODES = [("z2", 2), ("z3", 3), ("hsdp", 4)]
HOW = ["optimizer", "module", "optimizer_to_zeros", "module_to_zeros"]


def zero(model: nn.Module, optimizer: dmuon.Muon, how: str) -> None:
    (model if how.startswith("module") else optimizer).zero_grad(set_to_none=not how.endswith("to_zeros"))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    model.reshard()
    return {name: full(param.grad) for name, param in model.named_parameters()}


def expected_gradients(step: int, world: int) -> dict[str, Tensor]:
    model = make_net(norm=True)
    model(batch_of(step, 2 * world)).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def assert_gradients_of(results: list[dict[str, Tensor | None]], step: int, *, rtol: float = 1e-4) -> None:
    expected = expected_gradients(step, len(results))
    for got in results:
        for name, want in expected.items():
            error = (got[name] - want).norm() / want.norm()
            assert error < rtol, f"{name}: relative error {error:.1e}"


def kept_after_zeroing(rank: int, world: int, mode: str) -> tuple[int, int]:
    model, optimizer = prepare(world, mode, norm=True)
    model(part_of(0, rank, world)).backward()
    grads = [getattr(param.grad, "_local_tensor", param.grad) for param in model.parameters()]
    storages = [weakref.ref(grad.untyped_storage()) for grad in grads if grad.numel() > 0]
    del grads
    optimizer.zero_grad()
    return len(storages), sum(storage() is not None for storage in storages)


@pytest.mark.parametrize(("mode", "world"), MODES)
def test_zeroed_gradients_are_freed_at_once(mode: str, world: int) -> None:
    for gradients_held, kept in run_ranks(kept_after_zeroing, world, mode):
        assert gradients_held > 0
        assert kept == 0


def accumulate_zero_train(rank: int, world: int, mode: str, how: str) -> dict[str, Tensor | None]:
    model, optimizer = prepare(world, mode, norm=True)
    for step in (1, 2):
        with dmuon.no_sync(model):
            model(part_of(step, rank, world)).backward()
    zero(model, optimizer, how)
    model(part_of(0, rank, world)).backward()
    return gradients(model)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("mode", "world"), MODES)
def test_gradients_of_no_sync_before_zeroing_are_dropped(mode: str, world: int, how: str) -> None:
    assert_gradients_of(run_ranks(accumulate_zero_train, world, mode, how), 0)


def accumulate_in_reduce_dtype(rank: int, world: int, how: str) -> dict[str, Tensor | None]:
    """FSDP2 computes in bf16 and reduces in fp32, so that it keeps fp32 copies of what it accumulates."""
    model = make_net(norm=True)
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, is_matrix, torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = dmuon.Muon(model, **HYPER)
    with dmuon.no_sync(model):
        model(part_of(1, rank, world)).backward()
    zero(model, optimizer, how)
    model(part_of(0, rank, world)).backward()
    return gradients(model)


@pytest.mark.parametrize("how", ["optimizer", "module"])
def test_gradients_kept_in_the_dtype_of_the_reduction_are_dropped(how: str) -> None:
    assert_gradients_of(run_ranks(accumulate_in_reduce_dtype, 2, how), 0, rtol=5e-2)


def reduce_within_replicas(rank: int, world: int, how: str) -> dict[str, Tensor | None]:
    model, optimizer = prepare(world, "hsdp", norm=True)
    model.set_requires_all_reduce(False)
    model(part_of(1, rank, world)).backward()
    model.set_requires_all_reduce(True)
    zero(model, optimizer, how)
    model(part_of(0, rank, world)).backward()
    return gradients(model)


@pytest.mark.parametrize("how", ["optimizer", "module"])
def test_gradients_that_were_not_all_reduced_are_dropped(how: str) -> None:
    assert_gradients_of(run_ranks(reduce_within_replicas, 4, how), 0)


def zero_while_unsharded(rank: int, world: int, mode: str, how: str) -> dict[str, Tensor | None]:
    model, optimizer = prepare(world, mode, norm=True)
    model(part_of(1, rank, world)).backward()
    with torch.no_grad():
        model(part_of(2, rank, world))
    zero(model, optimizer, how)
    return gradients(model)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("mode", "world"), MODES)
def test_zeroing_after_an_evaluation_leaves_no_gradient(mode: str, world: int, how: str) -> None:
    for got in run_ranks(zero_while_unsharded, world, mode, how):
        left = [name for name, grad in got.items() if grad is not None and grad.any()]
        assert left == []
        if not how.endswith("to_zeros"):
            assert set(got.values()) == {None}


def zero_between(rank: int, world: int, mode: str, how: str) -> dict[str, Tensor | None]:
    model, optimizer = prepare(world, mode, norm=True)
    model(part_of(1, rank, world)).backward()
    loss = model(part_of(0, rank, world))
    zero(model, optimizer, how)
    loss.backward()
    return gradients(model)


@pytest.mark.parametrize("how", ["optimizer", "module"])
@pytest.mark.parametrize(("mode", "world"), MODES)
def test_zeroing_between_forward_and_backward_keeps_what_follows(mode: str, world: int, how: str) -> None:
    assert_gradients_of(run_ranks(zero_between, world, mode, how), 0)


def run_out_of_memory(grad: Tensor) -> None:
    raise RuntimeError("out of memory, say")


def break_backward(model: Net, layer: int, rank: int, world: int) -> None:
    """A pass that ends when the gradient reaches the output of ``layer``, whose whole weights are there by then."""

    def watch_output(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(run_out_of_memory)

    handle = model.layers[layer].register_forward_hook(watch_output)
    loss = model(part_of(1, rank, world))
    handle.remove()
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.backward()


def break_zero_train(rank: int, world: int, mode: str, how: str, layer: int) -> dict[str, Tensor | None]:
    model, optimizer = prepare(world, mode, norm=True)
    model(part_of(2, rank, world)).backward()
    break_backward(model, layer, rank, world)
    zero(model, optimizer, how)
    model(part_of(0, rank, world)).backward()
    return gradients(model)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("how", ["optimizer", "module"])
@pytest.mark.parametrize(("mode", "world"), MODES)
def test_backward_that_broke_before_zeroing_leaves_no_trace(mode: str, world: int, how: str, layer: int) -> None:
    assert_gradients_of(run_ranks(break_zero_train, world, mode, how, layer), 0)


def break_and_go_on(rank: int, world: int, mode: str) -> str:
    model, optimizer = prepare(world, mode, norm=True)
    break_backward(model, 1, rank, world)
    model(part_of(0, rank, world)).backward()
    with pytest.raises(dmuon.DMuonError) as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.parametrize(("mode", "world"), MODES)
def test_batch_run_again_without_zeroing_is_refused_at_the_step(mode: str, world: int) -> None:
    for message in run_ranks(break_and_go_on, world, mode):
        assert "a backward pass did not finish" in message and "zero_grad" in message
