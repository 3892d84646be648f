"""What is refused of distributed parameters, and models that are not there yet, under tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime.replica_check import check_replicas
from dmuon_hf.core.runtime.weights import UnitWeights
from tests.distributed.tp_training import TpRun, backward, parallelize, prepare_model
from tests.distributed.training import HYPER, Run, full, is_matrix, make_model
from tests.harness import run_ranks

RUN = TpRun("shard_tp", Run("tp", "uneven"), everything=True)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))


def sharded_before() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = make_model("mlp")
    parallelize(model, mesh["tp"], everything=False)
    fully_shard(model, mesh=mesh["shard"])
    dmuon.dedicate_params(model, mesh["shard"], is_matrix)


def on_the_data_dimension() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = Pair()
    model.layers[0].weight = nn.Parameter(distribute_tensor(model.layers[0].weight, mesh, [Shard(0)]))
    dmuon.dedicate_params(model, mesh, lambda name, param: True)


def without_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = Pair()
    model.layers[0].weight = nn.Parameter(distribute_tensor(model.layers[0].weight, mesh, [Shard(0)]))
    dmuon.dedicate_params(model, None, lambda name, param: True)


def place(first: tuple[str, ...], second: tuple[str, ...], placements: list[Any] | None = None) -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("shard", "tp", "cp"))
    model = Pair()
    for layer, names in zip(model.layers, (first, second), strict=True):
        part = mesh[names]
        spread = DTensor.from_local(layer.weight.detach(), part, placements or [Replicate()] * part.ndim)
        layer.weight = nn.Parameter(spread)
    dmuon.dedicate_params(model, mesh["shard"], lambda name, param: True)


REFUSED: dict[str, tuple[Callable[[], None], str, str]] = {
    "sharded before": (sharded_before, "ConfigurationError", "call dedicate_params before fully_shard"),
    "on the data dimension": (on_the_data_dimension, "ConfigurationError", "layers.0.weight is already a DTensor over"),
    "without a mesh": (without_a_mesh, "ConfigurationError", 'pass the data-parallel dimension, mesh["shard"]'),
    "partial sums": (lambda: place(("tp",), ("tp",), [Partial()]), "ConfigurationError", "a weight is Shard(dim)"),
    "two axes": (lambda: place(("tp",), ("cp",)), "NotImplementedError", "layers.0.weight and layers.1.weight are"),
    "two axes at once": (lambda: place(("tp", "cp"), ("tp", "cp")), "NotImplementedError", "mesh of 2 dimensions"),
}


def refusal(rank: int, world: int, case: str) -> str:
    try:
        REFUSED[case][0]()
    except (dmuon.ConfigurationError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("case", REFUSED)
def test_parameters_that_are_not_tensor_parallel_alone_are_refused_on_all_ranks(case: str) -> None:
    for message in run_ranks(refusal, 4, case):
        assert message.startswith(REFUSED[case][1]) and REFUSED[case][2] in message


def only_the_source(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Parts of data-parallel rank 1 count, whichever has other values or none."""
    torch.manual_seed(0)

    def elsewhere(model: nn.Module) -> nn.Module:
        if rank // 2 != 1:
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(7.0)
        return model

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = elsewhere(make_model("uneven"))
    parallelize(model, mesh["tp"], everything=True)
    dmuon.dedicate_params(model, mesh["shard"], is_matrix, source_rank=1)
    return {name: full(param) for name, param in model.named_parameters() if is_matrix(name, param)}


def test_values_of_the_source_rank_go_to_the_owner_of_each_part() -> None:
    expected = dict(make_model("uneven").named_parameters())
    for found in run_ranks(only_the_source, 4):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name].detach())


def materialise(rank: int, world: int) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    with torch.device("meta"):
        model = make_model("uneven")
    parallelize(model, mesh["tp"], everything=True)
    dmuon.dedicate_params(model, mesh["shard"], is_matrix)
    fully_shard(model, mesh=mesh["shard"])
    model.to_empty(device="cpu")
    dmuon.set_model_state_dict(model, make_model("uneven").state_dict())
    expected = dict(make_model("uneven").named_parameters())
    return all(torch.equal(full(param), expected[name]) for name, param in model.named_parameters())


def test_model_on_meta_is_materialised_part_by_part() -> None:
    assert run_ranks(materialise, 4) == [True] * 4


def compare_and_drift(rank: int, world: int) -> str:
    model = prepare_model(RUN)
    optimizer = dmuon.Muon(model, **HYPER)
    backward(model, RUN, 0, rank)
    optimizer.step()
    check_replicas(model)
    gathered = UnitWeights.wait

    def corrupted(weights: UnitWeights) -> None:
        gathered(weights)
        weights.buffer.add_(1.0)

    if rank == 3:
        UnitWeights.wait = corrupted  # type: ignore[method-assign]
    try:
        check_replicas(model)
    except dmuon.LockstepError as error:
        return str(error)
    return ""


def test_checksums_compare_each_part_with_itself_over_data_parallel_ranks() -> None:
    for message in run_ranks(compare_and_drift, 4):
        assert "differs between data-parallel ranks 1 and 3" in message


def penalty(rank: int, world: int) -> dict[str, torch.Tensor]:
    model = prepare_model(RUN)
    dmuon.Muon(model, **HYPER)
    named = {name: param for name, param in model.named_parameters() if is_matrix(name, param)}
    sum((param.full_tensor() ** 3).sum() for param in named.values()).backward()
    return {name: full(param.grad) for name, param in named.items()}


def test_penalty_on_whole_weights_reaches_the_gradient_of_every_part() -> None:
    expected = {name: 3 * param.detach() ** 2 for name, param in make_model("uneven").named_parameters()}
    for found in run_ranks(penalty, 4):
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name])
