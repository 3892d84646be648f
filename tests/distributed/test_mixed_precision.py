"""compute_dtype: weights travel and compute in bf16, gradients are summed and masters updated in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime.gradients import UnitGrads
from tests.distributed.training import HYPER, full, grads, is_matrix, snapshot
from tests.harness import run_ranks
from tests.harness.comm import CollectiveCounter
from tests.harness.models import dense_batch, rank_part, uneven_model
from tests.harness.reference import ReferenceOptimizer

STEPS = 3
BF16 = torch.bfloat16


def batch(step: int) -> torch.Tensor:
    return dense_batch(step, batch=16, width=64)


def train(rank: int, world: int, mode: str) -> dict[str, Any]:
    model = uneven_model()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    if mode == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(model, mesh["shard"], is_matrix, BF16, replicate_mesh=mesh["replicate"])
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dmuon.dedicate_params(model, mesh, is_matrix, BF16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = dmuon.Muon(model, **HYPER)
    weights, first_grads = [], {}
    used: set[torch.dtype] = set()
    handle = model.layers[0].wide.register_forward_pre_hook(lambda module, args: used.add(module.weight.dtype))
    with CollectiveCounter() as counter:
        for step in range(STEPS):
            model(rank_part(batch(step), rank, world)).backward()
            assert all(param.param.grad.dtype == torch.float32 for param in dmuon.get_dedicated_params(model))
            first_grads = first_grads or grads(model)
            optimizer.step()
            optimizer.zero_grad()
            weights.append(snapshot(model))
    handle.remove()
    return {
        "weights": weights,
        "grads": first_grads,
        "used": used,
        "wire": {(r.kind, r.dtype) for r in counter.records if r.tag in ("dmuon_shard", "dmuon_replicate")},
    }


def reference(world: int) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Each rank's gradient in bf16 from weights rounded to bf16; mean and update in fp32."""
    masters = uneven_model()
    optimizer = ReferenceOptimizer(masters, is_matrix, **HYPER, dtype=torch.float32)
    weights, first_grads = [], {}
    for step in range(STEPS):
        for rank in range(world):
            twin = uneven_model()
            twin.load_state_dict(masters.state_dict())
            twin.to(BF16)(rank_part(batch(step), rank, world).to(BF16)).backward()
            for master, param in zip(masters.parameters(), twin.parameters(), strict=True):
                grad = param.grad.float() / world
                master.grad = grad if master.grad is None else master.grad + grad
        first_grads = first_grads or {name: param.grad.clone() for name, param in masters.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: param.detach().clone() for name, param in masters.named_parameters()})
    return first_grads, weights


@pytest.mark.parametrize(("mode", "world"), [("z3", 2), ("hsdp", 4)])
def test_bf16_compute_keeps_fp32_masters_and_sums(mode: str, world: int) -> None:
    first_grads, weights = reference(world)
    for result in run_ranks(train, world, mode):
        assert result["used"] == {BF16}
        wire = result["wire"]
        assert ("broadcast", BF16) in wire
        assert ("broadcast", torch.float32) not in wire
        assert {dtype for kind, dtype in wire if kind.startswith("all_to_all")} == {torch.float32}
        for name, want in first_grads.items():
            torch.testing.assert_close(result["grads"][name], want, rtol=1e-5, atol=1e-8)
        for step in range(STEPS):
            for name, want in weights[step].items():
                got = result["weights"][step][name]
                assert got.dtype == torch.float32
                # After the first step a last bit of a master may flip the rounding of a weight to bf16.
                assert (got - want).norm() < (1e-4 if step == 0 else 1e-2) * want.norm(), (step, name)


def half_precision_masters(rank: int, world: int) -> list[torch.dtype]:
    model = uneven_model().to(BF16)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    dmuon.dedicate_params(model, mesh, is_matrix, BF16, master_dtype=torch.float32)
    params: list[nn.Parameter] = [param.param for param in dmuon.get_dedicated_params(model)]
    assert torch.equal(
        full(params[0]), dict(uneven_model().to(BF16).named_parameters())["layers.0.wide.weight"].float()
    )
    return sorted({str(param.dtype) for param in params})


def test_master_dtype_upcasts_what_owners_keep() -> None:
    assert run_ranks(half_precision_masters, 2) == [["torch.float32"]] * 2


