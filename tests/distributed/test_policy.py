"""Managed parameters by policy: routes, dtypes and casts, on every mesh like one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import ConfigurationError
from tests.distributed.training import (
    HYPER,
    Run,
    assert_same_training,
    backward,
    batch_of,
    is_matrix,
    make_model,
    muon_for_matrices,
    prepare,
    reference,
    snapshot,
    train,
)
from tests.harness import models, run_ranks
from tests.harness.reference import ReferenceOptimizer

MESHES = [("local", 1), ("z2", 2), ("z3", 4), ("hsdp", 4), ("hsdp_sync", 4), ("replicate", 2)]
MANAGED: dict[str, Any] = {"param_policy_fn": muon_for_matrices}


@pytest.mark.parametrize("model", ["uneven", "llama"])
@pytest.mark.parametrize(("mode", "world"), MESHES)
def test_model_whose_every_parameter_is_managed_trains_like_one_process(mode: str, world: int, model: str) -> None:
    run = Run(mode, model, pure=True, accumulate=2, steps=3, dedicate=MANAGED)
    expected = reference(run)
    for result in run_ranks(train, world, run, init=mode != "local"):
        assert_same_training(run, result, expected, rtol=1e-3)


def is_matrix_or_norm(name: str, param: nn.Parameter) -> bool:
    return is_matrix(name, param) or "norm" in name or "ln" in name


@pytest.mark.parametrize(("mode", "world"), MESHES[1:4])
def test_managed_adamw_beside_fsdp2_trains_like_one_process(mode: str, world: int) -> None:
    run = Run(mode, "llama", steps=3, dedicate={**MANAGED, "predicate": is_matrix_or_norm})
    expected = reference(run)
    for result in run_ranks(train, world, run):
        assert_same_training(run, result, expected, rtol=1e-3)


def states(rank: int, world: int, run: Run) -> dict[str, Any]:
    model, optimizer = prepare(run, world)
    for step in range(run.steps):
        backward(model, run, step, rank, world)
        optimizer.step()
        optimizer.zero_grad()
    local = {n: int(p.is_owner) for n, p in _owned(model).items()} if world > 1 else {}
    return {"state": dmuon.get_optimizer_state_dict(model, optimizer, rank0_only=False), "owners": local}


def _owned(model: nn.Module) -> dict[str, Any]:
    return {param.name: param for param in dmuon.get_dedicated_params(model)}


@pytest.mark.parametrize(("mode", "world"), [("local", 1), ("z3", 2), ("hsdp", 4), ("replicate", 2)])
def test_state_of_managed_adamw_is_whole_in_its_section_and_equals_one_process(mode: str, world: int) -> None:
    run = Run(mode, "uneven", pure=True, steps=3, dedicate=MANAGED)
    model = make_model(run.model)
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    for step in range(run.steps):
        models.loss_of(model, batch_of(run, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.adamw is not None
    rest = {n: optimizer.adamw.state[p] for n, p in model.named_parameters() if n not in optimizer.matrices}
    results = run_ranks(states, world, run, init=mode != "local")
    for result in results:
        section = result["state"]["dedicated_adamw"]
        assert section.keys() == rest.keys()
        assert result["state"]["fsdp"] == {}
        for name, want in rest.items():
            torch.testing.assert_close(section[name]["exp_avg"], want["exp_avg"], rtol=1e-3, atol=1e-6)
            assert int(section[name]["step"]) == run.steps
    if world > 1:
        # One owner each, and more than one rank has some.
        owners = [result["owners"] for result in results]
        assert all(sum(each[name] for each in owners) == 1 for name in owners[0])
        assert sum(any(each.values()) for each in owners) > 1


def moves(rank: int, world: int, saved: dict[str, Any], weights: dict[str, Any], run: Run) -> dict[str, Any]:
    """Load what another layout saved, and go on."""
    model, optimizer = prepare(run, world)
    dmuon.set_model_state_dict(model, weights)
    dmuon.set_optimizer_state_dict(model, optimizer, saved)
    backward(model, run, 3, rank, world)
    optimizer.step()
    return snapshot(model)


def saves(rank: int, world: int, run: Run) -> tuple[Any, Any, Any]:
    model, optimizer = prepare(run, world)
    for step in range(3):
        backward(model, run, step, rank, world)
        optimizer.step()
        optimizer.zero_grad()
    weights = dmuon.get_model_state_dict(model, rank0_only=False)
    saved = dmuon.get_optimizer_state_dict(model, optimizer, rank0_only=False)
    backward(model, run, 3, rank, world)
    optimizer.step()
    return weights, saved, snapshot(model)


@pytest.mark.parametrize("managed_first", [True, False])
def test_adamw_state_moves_between_owners_and_fsdp2(managed_first: bool) -> None:
    runs = [Run("z3", "uneven", pure=True, dedicate=MANAGED), Run("z3", "uneven")]
    first, second = runs if managed_first else runs[::-1]
    weights, saved, expected = run_ranks(saves, 2, first)[0]
    for result in run_ranks(moves, 2, saved, weights, second):
        for name, want in expected.items():
            torch.testing.assert_close(result[name], want, rtol=1e-4, atol=1e-6)


def trains_by_group(rank: int, world: int, mode: str) -> dict[str, Any]:
    run = Run(mode, "uneven", steps=2)
    model, _ = prepare(run, world)
    forced = [p for n, p in model.named_parameters() if "layers.0." in n]
    rest = [p for n, p in model.named_parameters() if "layers.0." not in n]
    groups = [{"params": iter(forced), "dmuon_route": "adamw", "group_name": "plain"}, {"params": rest}]
    optimizer = dmuon.Muon(model, param_groups=groups, **HYPER)
    for step in range(run.steps):
        backward(model, run, step, rank, world)
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": snapshot(model), "groups": [group["group_name"] for group in optimizer.param_groups]}


@pytest.mark.parametrize(("mode", "world"), [("local", 1), ("z3", 2), ("hsdp", 4), ("ddp", 2)])
def test_route_of_a_group_holds_for_its_dedicated_matrices_alone(mode: str, world: int) -> None:
    model = make_model("uneven")
    optimizer = ReferenceOptimizer(model, lambda n, p: is_matrix(n, p) and "layers.0." not in n, **HYPER)
    for step in range(2):
        models.loss_of(model, batch_of(Run(mode, "uneven"), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in run_ranks(trains_by_group, world, mode, init=mode != "local"):
        assert result["groups"] == ["plain/adamw", "group1/muon", "group1/adamw"]
        for name, want in model.named_parameters():
            torch.testing.assert_close(result["weights"][name], want.detach(), rtol=1e-3, atol=1e-5)


class Block(nn.Module):
    """Notes the dtypes that reach its linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (self.norm.weight.dtype, self.proj.weight.dtype)
        self.after_norm = self.norm(x)
        self.after_proj = self.proj(self.after_norm)
        return x + self.after_proj


