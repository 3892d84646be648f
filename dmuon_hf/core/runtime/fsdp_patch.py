"""What FSDP2 must know about dedicated parameters, and what the lockstep monitor must know about FSDP2.

The patches do nothing for models without dedicated parameters. Tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.fsdp._fully_shard._fsdp_init as _fsdp_init
import torch.distributed.fsdp._fully_shard._fsdp_param_group as _param_group_module
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from dmuon_hf.core.lockstep import note_foreign
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor

__all__ = ["install_patch", "uninstall_patch"]

SYNC_LISTENER = "_dmuon_set_requires_sync"
ZERO_LISTENER = "_dmuon_grads_zeroed"

# The functions that it imports are no declared part of it.
_fsdp_param_group: Any = _param_group_module
_originals: dict[str, Callable[..., Any]] = {}


def install_patch() -> None:
    """Make ``fully_shard`` skip dedicated parameters. Runs on import of :mod:`dmuon_hf.core`; safe to repeat.

    Also lets ``FSDPModule.set_requires_gradient_sync`` reach the units at or below the module, so that whoever
    accumulates gradients through FSDP2's own switch (Accelerate does) accumulates dedicated ones in the same way; lets
    ``FSDPModule.zero_grad`` reach the gradients that FSDP2 keeps elsewhere than on the parameters it shows; and has
    FSDP2's gathers and reductions noted for the comparison of ranks that wait for each other.
    """
    if _originals:
        return
    managed = _fsdp_init._get_managed_states
    set_sync = FSDPModule.set_requires_gradient_sync
    all_gather, reduce = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce

    def get_managed_states(
        modules: list[nn.Module], ignored_params: set[nn.Parameter] | None = None
    ) -> tuple[list[nn.Parameter], list[Any]]:
        dedicated = {
            parameter
            for module in modules
            for parameter in module.parameters(recurse=False)
            if isinstance(parameter, OwnedTensor)
        }
        return managed(modules, (ignored_params or set()) | dedicated if dedicated else ignored_params)

    def set_requires_gradient_sync(self: FSDPModule, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        set_sync(self, requires_gradient_sync, recurse=recurse)
        assert isinstance(self, nn.Module)
        for module in self.modules() if recurse else (self,):
            listener = module.__dict__.get(SYNC_LISTENER)
            if listener is not None:
                listener(requires_gradient_sync)

    def zero_grad(self: FSDPModule, set_to_none: bool = True) -> None:
        super(FSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]
        assert isinstance(self, nn.Module)
        for module in self.modules():
            listener = module.__dict__.get(ZERO_LISTENER)
            if listener is not None:
                listener(set_to_none)

    def foreach_all_gather(fsdp_params: list[Any], group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        note_foreign(group, f"FSDP2 all-gather of {_subject(fsdp_params)}")
        return all_gather(fsdp_params, group, *args, **kwargs)

    def foreach_reduce(
        fsdp_params: list[Any], grads: list[Any], group: ProcessGroup | None, *args: Any, **kwargs: Any
    ) -> Any:
        if group is not None:
            note_foreign(group, f"FSDP2 gradient reduction of {_subject(fsdp_params)}")
        return reduce(fsdp_params, grads, group, *args, **kwargs)

    _originals["managed"] = managed
    _originals["set_sync"] = set_sync
    _originals["all_gather"] = all_gather
    _originals["reduce"] = reduce
    _fsdp_init._get_managed_states = get_managed_states
    FSDPModule.set_requires_gradient_sync = set_requires_gradient_sync  # type: ignore[method-assign]
    FSDPModule.zero_grad = zero_grad  # type: ignore[attr-defined]
    _fsdp_param_group.foreach_all_gather = foreach_all_gather
    _fsdp_param_group.foreach_reduce = foreach_reduce


def uninstall_patch() -> None:
    """Give torch its own functions back. Models dedicated before keep working as long as they are not sharded again."""
    if not _originals:
        return
    _fsdp_init._get_managed_states = _originals.pop("managed")
    FSDPModule.set_requires_gradient_sync = _originals.pop("set_sync")  # type: ignore[method-assign]
    del FSDPModule.zero_grad  # type: ignore[attr-defined]
    _fsdp_param_group.foreach_all_gather = _originals.pop("all_gather")
    _fsdp_param_group.foreach_reduce = _originals.pop("reduce")


def _subject(fsdp_params: list[Any]) -> str:
    """What FSDP2 gathers or reduces, by the first of its parameters."""
    name = getattr(fsdp_params[0], "_param_fqn", None)
    return f"{name} and what is with it" if name else "its parameters"
