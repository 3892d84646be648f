"""torch.compile, mixed precision and offload around models that FSDP2 alone shards, and torch.compile under DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon_hf.core as dmuon
from dmuon_hf.core.plan import canonical_name
from tests.distributed.test_mixed_precision import BF16, STEPS, batch
from tests.distributed.test_mixed_precision import reference as reference_in_bf16
from tests.distributed.training import HYPER, full, is_matrix
from tests.harness import run_ranks
from tests.harness.models import rank_part, uneven_model

Weights = list[dict[str, torch.Tensor]]


def steps(rank: int, world: int, model: nn.Module, run: Callable[..., Any], optimizer: dmuon.Muon) -> Weights:
    weights = []
    for step in range(STEPS):
        run(rank_part(batch(step), rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append({canonical_name(name, model): full(param) for name, param in model.named_parameters()})
    return weights


def sharded(rank: int, world: int, what: str, mode: str = "z3", **options: Any) -> tuple[Weights, int]:
    """Weights after every step, and how many graphs were compiled."""
    model = uneven_model()
    counter = CompileCounterWithBackend("aot_eager")
    if what == "blocks":
        for layer in model.layers:
            layer.compile(backend=counter)
    hsdp = mode == "hsdp"
    shape, names = ((2, world // 2), ("replicate", "shard")) if hsdp else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=mode != "z2", **options)
    run = torch.compile(model, backend=counter) if what == "wrapper" else model
    # An optimizer may be given either: both hold the same parameters.
    optimizer = dmuon.Muon(run, predicate=is_matrix, **HYPER)
    return steps(rank, world, model, run, optimizer), counter.frame_count


def under_ddp(rank: int, world: int, what: str) -> tuple[Weights, int]:
    model: nn.Module = uneven_model()
    counter = CompileCounterWithBackend("aot_eager")
    dmuon.dedicate_params_ddp(model, init_device_mesh("cpu", (world,)), is_matrix)
    inner = torch.compile(model, backend=counter) if what == "inside" else model
    wrapped = DistributedDataParallel(inner)
    run = torch.compile(wrapped, backend=counter) if what == "outside" else wrapped
    return steps(rank, world, model, run, dmuon.Muon(run, **HYPER)), counter.frame_count


def all_of(rank: int, world: int, train: Any, whats: list[str], options: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for what in whats:
        torch._dynamo.reset()
        results[what] = train(rank, world, what, **options)
    return results


@pytest.mark.parametrize(
    ("train", "whats", "options", "world"),
    [
        (sharded, ["eager", "wrapper"], {}, 2),
        (sharded, ["eager", "blocks"], {"mode": "hsdp"}, 4),
        (under_ddp, ["eager", "inside", "outside"], {}, 2),
    ],
    ids=["z3", "hsdp", "ddp"],
)
def test_compiled_model_trains_as_eager_where_nothing_is_hooked(
    train: Any, whats: list[str], options: dict[str, Any], world: int
) -> None:
    for results in run_ranks(all_of, world, train, whats, options):
        eager, _ = results.pop("eager")
        for what, (weights, graphs) in results.items():
            assert graphs > 0, what
            for step, wanted in enumerate(eager):
                for name, want in wanted.items():
                    torch.testing.assert_close(weights[step][name], want, rtol=1e-4, atol=1e-5, msg=f"{what} {name}")


def in_bf16(rank: int, world: int, mode: str) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    weights, _ = sharded(rank, world, "eager", mode, mp_policy=policy)
    return {"weights": weights, "dtypes": {value.dtype for value in weights[-1].values()}}


@pytest.mark.parametrize(("mode", "world"), [("z2", 2), ("hsdp", 4)])
def test_mixed_precision_of_fsdp_updates_fp32_masters_by_gradients_in_bf16(mode: str, world: int) -> None:
    _, expected = reference_in_bf16(world)
    for result in run_ranks(in_bf16, world, mode):
        assert result["dtypes"] == {torch.float32}
        for step, wanted in enumerate(expected):
            for name, want in wanted.items():
                # After the first step a last bit of a master may flip the rounding of a weight to bf16.
                error = (result["weights"][step][name] - want).norm()
                assert error < (1e-4 if step == 0 else 1e-2) * want.norm(), (step, name)


def offloaded(rank: int, world: int) -> tuple[Weights, Weights]:
    return (
        sharded(rank, world, "eager")[0],
        sharded(rank, world, "eager", offload_policy=CPUOffloadPolicy(pin_memory=False))[0],
    )


def test_offloaded_parameters_train_as_others_do() -> None:
    for plain, off in run_ranks(offloaded, 2):
        for step, wanted in enumerate(plain):
            for name, want in wanted.items():
                assert torch.equal(off[step][name], want), (step, name)
