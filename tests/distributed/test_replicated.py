"""Matrices that every rank keeps whole: owners share out the updates, everything else is as under DDP."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon_hf.core as dmuon
from tests.distributed.training import (
    HYPER,
    Run,
    assert_same_training,
    backward,
    count_second_step,
    is_matrix,
    make_model,
    prepare,
    reference,
    snapshot,
    train,
)
from tests.harness import models, run_ranks
from tests.harness.reference import ReferenceOptimizer, train_reference


def mesh_of(world: int) -> Any:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))


def dedicated(world: int, name: str = "mlp") -> tuple[nn.Module, Any]:
    model, mesh = make_model(name), mesh_of(world)
    dmuon.dedicate_params_ddp(model, mesh, is_matrix)
    return model, mesh


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def ddp_no_sync(model: nn.Module) -> Any:
    return model.no_sync()  # type: ignore[operator]


# Training


@pytest.mark.parametrize(
    "run",
    [
        Run("ddp", "uneven", wrapper={"static_graph": True}),
        Run("ddp", "uneven", wrapper={"find_unused_parameters": True, "gradient_as_bucket_view": True}),
        Run("ddp", "uneven", accumulate=4, no_sync=ddp_no_sync),
        Run("replicate", "uneven", dedicate={"owner_strategy": "rank0"}),
        Run("ddp", "uneven", dedicate={"hook_boundary_predicate": is_linear}),
    ],
    ids=["static_graph", "find_unused", "DDP.no_sync", "one owner", "a unit per matrix"],
)
def test_every_setting_of_ddp_trains_like_one_process(run: Run) -> None:
    expected = reference(run)
    for result in run_ranks(train, 4, run):
        assert_same_training(run, result, expected)


def _bf16(rank: int, world: int) -> dict[str, Any]:
    return train(rank, world, Run("replicate", "uneven", dtype=torch.bfloat16, steps=2))


def test_weights_in_bf16_are_equal_on_all_ranks() -> None:
    results = run_ranks(_bf16, 2)
    for name, value in results[0]["weights"][-1].items():
        assert value.dtype is torch.bfloat16
        assert torch.equal(results[1]["weights"][-1][name], value), name


class Branches(nn.Module):
    """Layer 0 on all ranks, one of layers 1 to 3 by the sign of the input, layer 4 nowhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        index = 1 if x[0, 0] > 0 else 2
        return self.layers[index](self.layers[0](x)).square().mean()


def branch_batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(7 * step + rank)
    x = torch.randn(4, 6, generator=generator).abs()
    return x if rank == 0 else -x


def _branches(rank: int, world: int, mode: str) -> dict[str, Any]:
    model: nn.Module = Branches()
    mesh = mesh_of(world)
    dmuon.dedicate_params_ddp(model, mesh, is_matrix)
    plain = model
    if mode == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        dmuon.replicate(model, mesh)
    optimizer = dmuon.Muon(model, **HYPER)
    for step in range(3):
        model(branch_batch(step, rank)).backward()
        assert plain.layers[4].weight.grad is None and plain.layers[3].weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(plain)


