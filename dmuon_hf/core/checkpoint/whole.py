"""What state dicts of models and of optimizers share: where ranks meet, and whole tensors from and to local ones."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from dmuon_hf.core.covering import grid_of
from dmuon_hf.core.grid_group import GridGroup, world_group
from dmuon_hf.core.lockstep import meet
from dmuon_hf.core.runtime.integrity import raise_together
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from dmuon_hf.core.runtime.runtime import Runtime, runtime_of
from dmuon_hf.core.shards.parts import write_parts

__all__ = ["begin", "device_of", "group_of", "is_first", "whole_of", "write_whole"]


def begin(model: nn.Module, what: str, timeout: timedelta | None) -> Runtime | None:
    """Meet the other ranks, refuse an edited model on all of them, and drain what is in flight."""
    runtime = runtime_of(model)
    meet(what, group_of(runtime, model), monitor=None if runtime is None else runtime.context.monitor, timeout=timeout)
    if runtime is not None:
        raise_together(runtime, runtime.misplaced(model))
        runtime.finish_publish()
    return runtime


def group_of(runtime: Runtime | None, model: nn.Module) -> GridGroup | None:
    """The ranks that hold the model: those of its grid, those of its meshes, or all; ``None`` in a single process."""
    grid = None if runtime is None else runtime.topology.grid
    return grid or grid_of(list(model.parameters())) or world_group()


def is_first(runtime: Runtime | None, model: nn.Module) -> bool:
    group = group_of(runtime, model)
    return group is None or group.rank == 0


def device_of(model: nn.Module) -> torch.device:
    """A device that the model's process groups can send from."""
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def whole_of(value: Tensor, *, keep: bool, cpu_offload: bool) -> Tensor | None:
    """The plain whole of any tensor, aliasing nothing; ``None`` where it is not kept. A collective if distributed."""
    whole = value.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
        if isinstance(whole, AsyncCollectiveTensor):
            whole = whole.wait()
    if not keep:
        return None
    if cpu_offload and whole.device.type != "cpu":
        return whole.cpu()
    return whole if _has_storage_of_its_own(whole, value) else whole.clone()


def _has_storage_of_its_own(whole: Tensor, value: Tensor) -> bool:
    """Whether ``whole`` fills its storage and shares it with nothing that ``value`` holds on this rank."""
    if not isinstance(value, DTensor):
        return False
    storage, local = whole.untyped_storage(), value.to_local().untyped_storage()
    return storage.nbytes() == whole.nbytes and storage.data_ptr() != local.data_ptr()


def write_whole(target: Tensor, whole: Tensor) -> None:
    """Write the whole into a tensor of any layout, which every rank knows in full: no communication."""
    if isinstance(target, DTensor) and not isinstance(target, OwnedTensor):
        write_parts(target, whole)
    else:
        target.copy_(whole)
