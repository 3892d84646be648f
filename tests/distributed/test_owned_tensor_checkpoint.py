"""Owned tensors through torch's distributed checkpoints and state-dict functions, beside FSDP2 parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from dmuon_hf.core.runtime.state_dict_shim import install_state_dict_shim, is_installed, uninstall_state_dict_shim
from tests.distributed.owned_tensors import assert_whole, flat_mesh, own, parameter, values
from tests.harness import run_ranks


class Mixed(nn.Module):
    """Two matrices to be owned, of uneven shapes, beside a linear layer and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.up = nn.Linear(6, 10, bias=False)
            self.down = nn.Linear(10, 5, bias=False)
            self.head = nn.Linear(5, 3)
        self.register_buffer("scale", torch.full((3,), float(seed)))


def spread_model(seed: int, world: int, *, shards: int | None = None) -> Mixed:
    """``Mixed`` with owned matrices; ``shards`` smaller than the world makes an HSDP mesh."""
    model = Mixed(seed)
    mesh = init_device_mesh("cpu", (world // (shards or world), shards or world), mesh_dim_names=("replicate", "shard"))
    if shards is None:
        mesh = mesh["shard"]
    for index, layer in enumerate((model.up, model.down)):
        layer.weight = parameter(layer.weight.detach(), mesh, (index + 1) % world)
    fully_shard(model, mesh=mesh, ignored_params={model.up.weight, model.down.weight})
    return model


def optimizer_with_state(model: nn.Module, seed: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for param in model.parameters():
            whole = torch.randn(param.shape)
            if isinstance(param, OwnedTensor):
                param.grad = own(whole, param.device_mesh, param.owner)
            elif isinstance(param, DTensor):
                param.grad = distribute_tensor(whole, param.device_mesh, param.placements)
            else:
                param.grad = whole
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.detach().full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {param: name for name, param in model.named_parameters()}
    state = {f"{names[p]}.{key}": plain(v) for p, entry in optimizer.state.items() for key, v in entry.items()}
    return {name: plain(value) for name, value in model.state_dict().items()} | state


def assert_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(right[key])), key


def trained_single(seed: int) -> dict[str, Any]:
    model = Mixed(seed)
    return snapshot(model, optimizer_with_state(model, seed))


def save_load(rank: int, world: int, directory: str) -> None:
    mesh = flat_mesh(world)
    whole = values(shape=(7, 3))
    dcp.save({"w": own(whole, mesh, 1)}, checkpoint_id=directory)
    target = own(torch.zeros(7, 3), mesh, 0)
    version = target.content.version
    dcp.load({"w": target}, checkpoint_id=directory)
    assert_whole(target, whole)
    assert target.content.version > version  # on every rank, though the owner alone was written
    even = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])
    columns = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(1)])
    dcp.load({"w": even}, checkpoint_id=directory)
    assert torch.equal(even.full_tensor(), whole)
    dcp.load({"w": columns}, checkpoint_id=directory)
    assert torch.equal(columns.full_tensor(), whole)
    dcp.save({"w": even}, checkpoint_id=f"{directory}/even")
    again = own(torch.zeros(7, 3), mesh, 1)
    dcp.load({"w": again}, checkpoint_id=f"{directory}/even")
    assert_whole(again, whole)


def test_dcp_round_trips_between_owners_and_sharded_layouts(tmp_path: Path) -> None:
    run_ranks(save_load, 3, str(tmp_path / "ck"))
    single = {"w": torch.zeros(7, 3)}
    dcp.load(single, checkpoint_id=tmp_path / "ck", no_dist=True)
    assert torch.equal(single["w"], values(shape=(7, 3)))


def saves_asynchronously(rank: int, world: int, directory: str) -> None:
    mesh, whole = flat_mesh(world), values(shape=(7, 3))
    tensor = own(whole, mesh, 1)
    future = dcp.async_save({"w": tensor}, checkpoint_id=directory, process_group=dist.new_group(backend="gloo"))
    tensor.zero_()
    future.result()
    dcp.load({"w": tensor}, checkpoint_id=directory)
    assert_whole(tensor, whole)


def test_dcp_async_save_keeps_the_values_at_the_call(tmp_path: Path) -> None:
    run_ranks(saves_asynchronously, 2, str(tmp_path / "ck"))