@pytest.mark.parametrize("mode", ["ddp", "replicate"])
def test_branches_taken_on_some_ranks_train_and_those_taken_on_none_stay(mode: str) -> None:
    model = Branches()
    start = copy.deepcopy(model.state_dict())
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    for step in range(3):
        for rank in range(2):
            (model(branch_batch(step, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in run_ranks(_branches, 2, mode):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=2e-4, atol=1e-6, msg=name)
            if "layers.3" in name or "layers.4" in name:
                assert torch.equal(weights[name], start[name]), name


def _clipped(rank: int, world: int, mode: str) -> tuple[list[float], dict[str, Tensor]]:
    run = Run(mode, "uneven")
    model, optimizer = prepare(run, world)
    norms = []
    for step in range(3):
        backward(model, run, step, rank, world)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, snapshot(model)


@pytest.mark.parametrize("mode", ["ddp", "replicate"])
def test_clip_grad_norm_of_torch_takes_the_true_norm_on_every_rank(mode: str) -> None:
    results = run_ranks(_clipped, 4, mode)
    model = make_model("uneven")
    batches = [models.dense_batch(step, batch=48, width=64) for step in range(3)]
    expected = train_reference(
        model, ReferenceOptimizer(model, is_matrix, **HYPER), batches, models.loss_of, max_norm=0.05
    )[-1]
    assert all(norms == results[0][0] for norms, _ in results)
    for _, weights in results:
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5, msg=name)


def _storages_of_gradients(rank: int, world: int) -> dict[str, set[int]]:
    run = Run("ddp", "uneven")
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    storages: dict[str, set[int]] = {}
    for matrix in optimizer.runtime.dedicated.values():
        storages.setdefault(matrix.unit, set()).add(matrix.param.grad.untyped_storage().data_ptr())
    return storages


def test_averaged_gradients_of_a_unit_are_what_was_sent_and_no_copy_of_it() -> None:
    for storages in run_ranks(_storages_of_gradients, 2):
        assert len(storages) > 1
        assert all(len(of_unit) == 1 for of_unit in storages.values())


def _clip_matrices(rank: int, world: int) -> None:
    run = Run("ddp", "uneven")
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    grads = {name: p.grad.clone() for name, p in model.module.named_parameters() if is_matrix(name, p)}
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
    stats = dmuon.clip_grad_norm_(optimizer, norm / 2)
    assert stats.total_norm == pytest.approx(norm, rel=1e-5)
    assert stats.param_count == len(grads)
    for name, p in model.module.named_parameters():
        if name in grads:
            torch.testing.assert_close(p.grad, grads[name] / 2)


def test_clip_of_matrices_counts_each_once_and_scales_every_copy() -> None:
    run_ranks(_clip_matrices, 2)


def _owned_beside_replicated(rank: int, world: int) -> dict[str, Tensor]:
    run = Run("z3", "uneven", steps=3, accumulate=2)
    model, mesh = make_model(run.model), mesh_of(world)
    dmuon.dedicate_params(model, mesh, is_matrix)
    dmuon.replicate(model, mesh)
    optimizer = dmuon.Muon(model, **HYPER)
    for step in range(run.steps):
        backward(model, run, step, rank, world)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


def test_replicate_beside_dedicate_params_trains_like_one_process() -> None:
    expected = reference(Run("z3", "uneven", steps=3))["weights"][-1]
    for weights in run_ranks(_owned_beside_replicated, 2):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-5, msg=name)


# What is kept, and what is sent


def _kept(rank: int, world: int) -> dict[str, Any]:
    model, mesh = make_model("mlp"), mesh_of(world)
    before = dict(model.named_parameters())
    owners = dmuon.dedicate_params_ddp(model, mesh, is_matrix)
    wrapped = DistributedDataParallel(model)
    optimizer = dmuon.Muon(wrapped)
    assert all(param is before[name] for name, param in model.named_parameters())
    assert not any(param is own for param in wrapped._module_parameters for own in owners)
    held = sum(optimizer.state[param]["momentum_buffer"].to_local().numel() for param in owners)
    return {
        "owners": [owners[param] for name, param in before.items() if param in owners],
        "held": held,
        "owned": sum(param.numel() for param, owner in owners.items() if owner == rank),
    }


def test_parameters_stay_and_momentum_is_on_the_owner_alone() -> None:
    results = run_ranks(_kept, 2)
    assert results[0]["owners"] == results[1]["owners"]
    assert {0, 1} == set(results[0]["owners"])
    for result in results:
        assert result["held"] == result["owned"]


def _sent(rank: int, world: int) -> dict[str, Any]:
    run = Run("replicate", "mlp", steps=1)
    model, optimizer = prepare(run, world)
    matrices = [param for name, param in model.named_parameters() if is_matrix(name, param)]
    rest = [param for name, param in model.named_parameters() if not is_matrix(name, param)]
    counter = count_second_step(model, optimizer, run, rank, world)
    return {
        "matrices": 4 * sum(param.numel() for param in matrices),
        "backward": sum(record.payload for record in counter.select("all_reduce", phase="backward")),
        "averaged": 4 * sum(param.numel() + 1 for param in [*matrices, *rest]),
        "published": sum(record.payload for record in counter.select("broadcast", phase="step")),
        "averages": counter.calls("all_reduce", phase="backward"),
    }


