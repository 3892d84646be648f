"""One norm over gradients that lie on several meshes, and over all matrices in every mode."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_hf.core as dmuon
from tests.distributed.checkpoint_modes import BATCH, MODES, WORDS, Net, build, is_matrix, is_stack, shard_experts
from tests.distributed.training import full
from tests.harness import run_ranks
from tests.harness.models import rank_part

WORLDS = {"ddp": 2, "z3": 2, "hsdp": 4, "tp": 4, "sharded_tp": 4, "expert_parallel": 4, "one_plain": 1}
NORMS = (2.0, 1.0, math.inf)


def backward(model: nn.Module, mode: str, rank: int, world: int) -> None:
    words = torch.randint(WORDS, (BATCH, 2), generator=torch.Generator().manual_seed(0))
    tp = MODES[mode].tp
    model(rank_part(words, rank // tp, world // tp)).backward()


def clip(rank: int, world: int, mode: str) -> dict[str, Any]:
    model, optimizer = build(mode, world, seed=1)
    backward(model, mode, rank, world)
    stats = optimizer.clip_grad_norm_(None)
    found: dict[str, Any] = {
        "matrices": stats.total_norm,
        "count": stats.param_count,
        "norms": [float(dmuon.clip_total_grad_norm_(model.parameters(), math.inf, kind)) for kind in NORMS],
        "none": dmuon.clip_total_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item(),
    }
    dmuon.clip_total_grad_norm_(model.parameters(), 0.1)
    found["clipped"] = {n.removeprefix("module."): full(p.grad) for n, p in model.named_parameters()}
    next(p for p in model.parameters() if p.grad is not None and p.grad.ndim == 2).grad.mul_(math.nan)
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 of the gradients is nan"):
        dmuon.clip_total_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    return found


def expected() -> dict[str, Any]:
    model, _ = build("one_plain", 1, seed=1)
    backward(model, "one_plain", 0, 1)
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    matrices = [grad for name, grad in grads.items() if is_matrix(name, grad) or is_stack(name, grad)]
    norms = [torch.nn.utils.get_total_norm(grads.values(), kind).item() for kind in NORMS]
    of_matrices = torch.nn.utils.get_total_norm(matrices).item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return {
        "matrices": of_matrices,
        "count": len(matrices),
        "norms": norms,
        "clipped": {name: param.grad for name, param in model.named_parameters()},
    }


@pytest.mark.parametrize("mode", WORLDS)
def test_total_norm_and_norm_of_matrices_are_those_of_one_process(mode: str) -> None:
    want = expected()
    for found in run_ranks(clip, WORLDS[mode], mode, init=WORLDS[mode] > 1):
        assert found["matrices"] == pytest.approx(want["matrices"], rel=1e-4)
        assert found["count"] == want["count"]
        assert found["norms"] == pytest.approx(want["norms"], rel=1e-4)
        assert found["none"] == 0.0
        for name, grad in want["clipped"].items():
            torch.testing.assert_close(found["clipped"][name], grad, rtol=1e-3, atol=1e-6)


class Mixed(nn.Module):
    """Matrices of every kind in one model: owned, sharded by FSDP2, and an expert stack on a mesh of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, words: Tensor) -> Tensor:
        return self.net(words)


def every_kind(rank: int, world: int) -> tuple[dict[str, Any], dict[str, str]]:
    torch.manual_seed(1)
    model = Mixed()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)) if world > 1 else None
    dmuon.dedicate_params(model, mesh, lambda name, param: is_matrix(name, param) and "layers.0" in name)
    if mesh is not None:
        experts = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("efsdp", "ep"))
        shard_experts(model.net.layers[1].experts, experts)
        for layer in model.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, predicate=lambda n, p: is_matrix(n, p) or is_stack(n, p), lr=0.02, adamw_lr=2e-3)
    norms = []
    for step in range(3):
        words = torch.randint(WORDS, (BATCH, 2), generator=torch.Generator().manual_seed(step))
        model(rank_part(words, rank, world)).backward()
        norms.append(float(dmuon.clip_total_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    kinds = {name: type(param).__name__ for name, param in model.named_parameters()}
    return {"norms": norms, **{name: full(param) for name, param in model.named_parameters()}}, kinds


def test_owned_sharded_and_expert_parallel_matrices_train_in_one_optimizer_with_one_norm() -> None:
    ((want, _),) = run_ranks(every_kind, 1, init=False)
    for found, kinds in run_ranks(every_kind, 4):
        assert kinds["net.layers.0.up.weight"] == "OwnedTensor" and kinds["net.layers.1.up.weight"] == "DTensor"
        assert found["norms"] == pytest.approx(want["norms"], rel=1e-3)
        for name, value in want.items():
            if name != "norms":
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=5e-5)
