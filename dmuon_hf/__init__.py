"""dmuon_hf: a distributed Muon optimizer for Hugging Face models.

    trainer = Trainer(model=model, args=args, train_dataset=data, optimizers=dmuon_hf.create())

Names are loaded on first use, so that `dmuon_hf.core` needs torch only. The hooks into accelerate and transformers
(`dmuon_hf.hooks`) are installed by the first use of a name that needs them, or at once in a process that was launched
for FSDP, where accelerate must see them before it sets up its state.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dmuon_hf.boundaries import HookBoundaries
    from dmuon_hf.core.errors import ConfigurationError, DMuonError, LockstepError
    from dmuon_hf.description import describe
    from dmuon_hf.factory import create, create_optimizer
    from dmuon_hf.options import DMuonOptions
    from dmuon_hf.plugin import DMuonPlugin
    from dmuon_hf.presets import Route, routes
    from dmuon_hf.qk_clip import QKClipReport, last_qk_clip
    from dmuon_hf.schedules import MomentumWarmup, WeightDecayRamp

_EXPORTS = {
    "ConfigurationError": "dmuon_hf.core.errors",
    "DMuonError": "dmuon_hf.core.errors",
    "DMuonOptions": "dmuon_hf.options",
    "DMuonPlugin": "dmuon_hf.plugin",
    "HookBoundaries": "dmuon_hf.boundaries",
    "LockstepError": "dmuon_hf.core.errors",
    "MomentumWarmup": "dmuon_hf.schedules",
    "QKClipReport": "dmuon_hf.qk_clip",
    "Route": "dmuon_hf.presets",
    "WeightDecayRamp": "dmuon_hf.schedules",
    "create": "dmuon_hf.factory",
    "create_optimizer": "dmuon_hf.factory",
    "describe": "dmuon_hf.description",
    "last_qk_clip": "dmuon_hf.qk_clip",
    "routes": "dmuon_hf.presets",
}

__all__ = [
    "ConfigurationError",
    "DMuonError",
    "DMuonOptions",
    "DMuonPlugin",
    "HookBoundaries",
    "LockstepError",
    "MomentumWarmup",
    "QKClipReport",
    "Route",
    "WeightDecayRamp",
    "__version__",
    "create",
    "create_optimizer",
    "describe",
    "last_qk_clip",
    "routes",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
    importlib.import_module("dmuon_hf.hooks").install()
