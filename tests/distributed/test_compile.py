"""Compiled blocks and models train as eager ones do; dynamo never enters a hook; CUDA graphs are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import dmuon_hf.core as dmuon
from tests.distributed.training import full
from tests.harness import run_ranks
from tests.harness.models import dense_batch, rank_part, tiny_mlp

STEPS = 6


class Checkpointed(nn.Module):
    """A `TinyMLP` that checkpoints each of its layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        inner = tiny_mlp()
        self.layers, self.head = inner.layers, inner.head
        self.reentrant = kind == "reentrant"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0 * self.head.weight.sum()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x).square().mean()


def compile_blocks(model: nn.Module, **options: Any) -> None:
    for layer in model.layers:
        layer.compile(**options)


def train(
    rank: int,
    world: int,
    mode: str,
    wrap: str,
    what: str | None,
    kind: str | None,
    backend: str,
    accumulate: int,
    dtype: torch.dtype | None = None,
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, final weights and the number of graphs compiled after the second step."""
    counter = CompileCounterWithBackend(backend)
    model: Any = tiny_mlp() if kind is None else Checkpointed(kind)
    if what == "blocks first":
        compile_blocks(model, backend=counter)
    elif what == "one block":
        model.layers[1].compile(backend=counter)
    elif what == "wrapped block":
        model.layers[1] = torch.compile(model.layers[1], backend=counter)
    elif what == "wrapper first":
        model = torch.compile(model, backend=counter)
    hsdp = mode == "hsdp"
    shape, names = ((2, world // 2), ("replicate", "shard")) if hsdp else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    options: dict[str, Any] = {"replicate_mesh": mesh["replicate"]} if hsdp else {}
    reshard = mode != "z2"
    chosen = lambda name, param: "proj" in name  # noqa: E731
    dmuon.dedicate_params(model, mesh["shard"], chosen, reshard_after_forward=reshard, compute_dtype=dtype, **options)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in model.layers if wrap == "blocks" else ():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-2)
    run = model
    if what == "blocks last":
        compile_blocks(model, backend=counter)
    elif what == "model":
        run = torch.compile(model, backend=counter)
    losses, early = [], 0
    for step in range(STEPS):
        for micro in range(accumulate):
            part = rank_part(dense_batch(step, batch=16), rank, world, micro=micro, n_micro=accumulate)
            model.set_requires_gradient_sync(micro == accumulate - 1)
            loss = run(part) / accumulate
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            early = counter.frame_count
    assert what is None or early > 0, "nothing was compiled"
    return (
        losses,
        {name.replace("_orig_mod.", ""): full(p) for name, p in model.named_parameters()},
        counter.frame_count - early,
    )


@pytest.mark.parametrize(
    ("mode", "wrap", "what", "kind", "accumulate"),
    [
        ("z2", "blocks", "blocks first", None, 1),
        ("z3", "blocks", "blocks first", None, 2),
        ("z3", "root", "blocks last", None, 1),
        ("z3", "blocks", "model", None, 1),
        ("z3", "root", "model", None, 1),
        ("hsdp", "blocks", "blocks last", None, 1),
        ("hsdp", "blocks", "model", None, 1),
        ("z3", "blocks", "blocks first", "not reentrant", 1),
        ("z3", "root", "blocks first", "reentrant", 1),
    ],
)
def test_compiled_training_equals_eager_and_compiles_once(
    mode: str, wrap: str, what: str, kind: str | None, accumulate: int
) -> None:
    world = 4 if mode == "hsdp" else 2
    eager = run_ranks(train, world, mode, wrap, None, kind, "eager", accumulate)
    compiled = run_ranks(train, world, mode, wrap, what, kind, "aot_eager", accumulate)
    for (want_losses, want, _), (losses, weights, late) in zip(eager, compiled, strict=True):
        torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=1e-6)
        for name, weight in want.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)
        assert late == 0


@pytest.mark.parametrize("what", ["one block", "wrapped block", "wrapper first"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_part_of_a_model_and_a_wrapper_that_was_there_first_train_as_eager_does(
    what: str, dtype: torch.dtype | None
) -> None:
    eager = run_ranks(train, 2, "z3", "blocks", None, None, "eager", 1, dtype)
    compiled = run_ranks(train, 2, "z3", "blocks", what, None, "aot_eager", 1, dtype)
    for (want_losses, want, _), (losses, weights, late) in zip(eager, compiled, strict=True):
        torch.testing.assert_close(losses, want_losses, rtol=1e-5 if dtype is None else 1e-2, atol=1e-6)
        assert weights.keys() == want.keys()
        assert late == 0


def test_inductor_trains_as_eager_does() -> None:
    eager = run_ranks(train, 2, "z3", "blocks", None, None, "eager", 1)
    compiled = run_ranks(train, 2, "z3", "blocks", "blocks first", None, "inductor", 1)
    for (want, _, _), (losses, _, _) in zip(eager, compiled, strict=True):
        torch.testing.assert_close(losses, want, rtol=1e-4, atol=1e-5)


def run_with_cuda_graphs(rank: int, world: int, what: str, options: dict[str, Any]) -> str:
    model: Any = tiny_mlp()
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), lambda name, param: "proj" in name)
    run = model
    if what == "block":
        model.layers[1].compile(**options)
    elif what == "model":
        run = torch.compile(model, **options)
    else:
        run = torch.compile(lambda x: model(x) * 1.0, **options)
    with pytest.raises(dmuon.ConfigurationError) as refused:
        run(dense_batch(0))
    return str(refused.value)


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("block", {"mode": "reduce-overhead"}),
        ("model", {"mode": "reduce-overhead"}),
        ("function", {"mode": "max-autotune"}),
        ("model", {"options": {"triton.cudagraphs": True}}),
        ("block", {"backend": "cudagraphs"}),
    ],
)
def test_cuda_graphs_are_refused_by_name_before_anything_is_computed(what: str, options: dict[str, Any]) -> None:
    for message in run_ranks(run_with_cuda_graphs, 1, what, options):
        assert "CUDA graphs" in message
        assert "max-autotune-no-cudagraphs" in message
        assert "layers.1" in message or what != "block"
