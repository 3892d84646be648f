"""Owned gradients and states through torch's clipping, optimizers and gradient scaler, beside FSDP2's DTensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from tests.distributed.owned_tensors import assert_whole, flat_mesh, grid_mesh, own, parameter, values
from tests.harness import run_ranks

SHAPES = [
    (7, 3),
    (2, 5),
    (7, 4),
    (7,),
    (1, 3),
]  # every rank has a part of the sharded ones: torch cannot take the maximum of none
OWNED = {0: 1, 1: 0, 4: 1}  # index of a shape -> owner; the others are sharded as FSDP2 does it


def whole_params() -> list[nn.Parameter]:
    params = [nn.Parameter(values(index, shape)) for index, shape in enumerate(SHAPES)]
    for index, param in enumerate(params):
        param.grad = values(100 + index, tuple(param.shape))
    return params


def spread(whole: torch.Tensor, index: int, mesh: DeviceMesh) -> torch.Tensor:
    layout: list[Placement] = [Replicate(), Shard(0)] if mesh.ndim == 2 else [Shard(0)]
    return own(whole, mesh, OWNED[index]) if index in OWNED else distribute_tensor(whole, mesh, layout)


def spread_params(mesh: DeviceMesh) -> list[nn.Parameter]:
    params = []
    for index, whole in enumerate(whole_params()):
        param = nn.Parameter(spread(whole.detach(), index, mesh))
        assert whole.grad is not None
        param.grad = spread(whole.grad, index, mesh)
        params.append(param)
    return params


def assert_same_params(params: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    for param, whole in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().full_tensor(), whole.detach(), rtol=1e-5, atol=1e-6)


def clips(rank: int, world: int, hsdp: bool) -> None:
    mesh = grid_mesh(world, hsdp)
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        for foreach in (None, True, False):
            params, expected = spread_params(mesh), whole_params()
            gradients = [param.grad for param in params]
            total = torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite=True, foreach=foreach)
            norm = torch.nn.utils.clip_grad_norm_(params, 0.5, norm_type, foreach=foreach)
            reference = torch.nn.utils.clip_grad_norm_(expected, 0.5, norm_type)
            assert isinstance(norm, DTensor)
            torch.testing.assert_close(norm.full_tensor(), reference)
            torch.testing.assert_close(total.full_tensor(), reference)
            for param, whole in zip(params, expected, strict=True):
                assert type(param.grad) is type(param.detach())
                torch.testing.assert_close(param.grad.full_tensor(), whole.grad)
    param = params[0]
    if param.is_owner:
        param.grad.to_local()[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.get_total_norm([param.grad for param in params], error_if_nonfinite=True)


@pytest.mark.parametrize(("world", "hsdp"), [(2, False), (4, False), (4, True)])
def test_torch_clipping_of_owned_and_sharded_tensors_gives_single_process_norms(world: int, hsdp: bool) -> None:
    run_ranks(clips, world, hsdp)


def optimizer_steps(rank: int, world: int, name: str, options: dict[str, object], hsdp: bool) -> None:
    params = spread_params(grid_mesh(world, hsdp))
    expected = whole_params()
    kind = getattr(torch.optim, name)
    optimizer, reference = kind(params, lr=0.1, **options), kind(expected, lr=0.1)
    versions = [params[index].content.version for index in OWNED]
    for _ in range(3):
        optimizer.step()
        reference.step()
    assert_same_params(params, expected)
    assert all(params[index].content.version > version for index, version in zip(OWNED, versions, strict=True))
    for index in OWNED:
        for state in optimizer.state[params[index]].values():
            assert state.ndim == 0 or type(state) is OwnedTensor


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"foreach": True}),
        ("AdamW", {"foreach": False}),
        ("Adam", {}),
        ("SGD", {"foreach": True}),
        ("RMSprop", {"foreach": True}),
        ("Adagrad", {"foreach": True}),
    ],
)
def test_torch_optimizers_beside_fsdp_give_single_process_weights(name: str, options: dict[str, object]) -> None:
    run_ranks(optimizer_steps, 2, name, options, hsdp=False)


def test_foreach_optimizer_takes_owned_and_hsdp_tensors_together() -> None:
    run_ranks(optimizer_steps, 4, "AdamW", {"foreach": True}, hsdp=True)


def fused_steps(rank: int, world: int) -> None:
    mesh = flat_mesh(world)
    params, expected = spread_params(mesh), whole_params()
    owned, plain = [params[index] for index in OWNED], [expected[index] for index in OWNED]
    optimizer, reference = torch.optim.AdamW(owned, lr=0.1, fused=True), torch.optim.AdamW(plain, lr=0.1, fused=True)
    for _ in range(2):
        optimizer.step()
        reference.step()
    assert_same_params(owned, plain)


def test_fused_adamw_gives_single_process_weights() -> None:
    run_ranks(fused_steps, 2)


def foreach_lists(rank: int, world: int) -> None:
    mesh = flat_mesh(world)
    wholes = [values(index, shape) for index, shape in enumerate(SHAPES)]
    tensors = [spread(whole, index, mesh) for index, whole in enumerate(wholes)]
    scalars = [float(index + 1) for index in range(len(SHAPES))]
    for result, expected in [
        (torch._foreach_mul(tensors, scalars), torch._foreach_mul(wholes, scalars)),
        (torch._foreach_add(tensors, tensors, alpha=2), torch._foreach_add(wholes, wholes, alpha=2)),
        (torch._foreach_sqrt(torch._foreach_abs(tensors)), torch._foreach_sqrt(torch._foreach_abs(wholes))),
        (torch._foreach_lerp(tensors, tensors, 0.5), wholes),
        (torch._foreach_addcdiv([tensors[0]], [tensors[0]], [tensors[0]], torch.tensor([3.0])), [wholes[0] + 3.0]),
    ]:
        for index, (spread_one, whole) in enumerate(zip(result, expected, strict=True)):
            assert (type(spread_one) is OwnedTensor) == (index in OWNED)
            torch.testing.assert_close(spread_one.full_tensor(), whole)


def test_foreach_operators_keep_the_order_of_mixed_lists() -> None:
    run_ranks(foreach_lists, 2)


def scaler_steps(rank: int, world: int, overflowing: int | None, hsdp: bool) -> tuple[float, bool]:
    params = spread_params(grid_mesh(world, hsdp))
    if hsdp:
        params = [params[index] for index in OWNED]
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    before = [param.detach().full_tensor() for param in params]
    gradients = [param.grad.full_tensor() for param in params]
    if overflowing is not None and params[overflowing].grad.to_local().numel() > 0:
        params[overflowing].grad.to_local().view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    moved = [not torch.equal(param.detach().full_tensor(), start) for param, start in zip(params, before, strict=True)]
    if overflowing is None:
        for param, start, gradient in zip(params, before, gradients, strict=True):
            torch.testing.assert_close(param.detach().full_tensor(), start - 0.1 * gradient / 4.0)
    assert all(moved) or not any(moved)
    return scaler.get_scale(), moved[0]


@pytest.mark.parametrize(
    ("overflowing", "outcome"), [(None, (4.0, True)), (0, (2.0, False)), (1, (2.0, False)), (2, (2.0, False))]
)
def test_grad_scaler_agrees_on_overflow_of_any_gradient(overflowing: int | None, outcome: tuple[float, bool]) -> None:
    assert run_ranks(scaler_steps, 2, overflowing, hsdp=False) == [outcome] * 2
    assert run_ranks(scaler_steps, 4, overflowing, hsdp=True) == [outcome] * 4


def zero_grads(rank: int, world: int) -> None:
    mesh = flat_mesh(world)
    param = parameter(values(), mesh, 1)
    param.grad = own(values(1), mesh, 1)
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.zero_grad(set_to_none=False)
    assert_whole(param.grad, torch.zeros(7, 3))
    optimizer.zero_grad()
    assert param.grad is None


def test_zero_grad_zeroes_or_drops_owned_gradients() -> None:
    run_ranks(zero_grads, 2)
