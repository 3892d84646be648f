"""Launch modes and models that would train wrongly are refused, with what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig, TorchDynamoPlugin
from torch import nn

import dmuon_hf
from dmuon_hf import ConfigurationError, create_optimizer
from tests.harness import run_ranks
from tests.hf.support import as_launched, error_of, fsdp_env, tiny_llama


def _prepare(rank: int, world: int, make: str) -> None:
    as_launched()
    accelerator = _ACCELERATORS[make]()
    model = tiny_llama()
    accelerator.prepare(model, create_optimizer(model, lr=1e-3))


_ACCELERATORS: dict[str, Callable[[], Accelerator]] = {
    "env": Accelerator,
    "cp": lambda: Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2, cp_size=2)),
    "compile": lambda: Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode="reduce-overhead")),
}


@pytest.mark.parametrize(
    ("world", "make", "env", "message"),
    [
        (2, "env", {}, "runs each of them alone"),
        (2, "env", fsdp_env(2, FSDP_VERSION="1", FSDP_RESHARD_AFTER_FORWARD="FULL_SHARD", mesh=False), "FSDP1"),
        (2, "env", fsdp_env(2, FSDP_OFFLOAD_PARAMS="true"), "CPU offload is not built"),
        (4, "cp", fsdp_env(4, mesh=False), "cp_size > 1 is not built"),
        (2, "compile", fsdp_env(2), "max-autotune-no-cudagraphs"),
    ],
)
def test_unsupported_launch_is_refused(world: int, make: str, env: dict[str, str], message: str) -> None:
    outcomes = run_ranks(_prepare, world, make, init=False, env=env, expect_failure=True, linger=10)
    for outcome in outcomes:
        assert re.search(message, error_of(outcome), re.DOTALL), error_of(outcome)


def _no_accelerator(rank: int, world: int) -> None:
    create_optimizer(tiny_llama(), lr=1e-3)


def test_optimizer_before_the_accelerator_is_refused_in_a_distributed_launch() -> None:
    outcomes = run_ranks(_no_accelerator, 2, init=False, expect_failure=True, linger=10)
    assert all("make the Accelerator first" in error_of(outcome) for outcome in outcomes)


def _plugin_with_adamw(rank: int, world: int) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=dmuon_hf.DMuonPlugin())
    model = tiny_llama()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def test_plugin_with_another_optimizer_is_refused() -> None:
    outcomes = run_ranks(_plugin_with_adamw, 2, init=False, expect_failure=True, linger=10)
    assert all("DMuonPlugin needs a DMuon optimizer" in error_of(outcome) for outcome in outcomes)


def _other_model(rank: int, world: int) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=dmuon_hf.DMuonPlugin())
    optimizer = create_optimizer(tiny_llama(), lr=1e-3)
    accelerator.prepare(tiny_llama(), optimizer)


def test_optimizer_of_another_model_is_refused() -> None:
    outcomes = run_ranks(_other_model, 2, init=False, expect_failure=True, linger=10)
    assert all("another model" in error_of(outcome) for outcome in outcomes)


def test_plugin_with_fsdp1_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fsdp_version=1"):
        dmuon_hf.DMuonPlugin(fsdp_version=1)


def _marked(**attributes: Any) -> nn.Module:
    model = tiny_llama()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    "attributes",
    [{"is_quantized": True}, {"hf_quantizer": object()}],
    ids=["is_quantized", "hf_quantizer"],
)
def test_unsupported_model_is_refused(attributes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="quantised"):
        create_optimizer(_marked(**attributes), lr=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"pp_size": 2}, "pp_size > 1"), ({"fsdp_cpu_offload": True}, "fsdp_cpu_offload")],
)
def test_unknown_sharding_by_transformers_is_refused(settings: dict[str, Any], message: str) -> None:
    model = _marked(_is_distributed_loading_by_transformers=True)
    model.config.distributed_config = SimpleNamespace(**settings)
    with pytest.raises(NotImplementedError, match=message):
        create_optimizer(model, lr=1e-3)


def test_wrapped_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="DataParallel wrapper"):
        create_optimizer(nn.DataParallel(tiny_llama()), lr=1e-3)


def _sharded_before(rank: int, world: int) -> None:
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator(cpu=True, fsdp_plugin=dmuon_hf.DMuonPlugin())
    assert accelerator.is_fsdp2
    model = tiny_llama()
    fully_shard(model)
    create_optimizer(model, lr=1e-3)


def test_sharded_model_is_refused() -> None:
    outcomes = run_ranks(_sharded_before, 2, init=False, expect_failure=True, linger=10)
    assert all("already distributed" in error_of(outcome) for outcome in outcomes)
