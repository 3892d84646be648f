"""Gradients of what is computed on owned tensors themselves, against the same on a plain tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dmuon_hf.core.errors import DMuonError
from dmuon_hf.core.runtime.owned_tensor import Origin, OwnedTensor
from tests.distributed.owned_tensors import SHAPE, assert_whole, flat_mesh, grid_mesh, own, parameter, values
from tests.harness import run_ranks

REFERENCE = values(5)
EYE = torch.eye(SHAPE[1])

# What a user may write with a weight `p`, the whole of a weight `whole(p)`, and a reference in its layout `ref`.
EXPRESSIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "whole": lambda p, whole, ref: whole(p).square().sum(),
    "whole, used twice": lambda p, whole, ref: (whole(p) + whole(p) * 2).pow(3).sum(),
    "orthogonality": lambda p, whole, ref: (whole(p).T @ whole(p) - EYE).square().sum(),
    "whole against plain reference": lambda p, whole, ref: (whole(p) - REFERENCE).square().sum(),
    "square": lambda p, whole, ref: p.square().sum(),
    "abs": lambda p, whole, ref: p.abs().sum(),
    "sum": lambda p, whole, ref: p.sum(),
    "sum of dims": lambda p, whole, ref: p.sum(dim=(0, 1)),
    "mean": lambda p, whole, ref: 3 * p.mean(),
    "scaled": lambda p, whole, ref: (p * 2).sum() / 4 + p.mean() * p.square().mean(),
    "norm": lambda p, whole, ref: p.norm(),
    "vector norm": lambda p, whole, ref: torch.linalg.vector_norm(p),
    "vector norm 1": lambda p, whole, ref: torch.linalg.vector_norm(p, 1),
    "vector norm 3": lambda p, whole, ref: torch.linalg.vector_norm(p, 3),
    "vector norm inf": lambda p, whole, ref: torch.linalg.vector_norm(p, float("inf")),
    "variance": lambda p, whole, ref: p.var(),
    "reference in the same layout": lambda p, whole, ref: (p - ref).pow(2).sum(),
    "plain reference": lambda p, whole, ref: (p - REFERENCE).pow(2).sum(),
    "beside a plain loss": lambda p, whole, ref: torch.tensor(3.0) + 0.1 * p.square().sum() * p.abs().mean(),
}


def gradients(rank: int, world: int, hsdp: bool) -> None:
    mesh = grid_mesh(world, hsdp)
    for name, expression in EXPRESSIONS.items():
        plain = torch.nn.Parameter(values(1))
        want = expression(plain, lambda p: p, REFERENCE)
        want.backward()
        param = parameter(values(1), mesh, world - 2)
        got = expression(param, lambda p: p.full_tensor(), own(REFERENCE, mesh, world - 2))
        torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, want, msg=name)
        got.backward()
        assert type(param.grad) is OwnedTensor and param.grad.dtype == param.dtype, name
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad, msg=name)
        version = param.grad.content.version
        expression(param, lambda p: p.full_tensor(), own(REFERENCE, mesh, world - 2)).backward()
        torch.testing.assert_close(param.grad.full_tensor(), 2 * plain.grad, msg=name)
        assert param.grad.content.version == version + 1, name


@pytest.mark.parametrize(("world", "hsdp"), [(2, False), (4, True)])
def test_gradients_of_expressions_equal_those_of_a_plain_tensor(world: int, hsdp: bool) -> None:
    run_ranks(gradients, world, hsdp)


def placements(rank: int, world: int) -> None:
    mesh, share = grid_mesh(world, True), values(9) * (rank + 1)
    total = values(9) * sum(range(1, world + 1))
    for grad_placements, want in [
        (None, values(9) * 3),
        ([Replicate(), Replicate()], values(9) * 3),
        ([Partial(), Partial()], total),
        ([Partial("avg"), Partial("avg")], total / world),
        ([Replicate(), Partial()], values(9) * (1 * 4 + 3)),
    ]:
        param = parameter(values(1), mesh, 2)
        (param.full_tensor(grad_placements=grad_placements) * share).sum().backward()
        torch.testing.assert_close(param.grad.full_tensor(), want)
    param = parameter(values(1), mesh, 2)
    spread = param.redistribute(placements=[Replicate(), Replicate()])
    weights = distribute_tensor(values(3), mesh, [Replicate(), Shard(0)])
    (spread * weights).sum().full_tensor().backward()
    torch.testing.assert_close(param.grad.full_tensor(), values(3))
    with pytest.raises(NotImplementedError, match="grad_placements"):
        param.full_tensor(grad_placements=[Shard(0), Replicate()])


def test_grad_placements_say_what_the_ranks_gradients_are_to_each_other() -> None:
    run_ranks(placements, 4)


def shared_gradient(rank: int, world: int) -> None:
    mesh = flat_mesh(world)
    first, second = parameter(values(1), mesh, 0), parameter(values(2), mesh, 0)
    (first.full_tensor() + second.full_tensor()).square().sum().backward()
    want = 2 * (values(1) + values(2))
    first.grad.mul_(0)
    assert_whole(second.grad, want)


def test_gradients_that_autograd_shares_do_not_share_memory() -> None:
    run_ranks(shared_gradient, 2)


def higher(rank: int, world: int) -> None:
    mesh = flat_mesh(world)
    param, plain = parameter(values(1), mesh, 1), torch.nn.Parameter(values(1))
    (grad,) = torch.autograd.grad(param.full_tensor().pow(3).sum(), param, create_graph=True)
    (want,) = torch.autograd.grad(plain.pow(3).sum(), plain, create_graph=True)
    grad.full_tensor().square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(param.grad.full_tensor(), plain.grad)


def test_second_derivative_through_full_tensor_is_right() -> None:
    run_ranks(higher, 2)


def local_parts(rank: int, world: int) -> None:
    param = parameter(values(1), flat_mesh(world), 1)
    param.to_local().square().sum().backward()
    assert_whole(param.grad, 2 * values(1))
    with torch.no_grad():
        assert param.to_local() is param._local_tensor


def test_gradient_of_the_local_part_is_owned() -> None:
    run_ranks(local_parts, 2)


def unclear(rank: int, world: int) -> None:
    mesh = flat_mesh(world)
    param, plain = parameter(values(1), mesh, 1), torch.nn.Parameter(values(2))
    with pytest.raises(DMuonError, match="full_tensor"):
        param * plain
    with torch.no_grad():
        torch.testing.assert_close((param * plain).full_tensor(), values(1) * values(2))
        for write in (lambda: plain.add_(param), lambda: torch._foreach_add_([plain], [param])):
            with pytest.raises(DMuonError, match="writes"):
                write()
    with pytest.raises(DMuonError, match="every"):
        param * distribute_tensor(values(2), mesh, [Shard(0)])


def test_mixtures_without_a_right_gradient_or_result_are_refused() -> None:
    run_ranks(unclear, 2)


def beside_data(rank: int, world: int) -> None:
    param = parameter(values(1), flat_mesh(world), 1)
    loss, hidden = torch.tensor(2.0, requires_grad=True), torch.ones(3, requires_grad=True)
    for mixture in (
        lambda: loss * param.norm(),
        lambda: param.mean() / loss,
        lambda: hidden + 0.5 * param.norm(),
        lambda: torch.maximum(loss, param.sum()),
    ):
        with pytest.raises(DMuonError, match="Partial"):
            mixture()
    total = torch.stack([loss, torch.tensor(0.5) * param.sum()]).sum() + loss.reshape(1) - param.sum()
    total.sum().backward()
    assert_whole(param.grad, torch.full(SHAPE, -0.5))
    assert loss.grad == 2


def test_statistic_of_a_weight_is_a_term_beside_data_and_nothing_else() -> None:
    # Anything else gives the ranks different gradients of the statistic, of which the owner would take its own.
    run_ranks(beside_data, 2)


def named(rank: int, world: int) -> list[str]:
    origin = Origin("layers.3.up_proj.weight", "layers.3")
    local = values() if rank == 1 else values()[:0]
    param = torch.nn.Parameter(OwnedTensor.from_local(local, flat_mesh(world), owner=1, shape=SHAPE, origin=origin))
    messages = []
    for operation in (
        param.t,
        lambda: torch.zeros(2, 3) @ param.detach().T,
        lambda: torch.nn.functional.linear(torch.zeros(2, 3), param),
        lambda: (param * 2)[0],
        lambda: param.norm(dim=1),
        lambda: param.sum(dim=1),
        lambda: param.detach().norm(-1.0),
        lambda: param.new_empty(2),
    ):
        with pytest.raises(NotImplementedError) as caught:
            operation()
        messages.append(str(caught.value))
    assert "layers.3.up_proj.weight" in repr(param.clone())
    return messages


def test_undefined_operator_names_the_weight_its_block_and_the_way_out() -> None:
    for messages in run_ranks(named, 2):
        for message in messages:
            assert "layers.3.up_proj.weight" in message and "block 'layers.3'" in message
            assert "forward" in message and "full_tensor()" in message and "unshard()" in message