def save_training(rank: int, world: int, directory: str, shards: int | None) -> None:
    model = spread_model(3, world, shards=shards)
    optimizer = optimizer_with_state(model, 3)
    dcp.save(
        {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=directory,
    )


def load_training(rank: int, world: int, directory: str, shards: int | None) -> dict[str, Any]:
    model = spread_model(9, world, shards=shards)
    optimizer = optimizer_with_state(model, 9)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    for layer in (model.up, model.down):
        assert type(layer.weight) is OwnedTensor
        assert type(optimizer.state[layer.weight]["exp_avg"]) is OwnedTensor
    return snapshot(model, optimizer)


def load_training_single(directory: Path) -> dict[str, Any]:
    model = Mixed(9)
    optimizer = optimizer_with_state(model, 9)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    return snapshot(model, optimizer)


def test_dcp_of_model_and_optimizer_loads_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    expected = trained_single(3)
    run_ranks(save_training, 4, str(tmp_path / "ck"), None)
    for world, shards in ((4, 2), (2, None), (3, None)):
        for loaded in run_ranks(load_training, world, str(tmp_path / "ck"), shards):
            assert_equal(loaded, expected)
    assert_equal(load_training_single(tmp_path / "ck"), expected)
    run_ranks(save_training, 4, str(tmp_path / "hsdp"), 2)
    assert_equal(run_ranks(load_training, 2, str(tmp_path / "hsdp"), None)[0], expected)


def full_states(rank: int, world: int, broadcast: bool, shards: int | None) -> dict[str, Any]:
    install_state_dict_shim()
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=broadcast)
    source = spread_model(3, world, shards=shards)
    source_optimizer = optimizer_with_state(source, 3)
    model_state = get_model_state_dict(source, options=gather)
    optimizer_state = get_optimizer_state_dict(source, source_optimizer, options=gather)
    assert bool(model_state) == (rank == 0)
    model = spread_model(9, world, shards=shards)
    optimizer = optimizer_with_state(model, 9)
    version = model.up.weight.content.version
    if not broadcast:  # every rank has read the whole file
        received = [model_state, optimizer_state]
        dist.broadcast_object_list(received, src=0)
        model_state, optimizer_state = received
    load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, model_state, options=load)
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=load)
    assert model.up.weight.content.version > version
    for layer in (model.up, model.down):
        momentum = optimizer.state[layer.weight]["exp_avg"]
        assert type(momentum) is OwnedTensor and momentum.owner == layer.weight.owner
    return snapshot(model, optimizer)


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize(("world", "shards"), [(3, None), (4, 2)])
def test_full_state_dicts_load_into_owned_tensors(world: int, shards: int | None, broadcast: bool) -> None:
    for loaded in run_ranks(full_states, world, broadcast, shards):
        assert_equal(loaded, trained_single(3))


def meta_model(rank: int, world: int) -> None:
    install_state_dict_shim()
    mesh, whole = flat_mesh(world), values(shape=(5, 4))
    module = nn.Linear(4, 5, bias=False)
    empty = torch.empty((5 if rank == 1 else 0, 4), device="meta")
    module.weight = nn.Parameter(OwnedTensor.from_local(empty, mesh, owner=1, shape=(5, 4)))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, {"weight": whole} if rank == 0 else {}, options=options)
    assert_whole(module.weight.detach(), whole)


def test_full_state_dict_materialises_owned_meta_parameters() -> None:
    run_ranks(meta_model, 2)


def test_shim_installs_once_and_uninstalls_cleanly() -> None:
    import torch.distributed._state_dict_utils as utils
    import torch.distributed.checkpoint.state_dict as state_dict

    was_installed = is_installed()
    uninstall_state_dict_shim()
    before = (utils._distribute_tensors, state_dict._distribute_state_dict)
    install_state_dict_shim()
    install_state_dict_shim()
    assert is_installed() and utils._distribute_tensors is not before[0]
    uninstall_state_dict_shim()
    uninstall_state_dict_shim()
    assert not is_installed() and (utils._distribute_tensors, state_dict._distribute_state_dict) == before
    if was_installed:
        install_state_dict_shim()
