"""Tensor parallelism as accelerate's `ParallelismConfig(tp_size=...)` asks for it.

accelerate makes the mesh and expects a model that somebody has cut along it already; transformers has the plans by
which its models are cut. Here the one is applied on the other, before the parts get their owners.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon_hf.adapters import has_adapters
from dmuon_hf.core.errors import ConfigurationError

__all__ = ["parallelize", "prepare_tp"]


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a whole model along a mesh of one dimension by the plan that transformers has for it. Local.

    Its weights become DTensors of the ranks' own values, which must be equal on all of them; what the plan does not
    name stays whole and plain. A model that is cut already stays as it is.

    Raises:
        ConfigurationError: there is no plan, it fits no weight, or the model cannot be cut into this many parts.
        NotImplementedError: the model has adapters, whose layers the plan does not know.
    """
    from transformers import DistributedConfig

    if _is_cut(model):
        return
    size = mesh.size()
    if has_adapters(model):
        raise NotImplementedError(
            f"tp_size={size} with adapters is not built yet: plans of tensor parallelism do not know their layers. Set "
            "tp_size: 1 and raise dp_shard_size"
        )
    resolve = getattr(model, "_resolve_parallel_plans", None)
    if resolve is None:
        raise ConfigurationError(
            f"tp_size={size} needs a model of transformers, whose classes say how they are cut; "
            f"{type(model).__name__} is none: set tp_size: 1"
        )
    try:
        plan = resolve(DistributedConfig(tp_size=size))[0]
        _apply(model, mesh, plan)
    except ValueError as error:
        raise ConfigurationError(f"{type(model).__name__} cannot be cut into tp_size={size} parts: {error}") from error
    if not _is_cut(model):
        raise ConfigurationError(
            f"the plan of tensor parallelism of {type(model).__name__} fits none of its weights, so each of "
            f"tp_size={size} processes would keep the whole model: set tp_size: 1"
        )
    model._tp_size = size  # type: ignore[assignment]


def _is_cut(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _apply(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Apply a plan whose names are modules and parameters; parameters that have several names stay one."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, leaf))
    names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name in names})
    for (first, leaf), *others in places.values():
        for module, name in others:
            module._parameters[name] = first._parameters[leaf]


def prepare_tp(original: Callable[..., Any], accelerator: Any, *args: Any) -> Any:
    """`Accelerator._prepare_tp`: leave alone what was cut before it got its owners.

    accelerate would put the rest on the axis by a style that transformers no longer has, and map optimizer parameters
    by addresses.
    """
    from dmuon_hf.prepare import muon_of

    return args if any(muon_of(arg) is not None for arg in args) else original(accelerator, *args)
