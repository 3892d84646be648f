"""Expert stacks: where a shard holds whole experts nothing travels; under replication a stack has one owner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import dmuon_hf.core as dmuon
from dmuon_hf.core import MatrixSpec
from tests.distributed.training import HYPER, full
from tests.harness import models, run_ranks
from tests.harness.comm import CollectiveCounter
from tests.harness.reference import ReferenceOptimizer

EXPERTS, WIDTH, INNER = 6, 16, 10


class Mixture(nn.Module):
    """A projection and a mixture of experts: gate and up as one stack ``(E, 2I, H)``, down stored ``(E, I, H)``."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 3)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(x)
        gate, up = torch.einsum("bh,bih->bi", x, self.gate_up[chosen]).chunk(2, dim=-1)
        return x + torch.einsum("bi,bih->bh", torch.tanh(gate) * up, self.down[chosen])


class MixtureModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, chosen)
        return x.square().mean()


def mixture() -> MixtureModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MixtureModel()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their experts; nobody chooses the last expert in the first two steps."""
    generator = torch.Generator().manual_seed(step)
    used = EXPERTS - 1 if step < 2 else EXPERTS
    return models.dense_batch(step, batch=24, width=WIDTH), torch.randint(used, (24,), generator=generator)


SPECS = {"gate_up": MatrixSpec(sections=(INNER, INNER)), "down": MatrixSpec(transposed=True)}


def spec_of(name: str, param: nn.Parameter) -> MatrixSpec | None:
    return SPECS.get(name.rpartition(".")[2])


def is_stack(name: str, param: nn.Parameter) -> bool:
    return param.ndim == 3


def inside_experts(param: nn.Parameter) -> Shard:
    """Cuts that divide, which is all that FSDP2 takes besides the first dimension."""
    if param.ndim == 2:
        return Shard(0)
    return Shard(1) if param.shape[1] == 2 * INNER else Shard(2)


MODES = ("owned", "owned_hsdp", "dedicated_stacks", "stacks_alone", "replicated", "sharded", "cut", "one_process")
OWNED = ("owned", "owned_hsdp", "dedicated_stacks", "replicated")


def prepare(mode: str, world: int) -> tuple[nn.Module, dmuon.Muon]:
    model = mixture()
    if mode == "one_process":
        return model, dmuon.Muon(model, predicate=lambda *_: True, matrix_spec_fn=spec_of, **HYPER)
    hsdp = mode == "owned_hsdp"
    mesh = init_device_mesh("cpu", (2, world // 2) if hsdp else (world,), mesh_dim_names=("r", "s") if hsdp else ("s",))
    if mode == "replicated":
        dmuon.dedicate_params_ddp(model, mesh, lambda *_: True, matrix_spec_fn=spec_of)
        return model, dmuon.Muon(model, **HYPER)
    if mode in OWNED:
        every = mode == "dedicated_stacks"
        dmuon.dedicate_params(
            model,
            mesh["s"],
            lambda name, param: every or "proj" in name,
            replicate_mesh=mesh["r"] if hsdp else None,
            matrix_spec_fn=spec_of if every else None,
        )
    if mode == "stacks_alone":
        dmuon.dedicate_params(model, mesh, is_stack, matrix_spec_fn=spec_of)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=inside_experts if mode == "cut" else None)
    fully_shard(model, mesh=mesh)
    if mode == "dedicated_stacks":
        return model, dmuon.Muon(model, **HYPER)
    if mode == "stacks_alone":
        return model, dmuon.Muon(model, predicate=lambda name, param: "proj" in name, **HYPER)
    predicate = is_stack if mode in OWNED else lambda *_: True
    return model, dmuon.Muon(model, predicate=predicate, matrix_spec_fn=spec_of, **HYPER)


def train(rank: int, world: int, mode: str) -> dict[str, Any]:
    model, optimizer = prepare(mode, world)
    history: dict[str, Any] = {"weights": [], "groups": [group["group_name"] for group in optimizer.param_groups]}
    with CollectiveCounter() as counter:
        for step in range(4):
            x, chosen = batch(step)
            model(x.chunk(world)[rank], chosen.chunk(world)[rank]).backward()
            with counter.phase("step"):
                optimizer.step()
            optimizer.zero_grad()
            history["weights"].append({name: full(param) for name, param in model.named_parameters()})
        history["sent"] = counter.ring_bytes("all_to_all", phase="step")
    return history


def reference() -> list[dict[str, torch.Tensor]]:
    """Every expert is a parameter of its own, without a gradient where it has no token."""
    model = mixture()
    flat = nn.Module()
    parts = {
        f"{name}__{i}": part
        for name, param in model.named_parameters()
        for i, part in enumerate(param.detach().clone().reshape(-1, *param.shape[-2:]))
    }
    for name, part in parts.items():
        flat.register_parameter(name.replace(".", "_"), nn.Parameter(part))
    split = {
        name.replace(".", "_"): spec.split
        for name in parts
        if (spec := spec_of(name.partition("__")[0], flat.get_parameter(name.replace(".", "_")))) is not None
    }
    optimizer = ReferenceOptimizer(flat, [n for n, _ in flat.named_parameters()], split=split, **HYPER)
    history = []
    for step in range(4):
        model.zero_grad()
        model(*batch(step)).backward()
        for name, param in model.named_parameters():
            for i, grad in enumerate(param.grad.reshape(-1, *param.shape[-2:])):
                flat.get_parameter(f"{name}__{i}".replace(".", "_")).grad = grad.clone() if grad.any() else None
        optimizer.step()
        for name, param in model.named_parameters():
            count = param.shape[0] if param.ndim == 3 else 1
            members = [flat.get_parameter(f"{name}__{i}".replace(".", "_")).detach() for i in range(count)]
            param.data.copy_(torch.stack(members).view_as(param))
        history.append({name: param.detach().clone() for name, param in model.named_parameters()})
    return history


@pytest.mark.parametrize("mode", MODES)
def test_experts_train_like_one_process_and_idle_ones_are_left_alone(mode: str) -> None:
    world = 1 if mode == "one_process" else 4
    results = run_ranks(train, world, mode, init=world > 1)
    for step, wanted in enumerate(reference()):
        for name, want in wanted.items():
            for result in results:
                error = (result["weights"][step][name] - want).norm() / want.norm()
                assert error < 2e-4, f"{mode} {name} step {step}: relative error {error:.2e}"
    assert results[0]["groups"] == ["default/muon"]
    if mode in OWNED:
        assert all(result["sent"] == 0 for result in results)
    else:
        assert (sum(result["sent"] for result in results) > 0) == (world > 1)


def owners(rank: int, world: int) -> tuple[dict[str, int], dict[str, int]]:
    """Owner of every matrix and stack, and the elements of momentum that this rank keeps."""
    model = mixture()
    mesh = init_device_mesh("cpu", (world,))
    owned = dmuon.dedicate_params_ddp(model, mesh, lambda *_: True, matrix_spec_fn=spec_of)
    optimizer = dmuon.Muon(model, **HYPER)
    names = {param: name for name, param in model.named_parameters()}
    kept = {names[p]: optimizer.state[p]["momentum_buffer"].to_local().numel() for p in owned}
    return {names[p]: owner for p, owner in owned.items()}, kept


def test_replicated_stack_has_one_owner_whose_load_counts_its_members() -> None:
    results = run_ranks(owners, 2)
    for rank, (owned, kept) in enumerate(results):
        for name, param in mixture().named_parameters():
            assert kept[name] == (param.numel() if owned[name] == rank else 0)
    # Two stacks of six outweigh whatever else there is, so each layer's go to different ranks.
    owned = results[0][0]
    assert owned["layers.0.gate_up"] != owned["layers.1.gate_up"]


def test_sections_of_a_dedicated_stack_must_add_up() -> None:
    with pytest.raises(dmuon.ConfigurationError, match=r"layers\.0\.gate_up, a stack of 6"):
        dmuon.dedicate_params(mixture(), None, lambda *_: True, matrix_spec_fn=lambda *_: MatrixSpec(sections=(3,)))
