"""Models trained on a mesh and their single-process reference, for the optimizer's distributed tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime.state_dict_shim import install_state_dict_shim
from tests.harness.models import TinyMLP, dense_batch, rank_part, tiny_mlp
from tests.harness.reference import ReferenceOptimizer

MODES = {"fsdp": 2, "fsdp3": 3, "hsdp": 4}
FUSED = dmuon.MatrixSpec(sections=(20, 12))


def is_muon(name: str, param: nn.Parameter) -> bool:
    return "proj" in name and param.ndim == 2


def spec_of(name: str, param: nn.Parameter) -> dmuon.MatrixSpec | None:
    """The `up_proj` of every layer is two logical matrices."""
    return FUSED if "up_proj" in name else None


def dedicate(model: nn.Module, mode: str) -> DeviceMesh:
    """Dedicate `model` on all ranks: 1-D, or 2 x 2 for `hsdp`. Returns the mesh to shard the rest on."""
    assert dist.get_world_size() == MODES[mode]
    install_state_dict_shim()
    if mode == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        dmuon.dedicate_params(
            model, mesh["shard"], predicate=is_muon, replicate_mesh=mesh["replicate"], matrix_spec_fn=spec_of
        )
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        dmuon.dedicate_params(model, mesh, predicate=is_muon, matrix_spec_fn=spec_of)
    return mesh


def shard_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard(model: nn.Module, mode: str) -> nn.Module:
    shard_rest(model, dedicate(model, mode))
    return model


def sharded_mlp(mode: str) -> TinyMLP:
    model = tiny_mlp()
    shard(model, mode)
    return model


def batch_part(step: int) -> Tensor:
    """This rank's rows of the batch of 12 rows of a step."""
    return rank_part(dense_batch(step, batch=12), dist.get_rank(), dist.get_world_size())


def backward(model: nn.Module, step: int) -> None:
    model(batch_part(step)).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    """A plain copy of a tensor in any layout; collective where it is distributed."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


def reference_mlp(**arguments: object) -> tuple[TinyMLP, ReferenceOptimizer]:
    model = tiny_mlp()
    optimizer = ReferenceOptimizer(
        model,
        is_muon,
        split={
            name: (lambda stored: list(stored.split((20, 12))))
            for name, p in model.named_parameters()
            if "up_proj" in name
        },
        **arguments,  # type: ignore[arg-type]
    )
    return model, optimizer


def reference_weights(steps: Sequence[int], **arguments: object) -> dict[str, Tensor]:
    """Weights after training in one process on the whole batches."""
    model, optimizer = reference_mlp(**arguments)
    for step in steps:
        optimizer.zero_grad()
        model(dense_batch(step, batch=12)).backward()
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