def test_bytes_are_one_all_reduce_of_gradients_and_one_broadcast_of_matrices() -> None:
    for sent in run_ranks(_sent, 2):
        assert sent["backward"] == sent["averaged"]
        assert sent["published"] == sent["matrices"]
        assert sent["averages"] == 3 + 1  # a unit per layer, and the rest


def _first_ranks_values(rank: int, world: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    model, mesh = models.TinyMLP(), mesh_of(world)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    dmuon.dedicate_params_ddp(model, mesh, is_matrix)
    dmuon.replicate(model, mesh)
    return {"start": start, "now": snapshot(model)}


def test_all_ranks_start_from_the_first() -> None:
    results = run_ranks(_first_ranks_values, 2)
    for result in results:
        for name, value in results[0]["start"].items():
            assert torch.equal(result["now"][name], value), name


# Reading weights after a step


def _read_at_once(rank: int, world: int) -> dict[str, Any]:
    run = Run("ddp", "mlp")
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    optimizer.step()
    pending = [publish._flight is not None for publish in optimizer.runtime._publishes]
    layer = copy.deepcopy(model.module.layers[1].state_dict())
    inner = [publish._flight is not None for publish in optimizer.runtime._publishes]
    whole = {name: value.clone() for name, value in model.module.state_dict().items()}
    assert all(torch.equal(whole[f"layers.1.{name}"], value) for name, value in layer.items())
    return {"pending": pending, "after one layer": inner, "whole": whole}


def test_state_dict_waits_for_what_it_reads_and_no_more() -> None:
    results = run_ranks(_read_at_once, 2)
    for result in results:
        assert result["pending"] == [True, True, True]
        assert result["after one layer"] == [True, False, True]
        for name, value in results[0]["whole"].items():
            assert torch.equal(result["whole"][name], value), name


def _read_each(rank: int, world: int) -> list[Tensor]:
    run = Run("ddp", "mlp")
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    publishes = optimizer.runtime._publishes
    assert all(publish._flight is not None for publish in publishes)
    params = [param for param in model.module.parameters() if param.ndim == 2 and len(param) > 1]
    assert all(isinstance(param, nn.Parameter) for param in params)
    reads: list[Callable[[Tensor], Tensor]] = [
        Tensor.clone,
        lambda param: param.data.clone(),
        lambda param: torch._foreach_mul([param], 1.0)[0],
        copy.deepcopy,
        lambda param: param.detach().clone(),
        lambda param: torch.from_numpy(param.detach().numpy().copy()),
        lambda param: torch.cat([param, param])[: len(param)],
        lambda param: torch.load(_saved(param)),
    ]
    found = [read(param).detach().clone() for param, read in zip(params, reads, strict=False)]
    assert all(publish._flight is None for publish in publishes)
    assert all(type(param) is nn.Parameter for param in params)
    return found


def _saved(param: Tensor) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(param, buffer)
    buffer.seek(0)
    return buffer


def test_whoever_reads_a_weight_after_the_step_waits_for_it_and_zero_grad_does_not() -> None:
    first, second = run_ranks(_read_each, 2)
    assert len(first) == 8
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def _average_of_weights(rank: int, world: int) -> None:
    run = Run("replicate", "mlp")
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    optimizer.step()
    average = copy.deepcopy(model)
    assert dmuon.runtime_of(average) is None and dmuon.get_replicated_group(average) is None
    optimizer.zero_grad()
    if rank == 0:
        average(models.dense_batch(0)).backward()
    assert all(param.grad is None for param in model.parameters())


def test_deep_copy_is_a_plain_model_of_one_rank() -> None:
    run_ranks(_average_of_weights, 2)


# State dicts


def _state_on_rank_0(rank: int, world: int) -> None:
    run = Run("ddp", "mlp")
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    optimizer.step()
    if rank == 0:
        state = optimizer.state_dict()
        with pytest.raises(dmuon.DMuonError, match="get_optimizer_state_dict"):
            torch.save(state, io.BytesIO())
    whole = dmuon.get_optimizer_state_dict(model, optimizer)
    if rank == 0:
        torch.save(whole, io.BytesIO())
        assert set(whole["dedicated"]) == {n for n, p in model.module.named_parameters() if is_matrix(n, p)}
        assert all(entry["momentum_buffer"].any() for entry in whole["dedicated"].values())


def test_state_of_one_rank_is_no_collective_and_never_saved_without_momentum() -> None:
    run_ranks(_state_on_rank_0, 2)


def _load_state_dict(rank: int, world: int) -> None:
    run = Run("ddp", "mlp")
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    optimizer.step()
    state = optimizer.state_dict()
    again = dmuon.Muon(model, **HYPER)
    again.load_state_dict(state)
    for param in model.parameters():
        for key, value in optimizer.state[param].items():
            assert torch.equal(torch.as_tensor(again.state[param][key]), torch.as_tensor(value))
    plain = copy.deepcopy(dmuon.Muon(model).state_dict())
    for entry in plain["state"].values():
        if "momentum_buffer" in entry:
            entry["momentum_buffer"] = entry["momentum_buffer"].full_tensor()
    with pytest.raises(dmuon.ConfigurationError, match="plain tensor, here it is a matrix owned by rank"):
        again.load_state_dict(plain)


def test_state_dict_of_the_optimizer_loads_on_the_same_ranks() -> None:
    run_ranks(_load_state_dict, 2)


# Refusals


def _two_dimensional(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(dmuon.ConfigurationError, match="1-D mesh"):
        dmuon.dedicate_params_ddp(make_model("mlp"), mesh, is_matrix)
    model, _ = dedicated(world)
    with pytest.raises(ValueError, match="1-D mesh"):
        dmuon.replicate(model, mesh)


def _before_dedication(rank: int, world: int) -> None:
    with pytest.raises(RuntimeError, match="dedicate_params"):
        dmuon.replicate(make_model("mlp"), mesh_of(world))


def _twice(rank: int, world: int) -> None:
    model, mesh = dedicated(world)
    assert dmuon.get_replicated_group(model) is None
    assert dmuon.replicate(model, mesh) is model
    group = dmuon.get_replicated_group(model)
    assert group is not None and set(group.params) == {n for n, p in model.named_parameters() if not is_matrix(n, p)}
    with pytest.raises(RuntimeError, match="already called"):
        dmuon.replicate(model, mesh)
    with pytest.raises(RuntimeError, match="already"):
        dmuon.dedicate_params_ddp(model, mesh, is_matrix)


def _sharded_rest(rank: int, world: int) -> None:
    model, mesh = make_model("mlp"), mesh_of(world)
    dmuon.dedicate_params(model, mesh, is_matrix)
    fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match="is a DTensor, and replicate is for models that nobody has sharded"):
        dmuon.replicate(model, mesh)
    with pytest.raises(dmuon.ConfigurationError, match="dedicate_params_ddp"):
        DistributedDataParallel(model)


def _wrapped(rank: int, world: int) -> None:
    model, mesh = dedicated(world)
    wrapped = DistributedDataParallel(model)
    with pytest.raises(dmuon.ConfigurationError, match="averages these gradients already"):
        dmuon.replicate(wrapped, mesh)
    with pytest.raises(dmuon.ConfigurationError, match="before DistributedDataParallel"):
        dmuon.dedicate_params_ddp(DistributedDataParallel(make_model("mlp")), mesh, is_matrix)
    with pytest.raises(dmuon.ConfigurationError, match="a part of the model"):
        DistributedDataParallel(dedicated(world)[0].layers[0])


def _nobody_synchronises(rank: int, world: int) -> None:
    model, _ = dedicated(world)
    optimizer = dmuon.Muon(model)
    model(models.dense_batch(rank)).backward()
    before = snapshot(model)
    with pytest.raises(dmuon.ConfigurationError, match=r"ln\.weight.*replicate\(model, mesh\)"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in snapshot(model).items())


def _meta(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = models.TinyMLP()
    with pytest.raises(dmuon.ConfigurationError, match="meta device"):
        dmuon.dedicate_params_ddp(model, mesh_of(world), is_matrix)


def _joined(rank: int, world: int) -> None:
    model, _ = dedicated(world)
    wrapped = DistributedDataParallel(model)
    with wrapped.join(), pytest.raises(dmuon.ConfigurationError, match=r"join\(\)"):
        wrapped(models.dense_batch(rank))


@pytest.mark.parametrize(
    "case",
    [
        _two_dimensional,
        _before_dedication,
        _twice,
        _sharded_rest,
        _wrapped,
        _nobody_synchronises,
        _meta,
        _joined,
    ],
)
def test_what_would_not_train_right_is_refused_on_every_rank(case: Callable[[int, int], None]) -> None:
    run_ranks(case, 2)


def _unequal_start(rank: int, world: int) -> str:
    model, mesh = dedicated(world)
    dmuon.replicate(model, mesh)
    with torch.no_grad():
        model.layers[0].up_proj.weight.add_(rank)
    optimizer = dmuon.Muon(model)
    model(models.dense_batch(rank)).backward()
    with pytest.raises(dmuon.LockstepError) as error:
        optimizer.step()
    return str(error.value)


def test_weights_that_one_rank_changed_are_named_in_the_first_step() -> None:
    for message in run_ranks(_unequal_start, 2):
        assert re.search(r"layers\.0\.up_proj\.weight differs between data-parallel ranks 0 and 1", message)


# Passes that end otherwise


def _unfinished(rank: int, world: int) -> None:
    run = Run("replicate", "mlp")
    model, optimizer = prepare(run, world)
    with dmuon.no_sync(model):
        backward(model, run, 0, rank, world)
    with pytest.raises(dmuon.DMuonError, match="accumulated under no_sync"):
        optimizer.step()
    optimizer.zero_grad()

    def broken(grad: Tensor) -> None:
        raise ValueError("broken")

    handle = model.layers[0].up_proj.weight.register_hook(broken)
    with pytest.raises(ValueError, match="broken"):
        backward(model, run, 0, rank, world)
    handle.remove()
    with pytest.raises(dmuon.DMuonError, match="did not finish"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model, run, 0, rank, world)
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    expected = reference(Run("replicate", "mlp", steps=1))["grads"][0]
    for name, value in expected.items():
        torch.testing.assert_close(grads[name], value, rtol=1e-4, atol=1e-6, msg=name)
    optimizer.step()


def test_step_needs_a_finished_pass_and_zero_grad_starts_over() -> None:
    run_ranks(_unfinished, 2)


def _two_passes(rank: int, world: int) -> dict[str, Tensor]:
    run = Run("ddp", "mlp")
    model, _ = prepare(run, world)
    for step in range(2):
        backward(model, run, step, rank, world)
    return {name: param.grad.clone() for name, param in model.module.named_parameters()}


def test_two_synchronised_passes_add_up() -> None:
    model = make_model("mlp")
    for step in range(2):
        models.loss_of(model, models.dense_batch(step, batch=48)).backward()
    for grads in run_ranks(_two_passes, 2):
        for name, param in model.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-4, atol=1e-6, msg=name)


def _scaled(rank: int, world: int) -> int:
    run = Run("ddp", "mlp")
    model, optimizer = prepare(run, world)
    before = snapshot(model)
    backward(model, run, 0, rank, world)
    if rank == 1:
        model.module.head.weight.grad[0, 0] = float("inf")
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in snapshot(model).items())
    return optimizer.skipped_steps


def test_infinite_gradient_of_one_rank_skips_the_step_of_all() -> None:
    assert run_ranks(_scaled, 2) == [1, 1]


def _nothing_left(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
    model.register_parameter("frozen", frozen)
    alone = copy.deepcopy(model)
    dmuon.dedicate_params_ddp(model, mesh_of(world), lambda name, param: param.ndim == 2)
    wrapped = DistributedDataParallel(model)
    assert torch.equal(frozen, torch.zeros(2))
    optimizer = dmuon.Muon(model, lr=1e-2)
    data = torch.randn(world, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    with wrapped.no_sync():
        wrapped(data[rank, 0]).square().mean().backward()
    wrapped(data[rank, 1]).square().mean().backward()
    torch.stack([alone(batch).square().mean() for batch in data.flatten(0, 1)]).sum().div(world).backward()
    for name in ("0.weight", "2.weight"):
        torch.testing.assert_close(model.get_parameter(name).grad, alone.get_parameter(name).grad)
    optimizer.step()


def test_model_whose_every_trainable_weight_has_an_owner_can_be_wrapped() -> None:
    run_ranks(_nothing_left, 2)
