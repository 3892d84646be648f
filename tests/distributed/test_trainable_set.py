"""What trains changes after set-up: unfreezing, freezing, new parameters; and who synchronises it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import ConfigurationError, LockstepError
from tests.distributed import training
from tests.distributed.test_edited_models import MODES
from tests.harness import run_ranks
from tests.harness.models import dense_batch, rank_part, tiny_mlp
from tests.harness.reference import ReferenceOptimizer

MATRIX, NORM = "layers.1.up_proj.weight", "layers.1.ln.weight"


def _dedicated(mode: str, world: int, frozen: tuple[str, ...] = (), seed: int = 0) -> nn.Module:
    """A model in which ``frozen`` did not train when it was dedicated and sharded."""
    model = tiny_mlp(seed)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if mode == "local":
        dmuon.dedicate_params(model, None, training.is_matrix)
        return model
    if mode == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(model, mesh["shard"], training.is_matrix, replicate_mesh=mesh["replicate"])
    else:
        mesh = init_device_mesh("cpu", (world,))
        dmuon.dedicate_params(model, mesh, training.is_matrix, reshard_after_forward=mode == "z3")
    training.shard(model, mesh, mode == "z3")
    return model


def _step(model: nn.Module, optimizer: Any, step: int, rank: int, world: int) -> None:
    model(rank_part(dense_batch(step, batch=48), rank, world)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _reference(changes: dict[int, tuple[str, bool]], frozen: tuple[str, ...], steps: int) -> dict[str, torch.Tensor]:
    model = tiny_mlp()
    optimizer = ReferenceOptimizer(model, training.is_matrix, **training.HYPER)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    for step in range(steps):
        if step in changes:
            name, trains = changes[step]
            model.get_parameter(name).requires_grad_(trains)
        _step(model, optimizer, step, 0, 1)
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [MATRIX, NORM])
def test_a_parameter_unfrozen_between_steps_trains_from_then_on(mode: str, name: str) -> None:
    expected = _reference({2: (name, True)}, (name,), 4)
    for weights, order in run_ranks(_unfreeze, MODES[mode], mode, name):
        assert order
        for other, want in expected.items():
            assert (weights[other] - want).norm() < 2e-4 * want.norm(), other


def _unfreeze(rank: int, world: int, mode: str, name: str) -> tuple[dict[str, torch.Tensor], bool]:
    model = _dedicated(mode, world, (name,) if name == NORM else ())
    everything = [p for _, p in model.named_parameters()]
    model.get_parameter(name).requires_grad_(False)
    optimizer = dmuon.Muon(model, **training.HYPER)
    for step in range(4):
        if step == 2:
            with torch.no_grad():  # Leaves FSDP2's root unsharded, where what the module shows is not what is held.
                model(dense_batch(0))
            model.get_parameter(name).requires_grad_(True)
        _step(model, optimizer, step, rank, world)
    order = [
        [next(i for i, p in enumerate(everything) if p is param) for param in group["params"]]
        for group in optimizer.param_groups
    ]
    return training.snapshot(model), all(positions == sorted(positions) for positions in order)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [MATRIX, NORM])
def test_a_frozen_parameter_is_not_decayed_and_keeps_its_state(mode: str, name: str) -> None:
    expected = _reference({1: (name, False), 2: (name, True)}, (), 3)
    for weights in run_ranks(_freeze, MODES[mode], mode, name):
        for other, want in expected.items():
            assert (weights[other] - want).norm() < 2e-4 * want.norm(), other


def _freeze(rank: int, world: int, mode: str, name: str) -> dict[str, torch.Tensor]:
    model = _dedicated(mode, world)
    optimizer = dmuon.Muon(model, **training.HYPER)
    for step in range(3):
        model.get_parameter(name).requires_grad_(step != 1)
        _step(model, optimizer, step, rank, world)
    return training.snapshot(model)


def _add_head(model: nn.Module) -> None:
    model.extra = nn.Linear(2, 2)


def _unfreeze_selected(model: nn.Module) -> None:
    model.get_parameter("layers.0.up_proj.weight").requires_grad_(True)


CHANGES: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "new module": (_add_head, "extra.weight"),
    "selected while frozen": (_unfreeze_selected, "layers.0.up_proj.weight"),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_change_that_cannot_be_followed_is_refused_by_name(mode: str) -> None:
    for messages in run_ranks(_refused, MODES[mode], mode):
        for change, message in messages.items():
            assert CHANGES[change][1] in message, message


def _refused(rank: int, world: int, mode: str) -> dict[str, str]:
    messages = {}
    for change, (edit, _) in CHANGES.items():
        model = _dedicated(mode, world, ("layers.0.up_proj.weight",))
        optimizer = dmuon.Muon(model, **training.HYPER)
        _step(model, optimizer, 0, rank, world)
        edit(model)
        with pytest.raises(ConfigurationError) as error:
            _step(model, optimizer, 1, rank, world)
        messages[change] = str(error.value)
    return messages


def test_unfreezing_on_one_rank_is_an_error_on_all() -> None:
    for message in run_ranks(_unfreeze_on_one, 2):
        assert f"{MATRIX} is trainable on data-parallel rank 1 and not on rank 0" in message


def _unfreeze_on_one(rank: int, world: int) -> str:
    model = _dedicated("z3", world)
    model.get_parameter(MATRIX).requires_grad_(False)
    optimizer = dmuon.Muon(model, **training.HYPER)
    _step(model, optimizer, 0, rank, world)
    model.get_parameter(MATRIX).requires_grad_(rank == 1)
    with pytest.raises(LockstepError) as error:
        _step(model, optimizer, 1, rank, world)
    return str(error.value)


def test_an_unfrozen_parameter_joins_the_group_that_lists_it() -> None:
    model = _dedicated("local", 1)
    listed = model.get_parameter(NORM)
    listed.requires_grad_(False)
    norms = [param for name, param in model.named_parameters() if ".ln." in name]
    rest = [param for name, param in model.named_parameters() if ".ln." not in name]
    groups = [{"params": rest, "group_name": "rest"}, {"params": norms, "group_name": "norms", "weight_decay": 0.0}]
    optimizer = dmuon.Muon(model, param_groups=groups)
    _step(model, optimizer, 0, 0, 1)
    listed.requires_grad_(True)
    _step(model, optimizer, 1, 0, 1)
    holders = [group for group in optimizer.param_groups if any(param is listed for param in group["params"])]
    assert [group["group_name"] for group in holders] == ["norms/adamw"]


def _forgotten(model: nn.Module, mesh: Any) -> None:
    pass


def _root_forgotten(model: nn.Module, mesh: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)


def _ignored(model: nn.Module, mesh: Any) -> None:
    fully_shard(model, mesh=mesh, ignored_params={model.head.weight})


WITHOUT_SYNC: dict[str, tuple[Callable[[nn.Module, Any], None], str]] = {
    "fully_shard forgotten": (_forgotten, NORM),
    "root forgotten": (_root_forgotten, "head.weight"),
    "ignored": (_ignored, "head.weight"),
}


@pytest.mark.parametrize("what", WITHOUT_SYNC)
def test_weights_that_no_rank_synchronises_are_refused_in_the_first_step(what: str) -> None:
    for message in run_ranks(_unsynchronised, 2, what):
        assert WITHOUT_SYNC[what][1] in message and "fully_shard" in message


def _unsynchronised(rank: int, world: int, what: str) -> str:
    model, mesh = tiny_mlp(), init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, training.is_matrix)
    WITHOUT_SYNC[what][0](model, mesh)
    optimizer = dmuon.Muon(model)
    with pytest.raises(ConfigurationError) as error:
        _step(model, optimizer, 0, rank, world)
    return str(error.value)


def test_frozen_weights_need_nobody_to_synchronise_them() -> None:
    assert run_ranks(_frozen_and_ignored, 2) == [None] * 2


def _frozen_and_ignored(rank: int, world: int) -> None:
    model, mesh = tiny_mlp(), init_device_mesh("cpu", (world,))
    model.head.requires_grad_(False)
    dmuon.dedicate_params(model, mesh, training.is_matrix)
    _ignored(model, mesh)
    _step(model, dmuon.Muon(model), 0, rank, world)


@pytest.mark.parametrize("owners_on", ["shard", "all"])
def test_owners_on_other_ranks_than_fsdp_are_refused(owners_on: str) -> None:
    for message in run_ranks(_other_ranks, 4, owners_on):
        assert "layers.0.ln.weight" in message and "replicate_mesh" in message


def _other_ranks(rank: int, world: int, owners_on: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = tiny_mlp()
    replicas = mesh["replicate"] if owners_on == "all" else None
    dmuon.dedicate_params(model, mesh["shard"], training.is_matrix, replicate_mesh=replicas)
    training.shard(model, mesh["shard"] if owners_on == "all" else mesh, True)
    optimizer = dmuon.Muon(model)
    with pytest.raises(ConfigurationError) as error:
        _step(model, optimizer, 0, rank, world)
    return str(error.value)


@pytest.mark.parametrize("name", ["head.weight", NORM, MATRIX])
def test_replicas_that_start_unequal_are_refused_on_every_rank(name: str) -> None:
    for message in run_ranks(_unequal, 4, name):
        assert message.startswith(f"{name} differs between data-parallel ranks 0 and 2")


def _unequal(rank: int, world: int, name: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = tiny_mlp()
    with torch.no_grad():
        model.get_parameter(name).mul_(1 + rank // 2)
    with pytest.raises(LockstepError) as error:
        _train_on(model, mesh, rank, world)
    return str(error.value)


def _train_on(model: nn.Module, mesh: Any, rank: int, world: int) -> None:
    dmuon.dedicate_params(model, mesh["shard"], training.is_matrix, replicate_mesh=mesh["replicate"])
    training.shard(model, mesh, True)
    _step(model, dmuon.Muon(model), 0, rank, world)


def test_unequal_replicas_become_the_model_of_source_rank() -> None:
    assert len({weights[MATRIX].sum().item() for weights in run_ranks(_from_source, 4)}) == 1


def _from_source(rank: int, world: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = tiny_mlp()
    with torch.no_grad():
        model.get_parameter(MATRIX).mul_(1 + rank)
    dmuon.dedicate_params(model, mesh["shard"], training.is_matrix, replicate_mesh=mesh["replicate"], source_rank=0)
    training.shard(model, mesh, True)
    return training.snapshot(model)


CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "the model": lambda model: model.bfloat16(),
    "a block": lambda model: model.layers[1].half(),
    "a matrix": lambda model: model.layers[1].up_proj.to(torch.float64),
    "what FSDP2 keeps": lambda model: model.head.half(),
}


@pytest.mark.parametrize("mode", MODES)
def test_casts_after_the_first_step_are_refused_by_name(mode: str) -> None:
    for messages in run_ranks(_cast, MODES[mode], mode):
        for cast, message in messages.items():
            assert "was cast" in message and "weight" in message, f"{cast}: {message}"


def _cast(rank: int, world: int, mode: str) -> dict[str, str]:
    messages = {}
    for name, cast in CASTS.items():
        model = _dedicated(mode, world)
        optimizer = dmuon.Muon(model)
        _step(model, optimizer, 0, rank, world)
        cast(model)
        with pytest.raises(ConfigurationError) as error:
            _step_or_forward(model, optimizer, mode, rank, world)
        messages[name] = str(error.value)
    return messages


def _step_or_forward(model: nn.Module, optimizer: Any, mode: str, rank: int, world: int) -> None:
    if mode == "local":
        optimizer.step()  # Nothing is gathered, and torch may refuse the forward.
    else:
        _step(model, optimizer, 1, rank, world)


@pytest.mark.parametrize("mode", MODES)
def test_conversions_that_change_nothing_are_no_change(mode: str) -> None:
    assert run_ranks(_no_cast, MODES[mode], mode) == [None] * MODES[mode]


def _no_cast(rank: int, world: int, mode: str) -> None:
    model = _dedicated(mode, world)
    optimizer = dmuon.Muon(model)
    for step in range(2):
        model.float().to("cpu")
        _step(model, optimizer, step, rank, world)


def test_a_copy_of_an_owned_model_or_block_is_refused_with_the_way_out() -> None:
    for messages in run_ranks(_copies, 2):
        assert all("before dedicate_params" in message for message in messages)


def _copies(rank: int, world: int) -> list[str]:
    model, messages = tiny_mlp(), []
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), training.is_matrix)
    for part in (model, model.layers[0]):
        with pytest.raises(ConfigurationError) as error:
            copy.deepcopy(part)
        messages.append(str(error.value))
    return messages


def test_weights_compute_in_their_own_dtype_beside_masters_of_another() -> None:
    assert run_ranks(_masters, 2) == [torch.bfloat16] * 2


def _masters(rank: int, world: int) -> torch.dtype:
    model, mesh = tiny_mlp().bfloat16(), init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, training.is_matrix, master_dtype=torch.float32)
    training.shard(model, mesh, True)
    return model(dense_batch(0).bfloat16()).dtype
