"""dedicate_params: what it installs, what it refuses, and that its process groups outlive nothing."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon_hf.core as dmuon
from dmuon_hf.core.process_groups import live_clones
from tests.harness import run_ranks
from tests.harness.models import container_mlp, dense_batch, tiny_llama, tiny_mlp


def is_proj(name: str, param: nn.Parameter) -> bool:
    return "proj" in name and param.ndim == 2


def world_mesh(world: int) -> Any:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))


def message_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# -- what it installs --------------------------------------------------------------------------------------------------


def installed(rank: int, world: int) -> dict[str, Any]:
    model = tiny_mlp()
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    assignment = dmuon.dedicate_params(model, world_mesh(world), is_proj)
    for layer in model.layers:
        fully_shard(layer, mesh=world_mesh(world))
    fully_shard(model, mesh=world_mesh(world))
    params = dict(model.named_parameters())
    owned = {name: param for name, param in params.items() if isinstance(param, dmuon.OwnedTensor)}
    return {
        "owners": {name: assignment[param] for name, param in owned.items()},
        "local_rows": {name: param.to_local().shape[0] for name, param in owned.items()},
        "global_shapes": all(param.shape == whole[name].shape for name, param in params.items()),
        "equal": all(torch.equal(param.full_tensor(), whole[name]) for name, param in params.items()),
        "sharded_by_fsdp": [
            n for n, p in params.items() if isinstance(p, DTensor) and not isinstance(p, dmuon.OwnedTensor)
        ],
        "owned_here": [param.name for param in dmuon.get_owned_params(model, rank)],
        "dedicated": [param.name for param in dmuon.get_dedicated_params(model)],
        "plan": dmuon.summarize_comm_plan(model),
    }


def test_selected_matrices_are_whole_on_their_owner_and_fsdp_takes_the_rest() -> None:
    results = run_ranks(installed, 2)
    first = results[0]
    assert len(first["owners"]) == 9
    assert set(first["owners"].values()) == {0, 1}
    for rank, result in enumerate(results):
        assert result["owners"] == first["owners"]
        assert result["global_shapes"] and result["equal"]
        assert result["owned_here"] == [name for name in result["dedicated"] if first["owners"][name] == rank]
        for name, owner in first["owners"].items():
            assert (result["local_rows"][name] > 0) == (owner == rank)
        assert not any("proj" in name for name in result["sharded_by_fsdp"])
        assert "head.weight" in result["sharded_by_fsdp"]
        assert result["plan"]["gather_bytes"] == 4 * 9 * 16 * 32
        assert result["plan"]["plan_digest"] == first["plan"]["plan_digest"]


def trains_in_containers(rank: int, world: int) -> float:
    model = container_mlp()
    dmuon.dedicate_params(model, world_mesh(world), is_proj)
    with torch.no_grad():
        return float((model(dense_batch(0)) - container_mlp()(dense_batch(0))).abs())


def test_blocks_that_are_mere_containers_are_hooked_at_their_linears() -> None:
    assert max(run_ranks(trains_in_containers, 2)) < 1e-6


def hooked_at(rank: int, world: int, how: str) -> list[str]:
    model = tiny_llama()
    arguments: dict[str, Any] = {
        "default": {},
        "predicate": {"hook_boundary_predicate": lambda module: type(module).__name__ == "LlamaMLP"},
        "fallback": {
            "hook_boundary_predicate": lambda module: type(module).__name__ == "LlamaMLP",
            "hook_boundary_strict": False,
        },
        "resolver": {"hook_boundary_resolver": lambda name, param: model.model},
    }[how]
    chosen = (lambda n, p: "mlp" in n) if how == "predicate" else is_proj
    dmuon.dedicate_params(model, world_mesh(world), chosen, **arguments)
    with torch.no_grad():
        ids = torch.arange(3, 15).view(1, -1)
        torch.testing.assert_close(model(input_ids=ids).logits, tiny_llama()(input_ids=ids).logits)
    return [group["name"] for group in dmuon.summarize_comm_plan(model)["groups"]]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("default", ["model.layers.0", "model.layers.1"]),
        ("predicate", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("resolver", ["model"]),
    ],
)
def test_hook_boundaries_follow_the_arguments(how: str, expected: list[str]) -> None:
    assert run_ranks(hooked_at, 2, how)[0] == expected


def test_non_strict_boundaries_fall_back_to_the_parameters_module() -> None:
    names = run_ranks(hooked_at, 2, "fallback")[0]
    assert "model.layers.0.mlp" in names and "model.layers.0.self_attn.q_proj" in names


def assignments(rank: int, world: int, arguments: dict[str, Any], env: dict[str, str]) -> list[int]:
    os.environ.update(env)
    model = tiny_llama()
    return list(dmuon.dedicate_params(model, world_mesh(world), is_proj, **arguments).values())


def test_owner_arguments_change_the_assignment() -> None:
    default = run_ranks(assignments, 2, {}, {})[0]
    assert set(run_ranks(assignments, 2, {"owner_strategy": "rank0"}, {})[0]) == {0}
    assert set(run_ranks(assignments, 2, {}, {"DMUON_OWNER_STRATEGY": "rank0"})[0]) == {0}
    assert run_ranks(assignments, 2, {"owner_strategy": "round_robin"}, {})[0] != default
    capped = run_ranks(assignments, 2, {"max_owners_per_group": 1}, {})[0]
    assert len(set(capped[:7])) == 1 and len(set(capped[7:])) == 1 and capped != default
    grouped = run_ranks(assignments, 2, {"max_owners_per_group": 1, "assignment_group_key_fn": same_group}, {})[0]
    assert len(set(grouped)) == 1


def same_group(name: str, param: nn.Parameter) -> int:
    return 0


# -- what it refuses ---------------------------------------------------------------------------------------------------


def refusals(rank: int, world: int) -> dict[str, str]:
    mesh = world_mesh(world)
    plane = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    messages = {
        "nothing": message_of(lambda: dmuon.dedicate_params(tiny_mlp(), mesh, lambda n, p: False)),
        "2-d": message_of(lambda: dmuon.dedicate_params(tiny_mlp(), plane, is_proj)),
        "no mesh": message_of(lambda: dmuon.dedicate_params(tiny_mlp(), None, is_proj)),
        "policy": message_of(lambda: dmuon.dedicate_params(tiny_mlp(), mesh, is_proj, process_group_policy="mine")),
        "strategy": message_of(lambda: dmuon.dedicate_params(tiny_mlp(), mesh, is_proj, owner_strategy="best")),
        "vector": message_of(lambda: dmuon.dedicate_params(tiny_mlp(), mesh, lambda n, p: "ln.weight" in n)),
        "boundary": message_of(
            lambda: dmuon.dedicate_params(tiny_mlp(), mesh, is_proj, hook_boundary_predicate=lambda m: False)
        ),
        "resolver": message_of(
            lambda: dmuon.dedicate_params(
                tiny_mlp(), mesh, is_proj, hook_boundary_resolver=lambda n, p: nn.Linear(1, 1)
            )
        ),
        "buffers": message_of(lambda: dmuon.dedicate_params(tiny_mlp(), mesh, is_proj, tp_buffer_reuse="some")),
    }
    model = tiny_mlp()
    dmuon.dedicate_params(model, mesh, is_proj)
    messages["twice"] = message_of(lambda: dmuon.dedicate_params(model, mesh, is_proj))
    model = tiny_mlp()
    fully_shard(model, mesh=mesh)
    messages["sharded"] = message_of(lambda: dmuon.dedicate_params(model, mesh, is_proj))
    model = tiny_mlp()
    model.layers[1].up_proj.weight = model.layers[0].up_proj.weight
    messages["shared"] = message_of(lambda: dmuon.dedicate_params(model, mesh, is_proj))
    messages["frozen"] = message_of(lambda: dmuon.dedicate_params(tiny_mlp().requires_grad_(False), mesh, is_proj))
    return messages


def test_wrong_input_is_refused_with_what_to_change() -> None:
    expected = {
        "nothing": ("ConfigurationError", "Widen the predicate"),
        "2-d": ("ConfigurationError", "replicate_mesh="),
        "no mesh": ("ConfigurationError", "init_device_mesh"),
        "policy": ("ConfigurationError", "isolated"),
        "strategy": ("ConfigurationError", "round_robin"),
        "vector": ("ConfigurationError", "ln.weight"),
        "boundary": ("ConfigurationError", "hook_boundary_strict=False"),
        "resolver": ("ConfigurationError", "must return a module of the model"),
        "buffers": ("ConfigurationError", "tp_buffer_reuse must be False, True, 'gather', 'scatter' or 'all'"),
        "twice": ("ConfigurationError", "already called"),
        "sharded": ("ConfigurationError", "before fully_shard"),
        "shared": ("ConfigurationError", "layers.0"),
        "frozen": ("ConfigurationError", "frozen"),
    }
    for messages in run_ranks(refusals, 2):
        for case, (kind, words) in expected.items():
            assert messages[case].startswith(kind), f"{case}: {messages[case]}"
            assert words in messages[case], f"{case}: {messages[case]}"


def different_plans(rank: int, world: int) -> str:
    predicate = is_proj if rank == 0 else (lambda n, p: is_proj(n, p) and "layers.0" in n)
    return message_of(lambda: dmuon.dedicate_params(tiny_mlp(), world_mesh(world), predicate))


def test_ranks_with_different_plans_are_refused_on_every_rank() -> None:
    for message in run_ranks(different_plans, 3):
        assert message.startswith("LockstepError") and "first difference" in message


# -- groups, patches, one process --------------------------------------------------------------------------------------


def init_twice(rank: int, world: int, folder: str) -> list[tuple[int, float]]:
    seen = []
    for attempt in range(2):
        # A store of its own each time: torch itself cannot make the same groups twice in one store.
        store = dist.FileStore(f"{folder}/store{attempt}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        models = [tiny_mlp(), tiny_mlp()]
        for model in models:
            dmuon.dedicate_params(model, world_mesh(world), is_proj)
        with torch.no_grad():
            seen.append((live_clones(), float(models[1](dense_batch(0)))))
        dist.destroy_process_group()
    return seen


def test_process_groups_are_shared_by_models_and_survive_destroy_and_init(tmp_path: Path) -> None:
    for seen in run_ranks(init_twice, 2, str(tmp_path), init=False):
        assert seen[0] == seen[1]
        assert seen[0][0] == 1


def groups_used(rank: int, world: int, policy: str) -> bool:
    mesh = world_mesh(world)
    model = tiny_mlp()
    dmuon.dedicate_params(model, mesh, is_proj, process_group_policy=policy)
    return dmuon.runtime_of(model).topology.shard_group is mesh.get_group()


def test_process_group_policy_decides_whose_groups_are_used() -> None:
    assert run_ranks(groups_used, 2, "shared") == [True, True]
    assert run_ranks(groups_used, 2, "isolated") == [False, False]


def patched_sharding(rank: int, world: int) -> tuple[bool, bool]:
    def sharded_by_fsdp() -> bool:
        model = tiny_mlp()
        dmuon.dedicate_params(model, world_mesh(world), is_proj)
        try:
            fully_shard(model, mesh=world_mesh(world))
        except Exception:
            return True
        return not isinstance(model.layers[0].up_proj.weight, dmuon.OwnedTensor)

    dmuon.uninstall_patch()
    without = sharded_by_fsdp()
    dmuon.install_patch()
    dmuon.install_patch()
    return without, sharded_by_fsdp()


def test_patch_makes_fully_shard_skip_dedicated_parameters_and_can_be_undone() -> None:
    assert run_ranks(patched_sharding, 2) == [(True, False)] * 2


def test_one_process_keeps_plain_parameters() -> None:
    model = tiny_mlp()
    before = dict(model.named_parameters())
    assignment = dmuon.dedicate_params(model, None, is_proj)
    assert set(assignment.values()) == {0} and len(assignment) == 9
    assert all(param is before[name] for name, param in model.named_parameters())
    assert dmuon.get_comm_ctx(model) is not None and dmuon.get_comm_ctx(tiny_mlp()) is None


def test_deep_copy_in_one_process_has_a_runtime_of_its_own() -> None:
    model = tiny_mlp()
    dmuon.dedicate_params(model, None, is_proj)
    twin = copy.deepcopy(model)
    optimizer = dmuon.Muon(twin)
    twin(dense_batch(0)).backward()
    optimizer.step()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert not torch.equal(param, other)


def test_unfinished_backward_is_an_error_at_the_step() -> None:
    for message, recovered in run_ranks(broken_backward, 2):
        assert message.startswith("DMuonError") and "zero_grad" in message
        assert recovered == "nothing was raised"


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory, say")


def broken_backward(rank: int, world: int) -> tuple[str, str]:
    model = tiny_mlp()
    mesh = world_mesh(world)
    dmuon.dedicate_params(model, mesh, is_proj)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model)
    handle = model.layers[1].register_forward_hook(lambda m, a, out: Breaks.apply(out))
    with pytest.raises(RuntimeError, match="out of memory"):
        model(dense_batch(rank)).backward()
    message = message_of(optimizer.step)
    handle.remove()

    def recover() -> None:
        optimizer.zero_grad()
        model(dense_batch(rank)).backward()
        optimizer.step()

    return message, message_of(recover)


def set_sync_through_fsdp(rank: int, world: int) -> tuple[bool, bool]:
    model = tiny_mlp()
    mesh = world_mesh(world)
    dmuon.dedicate_params(model, mesh, is_proj)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_requires_gradient_sync(False)
    off = dmuon.runtime_of(model).requires_sync
    model.set_requires_gradient_sync(True)
    return off, dmuon.runtime_of(model).requires_sync


def test_fsdp_gradient_sync_switch_reaches_dedicated_parameters() -> None:
    assert run_ranks(set_sync_through_fsdp, 2) == [(False, True)] * 2
