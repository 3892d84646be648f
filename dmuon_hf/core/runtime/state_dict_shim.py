"""Owned tensors in the state dicts of ``torch.distributed.checkpoint``.

``set_model_state_dict`` and ``set_optimizer_state_dict`` with ``full_state_dict=True`` cut every whole tensor
evenly by its placements, which for an owned tensor is the wrong cut. Two private functions of torch do that; the
shim answers for owned tensors and passes everything else on unchanged.

For a ``_StridedShard`` that cut can be wrong too, as can be what the planner of distributed checkpoints makes of it, a
method of DTensor: the shim answers for these tensors as well ([Note: strided shards in state dicts]).

Gathering a full state dict, saving and loading are collectives that are often called under ``if rank == 0``, and then
meet whatever the other ranks communicate. Where owned tensors are involved the ranks meet first.

Loads of distributed checkpoints happen as a whole or not at all (``core/checkpoint/reading.py``).

Before a state dict of a dedicated model is made or loaded, the model is asked whether it still uses what the owners
hold: together for full ones, which are collectives, and on this rank alone for ``state_dict()`` and sharded ones.

Tested with torch 2.13.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._state_dict_utils as _state_dict_utils
import torch.distributed.checkpoint.state_dict as _checkpoint_state_dict
import torch.distributed.checkpoint.state_dict_loader as _loader
import torch.distributed.checkpoint.state_dict_saver as _saver
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon_hf.core.checkpoint import strided
from dmuon_hf.core.checkpoint.reading import guards_loads, load_as_a_whole
from dmuon_hf.core.lockstep import meet, monitor_on
from dmuon_hf.core.runtime.integrity import raise_together, refuse_misplaced
from dmuon_hf.core.runtime.owned_tensor import OwnedTensor
from dmuon_hf.core.runtime.runtime import runtime_of
from dmuon_hf.core.shards.parts import cut_from, is_strided, write_parts

__all__ = ["install_state_dict_shim", "is_installed", "uninstall_state_dict_shim", "watch_state_dicts"]

# Where torch looks each function up when it calls it.
_BROADCAST = (_state_dict_utils, "_distribute_tensors")
_EVERY_RANK = (_checkpoint_state_dict, "_distribute_state_dict")
_GATHER = (_checkpoint_state_dict, "_gather_state_dict")
_SAVE = (_saver, "_save_state_dict")
_LOAD = (_loader, "_load_state_dict")
_VERIFY = (_checkpoint_state_dict, "_verify_options")

_FULL = "get_model_state_dict or another full state dict"

_originals: dict[str, Callable[..., Any]] = {}


def install_state_dict_shim() -> None:
    """Make full state dicts load into owned tensors. Safe to repeat; without owned tensors it changes nothing."""
    if _originals:
        return
    for (module, name), wrapper in (
        (_BROADCAST, _distribute_tensors),
        (_EVERY_RANK, _distribute_state_dict),
        (_GATHER, _after_meeting("_gather_state_dict", _FULL)),
        (_SAVE, _after_meeting("_save_state_dict", "torch.distributed.checkpoint.save")),
        (_LOAD, _load_state_dict),
        (_VERIFY, _verify_options),
    ):
        _originals[name] = getattr(module, name)
        setattr(module, name, wrapper)
    for name, around in strided.PROTOCOL.items():
        _originals[name] = getattr(DTensor, name)
        setattr(DTensor, name, around(_originals[name]))


def uninstall_state_dict_shim() -> None:
    """Give torch its own functions back."""
    for module, name in (_BROADCAST, _EVERY_RANK, _GATHER, _SAVE, _LOAD, _VERIFY):
        if name in _originals:
            setattr(module, name, _originals.pop(name))
    for name in strided.PROTOCOL:
        if name in _originals:
            setattr(DTensor, name, _originals.pop(name))


def is_installed() -> bool:
    """Whether the shim is in place."""
    return bool(_originals)


def watch_state_dicts(model: nn.Module) -> None:
    """Refuse ``model.state_dict()`` and ``load_state_dict()``, also through wrappers, where the model was edited."""
    model.register_state_dict_pre_hook(_before_state_dict)
    model.register_load_state_dict_pre_hook(_before_state_dict)


def _before_state_dict(module: nn.Module, *_: Any) -> None:
    runtime = runtime_of(module)
    if runtime is not None:
        refuse_misplaced(runtime, module)


def _verify_options(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What every function of torch that makes or loads a state dict of a model calls first."""
    info = _originals["_verify_options"](model, *args, **kwargs)
    runtime = runtime_of(model)
    if runtime is not None and info.full_state_dict and runtime.topology.is_distributed:
        monitor = runtime.context.monitor
        meet(_FULL, monitor.group, monitor=monitor)
        raise_together(runtime, runtime.misplaced(model))
    return info


