"""How this process was launched, as far as dedication needs to know it: read from accelerate's state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon_hf.core as dmuon
from dmuon_hf import checks
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import MatrixSpec, canonical_name
from dmuon_hf.survey import Survey
from dmuon_hf.tensor_parallel import parallelize

__all__ = ["Launch", "current_launch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Where and how to dedicate. The default is one process, where parameters stay whole.

    `tensor_mesh`: the ranks that share a batch, each with a part of the weights. `replicated`: every rank of
    `shard_mesh` keeps the whole model, which `DistributedDataParallel` will wrap. `block_classes`: names of classes
    that the user wants wrapped, None for the model's own blocks. `source_rank`: the data-parallel rank that alone has
    loaded the weights, or None when all have.
    """

    replicated: bool = False
    shard_mesh: DeviceMesh | None = None
    replicate_mesh: DeviceMesh | None = None
    tensor_mesh: DeviceMesh | None = None
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    block_classes: tuple[str, ...] | None = None
    source_rank: int | None = None

    def parallelize(self, model: nn.Module) -> None:
        """Cut a whole model along the tensor-parallel axis, where there is one; before it is surveyed. Local."""
        if self.tensor_mesh is not None:
            parallelize(model, self.tensor_mesh)

    def dedicate(self, found: Survey, specs: Mapping[str, MatrixSpec]) -> None:
        """Give the parameters of a surveyed model named in `specs` (canonical names) their owners.

        Collective on a mesh.
        """
        model = found.model
        selection: dict[str, Any] = {
            "predicate": lambda name, parameter: canonical_name(name, model) in specs,
            "matrix_spec_fn": lambda name, parameter: specs[canonical_name(name, model)],
            "hook_boundary_resolver": found.boundaries,
        }
        if self.replicated:
            assert self.shard_mesh is not None
            dmuon.dedicate_params_ddp(model, self.shard_mesh, **selection)
            return
        if self.shard_mesh is not None:
            checks.check_shardable(model)
        dmuon.dedicate_params(
            model,
            self.shard_mesh,
            replicate_mesh=self.replicate_mesh,
            **selection,
            compute_dtype=self.compute_dtype,
            reduce_dtype=self.reduce_dtype,
            master_dtype=self.master_dtype,
            reshard_after_forward=self.reshard_after_forward,
            source_rank=self.source_rank,
        )


def current_launch() -> Launch:
    """The launch that accelerate has set up in this process. Collective without a parallelism config.

    Raises:
        ConfigurationError: several processes without an `Accelerator` (or a Trainer, which makes one), or an
            unsupported launch mode.
        NotImplementedError: a launch mode that is not built.
    """
    from accelerate.state import AcceleratorState

    if not AcceleratorState._shared_state:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigurationError(
                "several processes were launched, but there is no Accelerator yet to say how they share the model: "
                "make the Accelerator first, then the optimizer"
            )
        return Launch()
    state = AcceleratorState()
    checks.check_launch(state)
    if state.distributed_type.value == "NO":
        return Launch()
    if checks.is_replicated(state):
        world = torch.distributed.get_world_size()
        return Launch(shard_mesh=init_device_mesh(state.device.type, (world,), mesh_dim_names=("dp",)), replicated=True)
    plugin = state.fsdp_plugin
    policy = plugin.mixed_precision_policy
    shard_mesh, replicate_mesh, tensor_mesh = _meshes(state)
    return Launch(
        shard_mesh=shard_mesh,
        replicate_mesh=replicate_mesh,
        tensor_mesh=tensor_mesh,
        compute_dtype=None if policy is None else policy.param_dtype,
        # Without one of its own FSDP2 reduces gradients as they are, in the dtype of the computation.
        reduce_dtype=None if policy is None else policy.reduce_dtype or policy.param_dtype,
        # accelerate keeps fp32 masters of what it shards under mixed precision; owners do the same.
        master_dtype=None if state.mixed_precision == "no" else torch.float32,
        reshard_after_forward=plugin.reshard_after_forward,
        block_classes=None
        if plugin.transformer_cls_names_to_wrap is None
        else tuple(plugin.transformer_cls_names_to_wrap),
        source_rank=0 if plugin.cpu_ram_efficient_loading else None,
    )


def _meshes(state: Any) -> tuple[DeviceMesh, DeviceMesh | None, DeviceMesh | None]:
    """Shard, replicate and tensor-parallel mesh of accelerate; without a parallelism config, all ranks shard."""
    mesh, config = state.device_mesh, state.parallelism_config
    if mesh is None:
        world = torch.distributed.get_world_size()
        return init_device_mesh(state.device.type, (world,), mesh_dim_names=("dp_shard_cp",)), None, None
    # Under the name that accelerate shards by, so that owned tensors and FSDP2's are on one mesh.
    return (
        mesh["dp_shard_cp"],
        mesh["dp_replicate"] if config.dp_replicate_enabled else None,
        mesh["tp"] if config.tp_enabled else None,
    )
