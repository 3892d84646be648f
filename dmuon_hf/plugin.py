"""`DMuonPlugin`: FSDP2 for `Accelerator(fsdp_plugin=...)`, set up for dedicated ownership."""

from __future__ import annotations

import os
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin

from dmuon_hf.core.errors import ConfigurationError

__all__ = ["DMuonPlugin"]


class DMuonPlugin(FullyShardedDataParallelPlugin):  # type: ignore[misc]
    """accelerate's FSDP plugin with `fsdp_version=2` and, unless told otherwise, wrapping by transformer block.

        accelerator = Accelerator(fsdp_plugin=dmuon_hf.DMuonPlugin())
        optimizer = dmuon_hf.create_optimizer(model, lr=2e-4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Takes the arguments of `FullyShardedDataParallelPlugin`. `reshard_after_forward`, `mixed_precision_policy`,
    `activation_checkpointing`, `cpu_ram_efficient_loading` and `state_dict_type` hold for dedicated parameters too. For
    HSDP pass `parallelism_config=ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)` to the Accelerator.

    A block that keeps only norms and biases beside its owned weights joins the FSDP group of the root: the same
    training with fewer collectives.

    Raises:
        ConfigurationError: `fsdp_version` other than 2.
    """

    fsdp_version: Any
    auto_wrap_policy: Any

    def __post_init__(self) -> None:
        from dmuon_hf import hooks

        hooks.install()
        if self.fsdp_version not in (None, 2):
            raise ConfigurationError(f"DMuonPlugin is FSDP2; fsdp_version={self.fsdp_version} is not supported")
        self.fsdp_version = 2
        if self.auto_wrap_policy is None and "FSDP_AUTO_WRAP_POLICY" not in os.environ:
            self.auto_wrap_policy = "transformer_based_wrap"
        super().__post_init__()