def _after_meeting(name: str, what: str) -> Callable[..., Any]:
    """Torch's function ``name`` behind a meeting of all ranks that hold the state dict, its first argument."""

    def wrapper(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        owned = _first_owned(state_dict)
        # An asynchronous save runs in a thread of its own, whose waits are not the main thread's.
        if owned is not None and not kwargs.get("no_dist") and threading.current_thread() is threading.main_thread():
            monitor = monitor_on(owned.device_mesh)
            if monitor is not None:
                meet(what, monitor.group, monitor=monitor)
        return _originals[name](state_dict, *args, **kwargs)

    return wrapper


def _load_state_dict(state_dict: dict[str, Any], storage_reader: Any, *args: Any, **kwargs: Any) -> None:
    """Behind a meeting, and as a whole or not at all where anything of ours may be loaded."""
    load = _after_meeting("_load_state_dict", "torch.distributed.checkpoint.load")
    if _first_owned(state_dict) is None and not guards_loads():
        load(state_dict, storage_reader, *args, **kwargs)
        return
    named = dict(zip(("process_group", "coordinator_rank", "no_dist", "planner"), args, strict=False))
    load_as_a_whole(load, state_dict, storage_reader, **named, **kwargs)


def _first_owned(value: Any) -> OwnedTensor | None:
    """Some owned tensor in nested state, the same on every rank."""
    if isinstance(value, OwnedTensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((owned for owned in map(_first_owned, items) if owned is not None), None)


def _like(reference: DTensor, whole: torch.Tensor) -> DTensor:
    """Values known to every rank, in the layout of ``reference``, on the device and in the dtype of ``whole``."""
    if not isinstance(reference, OwnedTensor):
        return cut_from(whole, reference)
    owned = reference.like(whole.new_empty(reference.to_local().shape))
    owned.copy_(whole.detach())
    return owned


def _distribute_tensors(
    local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None
) -> None:
    """With ``broadcast_from_rank0``: ``local_state_dict[key]`` is a pair (destination, whole tensor received)."""
    for key in keys:
        pair = local_state_dict.get(key)
        if not (isinstance(pair, tuple) and (isinstance(pair[0], OwnedTensor) or is_strided(pair[0]))):
            continue
        destination, whole = pair
        if destination.shape != whole.shape:
            continue  # torch names the mismatch when it loads
        if destination.to_local().is_meta:
            local_state_dict[key] = _like(destination, whole)
        elif isinstance(destination, OwnedTensor):
            with torch.no_grad():
                local_state_dict[key] = destination.copy_(whole)
        else:
            write_parts(destination, whole, key)
            local_state_dict[key] = destination
    _originals["_distribute_tensors"](local_state_dict, keys, device, pg)


def _distribute_state_dict(
    full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], device: torch.device, pg: Any = None
) -> None:
    """Without ``broadcast_from_rank0``: every rank has the whole tensors."""
    remaining = {}
    for key, value in full_state_dict.items():
        destination: Any = local_state_dict.get(key)
        plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        ours = isinstance(destination, OwnedTensor) or is_strided(destination)
        if ours and plain and value.shape == destination.shape:
            local_state_dict[key] = _like(destination, value.to(device))
        else:
            remaining[key] = value
    _originals["_distribute_state_dict"](remaining, local_state_dict, device, pg)