def reduce_beside_fsdp(rank: int, world: int, mode: str, dtype: torch.dtype, accumulate: int) -> dict[str, Any]:
    """Gradients of a dedicated model and of one that FSDP2 keeps whole, reduced in `dtype` by the same policy."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    mesh: Any
    arguments: dict[str, Any] = {"compute_dtype": dtype, "reduce_dtype": dtype}
    if mode == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        arguments["replicate_mesh"] = mesh["replicate"]
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    found: dict[str, Any] = {}
    for kind in ("owned", "sharded"):
        model = uneven_model()
        if kind == "owned":
            dmuon.dedicate_params(model, mesh["shard"] if mode == "hsdp" else mesh, is_matrix, **arguments)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        with CollectiveCounter() as counter:
            for micro in range(accumulate):
                model.set_requires_gradient_sync(micro == accumulate - 1)
                model(rank_part(batch(micro), rank, world)).backward()
        found[kind] = grads(model)
        if kind == "owned":
            found["wire"] = {r.dtype for r in counter.records if r.kind.startswith("all_to_all")}
            found["bytes"] = sum(r.payload for r in counter.records if r.kind.startswith("all_to_all"))
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("mode", "world", "dtype"), [("z3", 2, BF16), ("hsdp", 4, BF16), ("z3", 2, torch.float16)])
def test_reduce_dtype_reduces_as_fsdp_does_by_its_policy(
    mode: str, world: int, dtype: torch.dtype, accumulate: int
) -> None:
    for found in run_ranks(reduce_beside_fsdp, world, mode, dtype, accumulate):
        assert found["wire"] == {dtype}
        for name, want in found["sharded"].items():
            got = found["owned"][name]
            assert got.dtype == want.dtype == torch.float32
            # Each rounds a sum of `world` numbers, and of `accumulate` before, to the dtype of the wire.
            assert (got - want).norm() < 2 * (world + accumulate) * torch.finfo(dtype).eps * want.norm(), name


def bytes_with(rank: int, world: int, reduce_dtype: torch.dtype | None) -> float:
    model = uneven_model().to(BF16)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    dmuon.dedicate_params(model, mesh, is_matrix, BF16, reduce_dtype=reduce_dtype)
    with CollectiveCounter() as counter:
        model(dense_batch(0, batch=4, width=64).to(BF16)).backward()
    return counter.ring_bytes(tag="dmuon_shard")


def test_reduce_dtype_of_two_bytes_sends_six_bytes_a_parameter_instead_of_eight() -> None:
    default, half = (sum(run_ranks(bytes_with, 2, dtype)) for dtype in (None, BF16))
    assert half / default == pytest.approx(6 / 8)


class Copies(TorchDispatchMode):
    """Bytes read and written by operators that move whole tensors, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        touched = {
            "_foreach_copy_": lambda: [*args[0], *args[1]],
            "copy_": lambda: list(args[:2]),
            "_to_copy": lambda: [args[0], result],
            "clone": lambda: [args[0], result],
            "add_": lambda: [args[0], *args[:2]],
        }.get(name, list)()
        if touched:
            self.moved[name] = self.moved.get(name, 0) + sum(t.numel() * t.element_size() for t in touched)
        return result


def copies_while_launching(rank: int, world: int) -> tuple[dict[str, int], int]:
    model = uneven_model().to(BF16)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    dmuon.dedicate_params(model, mesh, is_matrix, BF16)
    copies, launch, left = Copies(), UnitGrads.launch, []

    def counted(grads: UnitGrads) -> None:
        with copies:
            launch(grads)
        left.extend(unsharded.grad for unsharded in grads._unsharded)

    UnitGrads.launch = counted  # type: ignore[method-assign]
    model(dense_batch(0, batch=4, width=64).to(BF16)).backward()
    assert left
    assert not any(grad is not None for grad in left)
    return copies.moved, sum(param.numel for param in dmuon.get_dedicated_params(model))


def test_gradients_are_copied_once_on_their_way_into_the_send_buffer() -> None:
    """Two bytes a parameter are read and four written."""
    for moved, numel in run_ranks(copies_while_launching, 2):
        assert moved == {"_foreach_copy_": 6 * numel}


def overflowing(rank: int, world: int) -> dict[str, torch.Tensor]:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    arguments: dict[str, Any] = {"compute_dtype": torch.float16, "reduce_dtype": torch.float16}
    dmuon.dedicate_params(model, mesh["shard"], lambda *_: True, replicate_mesh=mesh["replicate"], **arguments)
    (model(torch.full((1, 8), 4e4, dtype=torch.float16)) * torch.ones((), dtype=torch.float16)).sum().backward()
    return grads(model)


def test_sum_of_large_fp16_gradients_does_not_overflow() -> None:
    for found in run_ranks(overflowing, 4):
        for grad in found.values():
            torch.testing.assert_close(grad, torch.full((8, 8), 4e4), rtol=1e-3, atol=0.0)


def test_reduce_dtype_that_is_no_floating_point_type_is_refused() -> None:
    with pytest.raises(ValueError, match="reduce_dtype"):
        dmuon.dedicate_params(uneven_model(), None, is_matrix, reduce_dtype=torch.int32)
