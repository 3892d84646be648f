"""Parts of a model that a backward pass leaves out on this rank: the ranks meet before FSDP2's collectives differ.

FSDP2 reduces the parameters that have a gradient on this rank, module by module as autograd reaches them. Where a
whole block has none on some ranks only, it reduces other sizes there, or other modules. gloo aborts the process for the
first, and both mix up gradients on the way.

A rank compares what a pass leaves out with what its last pass left out at the same place; without a difference, the
case of every ordinary step, nothing is done. Where it changes on all ranks (a layer dropped by a common seed) they meet
in the rendezvous store, some round trips, and go on. Where it changes on some, these wait in a meeting to which the
others never come, as the others' wait in FSDP2 proves, and every rank learns of that.

The fields of FSDP2 are private to torch; tested with torch 2.13.
"""

from __future__ import annotations

import zlib
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState

from dmuon_hf.core.lockstep import meet, monitor_of, note_foreign

__all__ = ["check_order", "check_reduced"]

_LEFT_OUT = "_dmuon_left_out"
_VISITED = (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)


def check_order(group: Any) -> None:
    """Autograd has reached a module: were all that ran after it reached before?

    Called between the gather of its own weights, which other ranks have issued ahead, and the next one.

    Raises:
        LockstepError: On every rank, if they were on some ranks only.
    """
    order = group.comm_ctx.post_forward_order
    place = next((i for i in reversed(range(len(order))) if order[i] is group), None)
    if place is None:
        return
    names: tuple[str, ...] = ()
    # The next one has made the same comparison, so one look is enough where nothing is left out.
    if place + 1 < len(order) and order[place + 1]._training_state not in _VISITED:
        left = dict.fromkeys(later for later in order[place + 1 :] if later._training_state not in _VISITED)
        names = tuple(later._module_fqn or "the root module" for later in left)
    _compare(group, "order", names)


def check_reduced(group: Any) -> None:
    """A module's gradients are about to be reduced: which of its parameters have none?

    Raises:
        LockstepError: On every rank, if the ranks' answers differ.
    """
    if not group.reduce_grads or group.reduce_scatter_unused_params:
        return
    if group._training_state not in _VISITED and group not in group.comm_ctx.post_forward_order:
        return  # Its forward did not run, so that its gathers tell.
    missing = tuple(
        param._param_fqn or "a parameter"
        for param in group.fsdp_params
        if param.sharded_param.requires_grad
        and hasattr(param, "_unsharded_param")
        and param._unsharded_param.grad is None
        and param.unsharded_accumulated_grad is None
    )
    _compare(group, "gradients", missing)


def _compare(group: Any, kind: str, names: tuple[str, ...]) -> None:
    last = group.__dict__.setdefault(_LEFT_OUT, {})
    if last.get(kind, ()) == names:
        return
    last[kind] = names
    monitor = monitor_of(group.mesh_info.mesh.mesh.flatten().tolist())
    if monitor is None:
        return
    where = group._module_fqn or "the root module"
    if names:
        digest = zlib.crc32("\n".join(names).encode())
        more = f" and {len(names) - 1} more ({digest:08x})" if len(names) > 1 else ""
        what = f"backward of {where} without a gradient of {names[0]}{more}"
    else:
        what = f"backward of {where} with every gradient again"
    if isinstance(group.mesh_info, FSDPMeshInfo):
        # In the place of the collective that the other ranks have issued, if they are not here.
        note_foreign(group._reduce_scatter_process_group, what)
    meet(what, monitor.group, monitor=monitor)
