"""What a thread of this process stands in, seen from another thread: a collective of torch, or anything else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["Sample", "fsdp_module_here", "sample_thread"]

_TORCH = f"{Path(torch.__file__).parent}/"
_PACKAGE = f"{Path(__file__).parents[2]}/"
# Wrappers that add a frame below the one that says what is done.
_TRANSPARENT = tuple(_TORCH + name for name in ("_ops.py", "utils/_contextlib.py", "distributed/c10d_logger.py"))
# Files whose frames sit directly on a blocking call of c10d.
_COLLECTIVE = tuple(
    f"{_TORCH}distributed/{name}"
    for name in (
        "distributed_c10d.py",
        "_functional_collectives.py",
        "fsdp/_fully_shard/_fsdp_collectives.py",
        "fsdp/_fully_shard/_fsdp_param_group.py",
        "fsdp/_fully_shard/_fsdp_param.py",
    )
)
# Where this package waits, in slices, for what FSDP2 has issued: not where the thread stands.
_WAITS = tuple(_PACKAGE + name for name in ("core/lockstep/monitor.py", "core/runtime/fsdp_waits.py"))
_C10D = _TORCH + "distributed/distributed_c10d.py"
_FSDP = _TORCH + "distributed/fsdp/"
_DTENSOR = _TORCH + "distributed/tensor/"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a thread.

    Attributes:
        signature: Equal in two samples of a thread that has not run Python in between (the reverse does not hold).
        operation: What kind of torch collective the thread stands in, ``None`` if in something else.
        subject: The module FSDP2 works on, where that is known.
        groups: The process groups that it may be communicating on, where the stack shows them.
        trail: ``file:line in function`` of the innermost frames outside of torch and this package, innermost first.
    """

    signature: tuple[tuple[int, int], ...]
    operation: str | None
    subject: str
    groups: tuple[ProcessGroup, ...]
    trail: tuple[str, ...]


def sample_thread(thread: int, *, depth: int = 2) -> Sample | None:
    """Look at the thread with identifier ``thread``; ``None`` if it has ended."""
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return None
    frames = list(dropwhile(lambda frame: frame.f_code.co_filename in _WAITS, _outwards(innermost)))
    operation = _operation(frames)
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith((_TORCH, _PACKAGE, "<"))]
    return Sample(
        signature=tuple((id(frame), frame.f_lasti) for frame in frames[:8]),
        operation=operation,
        subject=_fsdp_module(frames) if operation is not None else "",
        groups=_groups(frames) if operation is not None else (),
        trail=tuple(
            f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            for frame in (own or frames)[:depth]
        ),
    )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _operation(frames: list[FrameType]) -> str | None:
    """The collective the innermost frames stand in, named so coarsely that ranks which run the same one agree."""
    inner = next((frame for frame in frames if not frame.f_code.co_filename.startswith(_TRANSPARENT)), None)
    if inner is None or not inner.f_code.co_filename.startswith(_COLLECTIVE):
        return None
    for frame in frames:
        if frame.f_code.co_filename.startswith(_FSDP):
            return _fsdp_operation(frames)
        if frame.f_code.co_filename.startswith(_DTENSOR):
            return "redistribution of a DTensor"
    return f"torch.distributed.{inner.f_code.co_name}"


def _fsdp_operation(frames: list[FrameType]) -> str:
    names = {frame.f_code.co_name for frame in frames if frame.f_code.co_filename.startswith(_FSDP)}
    return "FSDP2 gradient reduction" if names & {"post_backward", "foreach_reduce"} else "FSDP2 all-gather"


def fsdp_module_here() -> str:
    """Path of the module for which FSDP2 calls the caller; empty outside of FSDP2."""
    return _fsdp_module(_outwards(sys._getframe(1)))


def _fsdp_module(frames: Iterable[FrameType]) -> str:
    """Path of the module whose FSDP2 parameter group is on the stack, from the locals of a thread that stands still."""
    for frame in frames:
        if frame.f_code.co_filename.endswith("_fsdp_param_group.py"):
            name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
            return str(name) if name else "the root module"
    return ""


def _groups(frames: list[FrameType]) -> tuple[ProcessGroup, ...]:
    """From the innermost frame of torch's that holds a process group, or what has one.

    A group that is left out is the default one: c10d's functions have it as ``None``.
    """
    for frame in frames:
        if not frame.f_code.co_filename.startswith(_TORCH):
            return ()
        values = frame.f_locals
        if frame.f_code.co_filename == _C10D and values.get("group", frame) is None:
            return () if dist.group.WORLD is None else (dist.group.WORLD,)
        found = next(filter(None, map(_groups_of, list(values.values()))), ())
        if found:
            return found
    return ()


def _groups_of(value: object) -> tuple[ProcessGroup, ...]:
    if isinstance(value, ProcessGroup):
        return (value,)
    if isinstance(value, DTensor):
        value = value.device_mesh
    if isinstance(value, DeviceMesh):
        return tuple(value.get_all_groups())
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], DeviceMesh):
        mesh, dimension = value
        return (mesh.get_group(dimension),)
    return ()
