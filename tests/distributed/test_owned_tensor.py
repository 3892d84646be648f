"""Operators, copies and gathers of a tensor that lies whole on one rank, against the same on a plain tensor."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dmuon_hf.core.errors import ConfigurationError, DMuonError
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from tests.distributed.owned_tensors import SHAPE, assert_whole, flat_mesh, own, parameter, values
from tests.harness import run_ranks


def form(rank: int, world: int) -> None:
    mesh, whole = flat_mesh(world), values()
    param = parameter(whole, mesh, 1)
    assert isinstance(param, nn.Parameter) and type(param) is OwnedTensor
    assert param.shape == whole.shape and param.numel() == whole.numel() and param.stride() == whole.stride()
    assert param.owner == 1 and param.is_owner == (rank == 1) and param.is_leaf and param.requires_grad
    assert param.to_local().shape == (SHAPE if rank == 1 else (0, 3))
    assert param.placements == (Shard(0),) and param.is_contiguous()


def test_from_local_has_global_shape_and_owner_values() -> None:
    run_ranks(form, 3)


def refused_forms(rank: int, world: int) -> None:
    mesh = flat_mesh(world)
    good = values() if rank == 0 else values()[:0]
    cases = [
        ("leave nothing", lambda: OwnedTensor.from_local(good, mesh, owner=0, shape=SHAPE, unowned={0: Replicate()})),
        ("not a rank", lambda: OwnedTensor.from_local(good, mesh, owner=world, shape=SHAPE)),
        ("must hold", lambda: OwnedTensor.from_local(values()[:2], mesh, owner=0, shape=SHAPE)),
        (
            "contiguous",
            lambda: OwnedTensor.from_local(
                torch.empty(3, 7).t() if rank == 0 else torch.empty(0, 6)[:, ::2], mesh, owner=0, shape=SHAPE
            ),
        ),
        ("dimension", lambda: OwnedTensor.from_local(torch.tensor(1.0), mesh, owner=0, shape=())),
    ]
    for message, make in cases:
        if message == "contiguous" and rank != 0:
            continue  # an empty tensor is always contiguous
        with pytest.raises(ConfigurationError, match=message):
            make()


def test_from_local_with_wrong_form_raises() -> None:
    run_ranks(refused_forms, 2)


def gathered(rank: int, world: int) -> None:
    mesh, whole = flat_mesh(world), values()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.float8_e4m3fn):
        expected = whole.to(dtype)
        tensor = own(expected, mesh, world - 1)
        full = tensor.full_tensor()
        assert type(full) is torch.Tensor and full.dtype == dtype
        assert torch.equal(full.view(torch.uint8), expected.view(torch.uint8))
    tensor = own(whole, mesh, 1)
    tensor.full_tensor().zero_()
    assert_whole(tensor, whole)
    spread = tensor.redistribute(placements=[Replicate()])
    assert type(spread) is DTensor and spread.placements == (Replicate(),)
    assert torch.equal(spread.to_local(), whole)
    assert tensor.redistribute(placements=[Shard(0)]) is tensor
    with pytest.raises(NotImplementedError, match="distribute_tensor"):
        tensor.redistribute(placements=[Shard(1)])
    with pytest.raises(NotImplementedError, match="dtype"):
        tensor.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)


def test_full_tensor_equals_owner_values_and_never_aliases() -> None:
    run_ranks(gathered, 3)


def operators(rank: int, world: int) -> None:
    mesh, a, b = flat_mesh(world), values(1), values(2)
    x, y = own(a, mesh, 1), own(b, mesh, 1)
    scale = distribute_tensor(torch.tensor(0.5), mesh, [Replicate()])
    pairs = [
        (x + y, a + b),
        (x * 2, a * 2),
        (x * scale, a * 0.5),
        (x * torch.tensor(3.0), a * 3),
        (x.lerp(y, 0.3), a.lerp(b, 0.3)),
        (torch.addcmul(x, x, y, value=0.1), torch.addcmul(a, a, b, value=0.1)),
        (x.abs().sqrt(), a.abs().sqrt()),
        (x.clone(), a),
        (x.detach(), a),
        (torch.zeros_like(x), torch.zeros_like(a)),
        (torch.full_like(x, 2.0), torch.full_like(a, 2.0)),
        (torch.where(x > 0, x, y), torch.where(a > 0, a, b)),
        (x.masked_fill(y < 0, 9.0), a.masked_fill(b < 0, 9.0)),
        (x.to(torch.float64), a.to(torch.float64)),
        (x.nan_to_num(), a),
        (x.clamp(-0.5, 0.5), a.clamp(-0.5, 0.5)),
    ]
    for result, expected in pairs:
        assert result.dtype == expected.dtype and result.owner == 1
        assert_whole(result, expected)
    empty = torch.empty_like(x, dtype=torch.bfloat16)
    assert type(empty) is OwnedTensor and empty.shape == SHAPE and empty.dtype == torch.bfloat16
    assert (x > 0).dtype == torch.bool
    assert_whole(x.mul_(2).add_(y, alpha=0.5), a * 2 + b * 0.5)
    assert torch.mul(x, y, out=x) is x
    assert_whole(x, (a * 2 + b * 0.5) * b)
    assert_whole(x.zero_(), torch.zeros_like(a))
    assert_whole(x.fill_(3.0), torch.full_like(a, 3.0))


def test_elementwise_operators_equal_whole_tensor() -> None:
    run_ranks(operators, 3)


def statistics(rank: int, world: int) -> None:
    mesh, a = flat_mesh(world), values(1)
    x = own(a, mesh, 0)
    for name in ("sum", "mean", "max", "min", "std", "var", "prod", "median", "amax", "count_nonzero"):
        result = getattr(x, name)()
        torch.testing.assert_close(result.full_tensor(), getattr(a, name)(), msg=name)
    assert bool(torch.isfinite(x).all()) and not bool(torch.isnan(x).any())
    assert torch.equal(x, x.clone()) and not torch.equal(x, x + 1) and torch.allclose(x, x + 1e-9)
    assert x.sum().item() == pytest.approx(a.sum().item())
    for order in (1, 2, 3.5, 0, float("inf")):
        torch.testing.assert_close(
            torch.linalg.vector_norm(x, order).full_tensor(), torch.linalg.vector_norm(a, order), msg=str(order)
        )
        torch.testing.assert_close(torch._foreach_norm([x], order)[0].full_tensor(), torch.linalg.vector_norm(a, order))
    half = own(a.to(torch.bfloat16), mesh, 0)
    assert torch.linalg.vector_norm(half, dtype=torch.float32).dtype == torch.float32
    torch.testing.assert_close(x.norm().full_tensor(), a.norm())


def test_statistics_and_norms_equal_whole_tensor() -> None:
    run_ranks(statistics, 3)


def refused(rank: int, world: int) -> None:
    mesh, a = flat_mesh(world), values(1)
    x = own(a, mesh, 0)
    operations = [
        lambda: x.mT,
        lambda: x[0],
        lambda: x.sum(dim=0),
        lambda: x @ x.to_local(),
        lambda: x.view(-1),
        lambda: torch.linalg.vector_norm(x, dim=1),
        lambda: torch.cat([x, x]),
        lambda: x.new_zeros(3),
        lambda: x.new_empty(3),
        lambda: torch.linalg.vector_norm(x, -float("inf")),
        lambda: x.std(dim=1),
    ]
    for operation in operations:
        with pytest.raises(NotImplementedError, match="full_tensor"):
            operation()
    for draw in (torch.bernoulli, lambda tensor: torch.multinomial(tensor, 1)):
        with pytest.raises(NotImplementedError, match="one number for each element"):
            draw(x)
    even = distribute_tensor(a, mesh, [Shard(0)])
    mismatched = [
        lambda: x + own(a, mesh, 1),
        lambda: x + even,
        lambda: x.add_(own(a[:2], mesh, 0)),
        lambda: even.copy_(x),
        lambda: x.copy_(a[:2]),
        lambda: setattr(x, "data", own(a, mesh, 0)),
    ]
    for operation in mismatched:
        with pytest.raises(DMuonError):
            operation()
    with pytest.raises(DMuonError, match="pickled"):
        pickle.dumps(x)


def test_operators_that_need_absent_values_raise() -> None:
    run_ranks(refused, 2)


def versions(rank: int, world: int) -> list[int]:
    mesh, a = flat_mesh(world), values(1)
    param = parameter(a, mesh, 1)
    alias, other = param.detach(), own(a, mesh, 1)
    trail = [param.content.version]

    def writes(number: int) -> None:
        assert param.content.version == trail[-1] + number
        assert param.content is alias.content is param.data.content
        trail.append(param.content.version)

    with torch.no_grad():
        param.mul(2), param.norm(), param.clone(), param.full_tensor(), other.copy_(param)
        writes(0)
        param.mul_(2)
        writes(1)
        alias.zero_()
        writes(1)
        param.copy_(a)
        writes(1)
        torch._foreach_add_([param, other], 1.0)
        writes(1)
        torch._foreach_copy_([alias, other], [other, other])
        writes(1)
        torch.add(other, 1.0, out=alias)
        writes(1)
        other.add_(param)
        writes(0)
    assert param.clone().content is not param.content
    converted = param.to(torch.float64)
    assert converted.content is not param.content and converted.content.version > param.content.version
    return trail


def test_writes_bump_the_shared_version_on_every_rank() -> None:
    trails = run_ranks(versions, 3)
    assert trails[0] == trails[1] == trails[2]


def conversions(rank: int, world: int) -> None:
    mesh, a = flat_mesh(world), values(1)
    module = nn.Linear(3, 7, bias=False)
    module.weight = parameter(a, mesh, 1)
    before = module.weight.content.version
    module.to(torch.float64)
    assert type(module.weight) is OwnedTensor and isinstance(module.weight, nn.Parameter)
    assert module.weight.content.version > before
    assert_whole(module.weight, a.double())
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, nn.Parameter) and twin.weight.content is not module.weight.content
    with torch.no_grad():
        twin.weight.zero_()
    assert_whole(module.weight, a.double())
    assert_whole(twin.weight, torch.zeros_like(a).double())
    module.weight.grad = torch.ones_like(module.weight)
    assert_whole(copy.deepcopy(module).weight.grad, torch.ones_like(a).double())


def test_module_conversion_and_deepcopy_keep_the_layout() -> None:
    run_ranks(conversions, 2)


def copies(rank: int, world: int) -> None:
    mesh, a, b = flat_mesh(world), values(1), values(2)
    sources = [
        b,
        b.double(),
        own(b, mesh, 0),
        own(b, mesh, 1),
        own(b.double(), mesh, 1),
        distribute_tensor(b, mesh, [Shard(0)]),
        distribute_tensor(b, mesh, [Shard(1)]),
        distribute_tensor(b, mesh, [Replicate()]),
    ]
    for source in sources:
        target = own(a, mesh, 1)
        assert target.copy_(source) is target
        assert_whole(target, b)
        target = own(a, mesh, 1)
        torch._foreach_copy_([target], [source])
        assert_whole(target, b)
    assert_whole(own(a, mesh, 0).copy_(torch.tensor(2.0)), torch.full_like(a, 2.0))
    module = nn.Linear(3, 7, bias=False)
    module.weight = parameter(a, mesh, 1)
    module.load_state_dict({"weight": b})
    assert_whole(module.weight, b)
    assert torch.equal(module.state_dict()["weight"].full_tensor(), b)


def test_copy_from_any_layout_gives_owner_the_values() -> None:
    run_ranks(copies, 3)
