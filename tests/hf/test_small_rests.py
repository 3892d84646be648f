"""What Muon leaves of a block joins the root's FSDP2 group where it is small: fewer collectives, the same training."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import dmuon_hf
from dmuon_hf import small_rests
from dmuon_hf.core.runtime import OwnedTensor
from tests.harness import run_ranks
from tests.harness.comm import CollectiveCounter
from tests.hf.support import as_launched, finish, fsdp_env, full_weights, tiny_dataset, tiny_llama

LAYERS = 3
NEVER = -1
"""A limit below every rest: each block is wrapped, as accelerate does by itself."""


def _prepared(limit: int | None, **create: Any) -> tuple[Accelerator, nn.Module, Any]:
    as_launched()
    if limit is not None:
        small_rests.SMALL_REST = limit
    accelerator = Accelerator()
    model = tiny_llama(num_hidden_layers=LAYERS)
    if create.pop("half_head", False):
        model.lm_head.to(torch.bfloat16)
    optimizer = dmuon_hf.create_optimizer(model, lr=5e-3, **create)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def _loader(world: int) -> DataLoader[Any]:
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in tiny_dataset(24)]
    return DataLoader(rows, batch_size=8 // world)  # type: ignore[arg-type]


def _train(rank: int, world: int, limit: int | None) -> dict[str, Any]:
    accelerator, model, optimizer = _prepared(limit)
    losses = []
    with CollectiveCounter() as counter:
        for batch in accelerator.prepare(_loader(world)):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    norm = model.model.layers[0].input_layernorm.weight
    result = {
        "wrapped": [isinstance(layer, FSDPModule) for layer in model.model.layers],
        "root": isinstance(model, FSDPModule),
        "norm is sharded": isinstance(norm, DTensor) and not isinstance(norm, OwnedTensor),
        "calls": counter.calls("all_gather") + counter.calls("reduce_scatter"),
        "losses": losses,
        "weights": full_weights(model),
    }
    finish()
    return result


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(("world", "replicas", "reshard"), [(2, 1, "true"), (2, 1, "false"), (4, 2, "true")])
def test_small_rests_in_the_root_train_as_in_their_blocks(
    world: int, replicas: int, reshard: str, precision: str
) -> None:
    env = fsdp_env(world, replicas=replicas, ACCELERATE_MIXED_PRECISION=precision, FSDP_RESHARD_AFTER_FORWARD=reshard)
    joined = run_ranks(_train, world, None, init=False, env=env)
    apart = run_ranks(_train, world, NEVER, init=False, env=env)
    assert apart[0]["wrapped"] == [True] * LAYERS
    for result in joined:
        assert result["wrapped"] == [False] * LAYERS
        assert result["root"] and result["norm is sharded"]
        assert result["calls"] < apart[0]["calls"] - 2 * LAYERS
    assert joined[0]["losses"] == apart[0]["losses"]
    for name, weight in apart[0]["weights"].items():
        assert torch.equal(joined[0]["weights"][name], weight), name


def _wrapped(rank: int, world: int, limit: int | None, half_head: bool) -> list[bool]:
    _, model, _ = _prepared(limit, half_head=half_head)
    finish()
    return [isinstance(layer, FSDPModule) for layer in model.model.layers]


def test_larger_rest_keeps_its_block_wrapped() -> None:
    norms = 2 * 64
    assert run_ranks(_wrapped, 2, norms, False, init=False, env=fsdp_env(2))[0] == [False] * LAYERS
    assert run_ranks(_wrapped, 2, norms - 1, False, init=False, env=fsdp_env(2))[0] == [True] * LAYERS


def test_rests_of_several_dtypes_keep_their_blocks_wrapped() -> None:
    assert run_ranks(_wrapped, 2, None, True, init=False, env=fsdp_env(2))[0] == [True] * LAYERS


def test_sharding_function_of_torch_is_put_back() -> None:
    model = tiny_llama()
    dmuon_hf.create_optimizer(model, lr=1e-3)
    original = torch.distributed.fsdp.fully_shard
    with contextlib.suppress(ZeroDivisionError), small_rests.small_rests_left_to_root(model):
        assert torch.distributed.fsdp.fully_shard is not original
        raise ZeroDivisionError
    assert torch.distributed.fsdp.fully_shard is original