class Stack(nn.Module):
    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.to(wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def dtypes(rank: int, world: int, policy: dict[str, Any]) -> dict[str, Any]:
    model = Stack()
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, lambda n, p: True, param_policy=policy)
    optimizer = dmuon.Muon(model, lr=0.01)
    for _ in range(2):
        loss = model(torch.ones(2, 8))
        loss.backward()
        optimizer.step()
    block = model.layers[1]
    plan = dmuon.summarize_comm_plan(model)
    return {
        "weights": block.seen,
        "outputs": (block.after_norm.dtype, block.after_proj.dtype),
        "masters": {param.name: param.param.dtype for param in dmuon.get_dedicated_params(model)},
        "state": {
            name: next(v.dtype for k, v in optimizer.state[param.param].items() if k != "step")
            for name, param in _owned(model).items()
        },
        "units": [group["name"] for group in plan["groups"]],
        "bytes": (plan["gather_bytes"], plan["reduce_bytes"]),
        "loss": float(loss.detach()),
    }


ROUTES = [{"name": "proj.weight", "set": {"route": "muon"}}]


def test_fields_of_a_policy_decide_over_dtypes_casts_and_bytes() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    policy = {
        "defaults": {"route": "adamw", "param_dtype": bf16, "optim_dtype": bf16},
        "overrides": [
            *ROUTES,
            {"name": "norm", "set": {"param_dtype": fp32, "output_dtype": bf16, "optim_dtype": None}},
            {"name": "proj", "set": {"grad_dtype": bf16}},
        ],
    }
    plain = run_ranks(dtypes, 2, {"defaults": {"route": "adamw"}, "overrides": ROUTES})[0]
    assert plain["weights"] == plain["outputs"] == (fp32, fp32)
    for result in run_ranks(dtypes, 2, policy):
        assert result["weights"] == (fp32, bf16)
        assert result["outputs"] == (bf16, bf16)
        assert set(result["masters"].values()) == {fp32}
        assert result["state"]["layers.0.norm.weight"] == fp32
        assert result["state"]["layers.0.proj.weight"] == result["state"]["layers.0.proj.bias"] == bf16
        assert [name.partition(" ")[0] for name in result["units"]] == ["layers.0"] * 2 + ["layers.1"] * 2
        assert abs(result["loss"] - plain["loss"]) < 0.1
        # Matrices and biases travel in two bytes each way, norms in four.
        assert result["bytes"] == (2 * (2 * 72 + 4 * 16), 2 * (2 * 72 + 4 * 16))
    assert plain["bytes"] == (2 * 4 * 88, 2 * 4 * 88)


