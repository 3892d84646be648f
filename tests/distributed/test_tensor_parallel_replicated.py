"""Owners over replicas of a model that tensor parallelism has cut and nobody shards further."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime.replica_check import check_replicas
from tests.distributed.tp_training import TpRun, backward, parallelize, prepare, prepare_model, snapshot
from tests.distributed.training import HYPER, Run, batch_of, is_matrix, make_model
from tests.harness import models, run_ranks
from tests.harness.comm import CollectiveCounter
from tests.harness.reference import ReferenceOptimizer

RUN = TpRun("ddp_tp", Run("tp", "uneven"), everything=True)
MATRIX = "layers.0.wide.weight"


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def parallel_model(name: str = "uneven", *, everything: bool = True) -> tuple[nn.Module, DeviceMesh]:
    model, mesh = make_model(name), mesh_of()
    parallelize(model, mesh["tp"], everything=everything)
    return model, mesh


def traffic(rank: int, world: int) -> dict[str, dict[str, float]]:
    model, optimizer = prepare(RUN)
    found: dict[str, dict[str, float]] = {}
    for phase in ("backward", "step"):
        with CollectiveCounter() as counter:
            backward(model, RUN, 0, rank) if phase == "backward" else optimizer.step()
        sent = found[phase] = {}
        for record in counter.records:
            if record.tag.startswith("dmuon"):
                key = f"{record.kind} {record.tag}"
                sent[key] = sent.get(key, 0.0) + record.ring_bytes
    return found


def test_parts_are_averaged_and_published_between_replicas_and_meet_on_the_axis() -> None:
    matrices = sum(param.numel() for name, param in make_model("uneven").named_parameters() if is_matrix(name, param))
    results = run_ranks(traffic, 4)
    for found in results:
        assert found["backward"].keys() == {"all_reduce dmuon_shard"}
        assert {"all_to_all dmuon_tensor", "broadcast dmuon_shard"} <= found["step"].keys()
    cut = {"wide", "fold"}
    parts = sum(
        param.numel() * (1 if name.split(".")[-2] in cut else 2)
        for name, param in make_model("uneven").named_parameters()
        if is_matrix(name, param)
    )
    # A ring of two moves each published element once, on one of the two links of each of the two lines of replicas.
    published = sum(found["step"]["broadcast dmuon_shard"] for found in results)
    assert published == pytest.approx(4 * parts, rel=1e-6) and parts > matrices


def unequal_start(rank: int, world: int) -> dict[str, Tensor]:
    model, mesh = parallel_model()
    with torch.no_grad():
        for param in model.parameters():
            (param.to_local() if isinstance(param, DTensor) else param).add_(float(mesh["dp"].get_local_rank()))
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], is_matrix)
    dmuon.replicate_tp(model, mesh["dp"])
    return {name: param.full_tensor().detach() for name, param in model.named_parameters()}


def test_every_part_starts_as_the_first_replica_has_it() -> None:
    expected = dict(make_model("uneven").named_parameters())
    for found in run_ranks(unequal_start, 4):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


def drift(rank: int, world: int) -> str:
    model, optimizer = prepare(RUN)
    backward(model, RUN, 0, rank)
    optimizer.step()
    check_replicas(model)
    if rank == 3:
        with torch.no_grad():
            dict(model.named_parameters())[MATRIX].to_local().add_(1.0)
    try:
        check_replicas(model)
    except dmuon.LockstepError as error:
        return str(error)
    return ""


def test_part_that_drifts_from_its_replica_is_named() -> None:
    for message in run_ranks(drift, 4):
        assert f"{MATRIX} differs between data-parallel ranks 1 and 3" in message


def idle_replica(rank: int, world: int) -> dict[str, Tensor | None]:
    """The second replica runs no layer but the first."""
    model, optimizer = prepare(RUN)
    if rank < 2:
        backward(model, RUN, 0, rank)
    else:
        part = models.rank_part(batch_of(RUN.run, 0), 1, 2)
        model.layers[0](part).square().mean().backward()  # type: ignore[index,operator,union-attr]
    optimizer.step()
    return snapshot(model, optimizer, "weights")


def test_matrix_without_a_gradient_on_one_replica_counts_as_zero_there() -> None:
    model = make_model("uneven")
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    batch = batch_of(RUN.run, 0)
    (models.loss_of(model, models.rank_part(batch, 0, 2)) / 2).backward()
    (model.layers[0](models.rank_part(batch, 1, 2)).square().mean() / 2).backward()  # type: ignore[index,operator]
    optimizer.step()
    for weights in run_ranks(idle_replica, 4):
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=2e-4, atol=1e-5, msg=name)


def walk_an_old_graph(rank: int, world: int) -> str:
    model, optimizer = prepare(RUN)
    backward(model, RUN, 0, rank)
    loss = models.loss_of(model, models.rank_part(batch_of(RUN.run, 1), rank // 2, 2))
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_graph_from_before_a_step_is_refused_on_owners_and_replicas() -> None:
    for message in run_ranks(walk_an_old_graph, 4):
        assert "modified by an inplace operation" in message


def wrapped(rank: int, world: int) -> dict[str, Tensor | None]:
    tp = TpRun("ddp_tp", Run("tp", "llama"))
    model, mesh = parallel_model("llama", everything=False)
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], is_matrix)
    plain = model
    model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = dmuon.Muon(model, **HYPER)
    backward(model, tp, 0, rank)
    optimizer.step()
    return snapshot(plain, optimizer, "weights")


def test_plain_parameters_may_be_left_to_distributed_data_parallel() -> None:
    model = make_model("llama")
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    models.loss_of(model, batch_of(Run("tp", "llama"), 0)).backward()
    optimizer.step()
    for weights in run_ranks(wrapped, 4):
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=2e-4, atol=1e-5, msg=name)


def plain_function_on_parts() -> None:
    model, mesh = parallel_model()
    dmuon.dedicate_params_ddp(model, mesh["dp"], is_matrix)


def plain_replicate_on_parts() -> None:
    model, mesh = parallel_model()
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], is_matrix)
    dmuon.replicate(model, mesh["dp"])


def nobody_averages() -> None:
    model, mesh = parallel_model()
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], is_matrix)
    dmuon.Muon(model, **HYPER).step()


def sharded_rest() -> None:
    model, mesh = parallel_model(everything=False)
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], is_matrix)
    fully_shard(model.head, mesh=mesh["dp"])  # type: ignore[arg-type]
    dmuon.replicate_tp(model, mesh["dp"])


def other_dimension() -> None:
    model, mesh = parallel_model()
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], is_matrix)
    dmuon.replicate_tp(model, mesh["tp"])


def wrapped_biases() -> None:
    model, mesh = parallel_model(everything=False)
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], is_matrix)
    DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def twice() -> None:
    dmuon.replicate_tp(prepare_model(RUN), mesh_of()["dp"])


def whole_mesh() -> None:
    model, mesh = parallel_model()
    dmuon.dedicate_params_ddp_tp(model, mesh, is_matrix)


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "dedicate_params_ddp": (plain_function_on_parts, "under tensor parallelism call dedicate_params_ddp_tp()"),
    "replicate": (plain_replicate_on_parts, "after parallelize_module call replicate_tp"),
    "nobody averages": (nobody_averages, "no rank synchronises it: call dmuon.replicate_tp(model, mesh)"),
    "fully_shard": (sharded_rest, "head.weight is a DTensor on a mesh of the ranks"),
    "other dimension": (other_dimension, "pass the 1-D mesh of dedicate_params_ddp"),
    "DTensors inside of DDP": (
        wrapped_biases,
        "layers.0.wide.bias is a DTensor, which DistributedDataParallel does not",
    ),
    "twice": (twice, "already called on this model"),
    "whole mesh": (whole_mesh, "takes a 1-D mesh"),
}


def refusal(rank: int, world: int, case: str) -> str:
    try:
        REFUSED[case][0]()
    except dmuon.ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", REFUSED)
def test_what_leaves_replicas_unsynchronised_is_refused_on_all_ranks(case: str) -> None:
    for message in run_ranks(refusal, 4, case):
        assert REFUSED[case][1] in message


def copied(rank: int, world: int) -> bool:
    model, optimizer = prepare(RUN)
    backward(model, RUN, 0, rank)
    optimizer.step()
    twin: Any = copy.deepcopy(model)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs) and dmuon.get_dedicated_params(twin) == []


def test_deep_copy_is_a_plain_model_with_the_new_weights() -> None:
    assert run_ranks(copied, 4) == [True] * 4