def test_master_dtype_of_a_policy_is_what_owners_keep() -> None:
    overrides = [*ROUTES, {"name": "proj", "set": {"master_dtype": torch.float64}}]
    for result in run_ranks(
        dtypes, 2, {"defaults": {"route": "adamw", "param_dtype": torch.float32}, "overrides": overrides}
    ):
        assert result["masters"]["layers.0.proj.weight"] == torch.float64
        assert result["masters"]["layers.0.norm.weight"] == torch.float32
        assert result["weights"] == (torch.float32, torch.float32)


def uncast(rank: int, world: int) -> str:
    model = Stack()
    fields = {"param_dtype": torch.bfloat16, "cast_forward_inputs": False}
    policy = {"defaults": {"route": "adamw", **fields}, "overrides": ROUTES}
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), lambda n, p: "proj" in n, param_policy=policy)
    try:
        model(torch.ones(2, 8))
    except RuntimeError as error:
        return str(error)
    return "ran"


def test_inputs_stay_as_they_are_where_the_policy_says_so() -> None:
    assert all("dtype" in message for message in run_ranks(uncast, 2))


def disagree(rank: int, world: int, what: str) -> str:
    policy: Any = {"defaults": {"route": "adamw"}, "overrides": [*ROUTES]}
    if what == "casts":
        policy["overrides"].append({"name": "proj.bias", "set": {"param_dtype": torch.bfloat16}})
    elif what == "ranks":
        policy["overrides"].append({"name": "norm", "set": {"optim_dtype": (torch.float32, torch.float64)[rank]}})
    elif what == "vector":
        policy["overrides"].append({"name": "norm", "set": {"route": "muon"}})
    try:
        dmuon.dedicate_params(Stack(), init_device_mesh("cpu", (world,)), lambda n, p: True, param_policy=policy)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("casts", ["ConfigurationError", "proj.weight", "proj.bias", "different casts"]),
        ("ranks", ["LockstepError", "different plans"]),
        ("vector", ["layers.0.norm.weight"]),
    ],
)
def test_policy_that_cannot_hold_is_refused_on_every_rank(what: str, expected: list[str]) -> None:
    for message in run_ranks(disagree, 2, what):
        assert all(part in message for part in expected), message


def test_vector_forced_onto_the_muon_route_is_refused_by_name() -> None:
    model = Stack()
    policy = {"defaults": {"route": "adamw"}, "overrides": ROUTES}
    dmuon.dedicate_params(model, None, lambda n, p: True, param_policy=policy)
    with pytest.raises(ConfigurationError, match=r"layers\.0\.norm\.weight cannot be put on the muon route"):
        dmuon.Muon(model, param_groups=[{"params": model.parameters(), "matrix_optimizer": "muon"}])


class Sleeping(Stack):
    """Its last block runs in the first step alone."""

    def forward(self, x: torch.Tensor, last: bool = True) -> torch.Tensor:
        for layer in self.layers if last else self.layers[:-1]:
            x = layer(x)
        return x.square().mean()


def sleeps(rank: int, world: int, mode: str) -> dict[str, torch.Tensor]:
    model = Sleeping()
    mesh = None if mode == "local" else init_device_mesh("cpu", (world,))
    policy = {"defaults": {"route": "adamw"}, "overrides": ROUTES}
    dmuon.dedicate_params(model, mesh, lambda n, p: True, param_policy=policy)
    optimizer = dmuon.Muon(model, lr=0.01, adamw_lr=0.01)
    for step in range(3):
        model(torch.ones(2, 8), last=step == 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


def test_managed_parameter_without_a_gradient_on_any_rank_is_left_alone() -> None:
    (alone,) = run_ranks(sleeps, 1, "local", init=False)
    for result in run_ranks(sleeps, 2, "z3"):
        for name, want in alone.items():
            torch.testing.assert_close(result[name], want, rtol=1e-4, atol=1e-6)
