"""Count collectives and bytes where they are handed to the process group.

Every eager collective of Python - `torch.distributed.*`, FSDP2, async or not, from hooks or other threads - ends in a
method of `ProcessGroup`; functional collectives (DTensor) end in an operator of `torch.ops._c10d_functional` or
`_dtensor`. Both are wrapped for the whole process while a counter is open. Collectives that C++ issues by itself (the
reducer of DistributedDataParallel) are not seen.

Bytes follow the ring model, per rank, for a payload of P bytes on N ranks: `(N-1)/N * P` for broadcast, reduce,
all_gather (P: the gathered result), reduce_scatter (P: the unreduced input), gather and scatter; twice that for
all_reduce. For all_to_all and send it is what this rank sends to other ranks, which for even splits is the same
`(N-1)/N * P`; for uneven splits take the mean over ranks.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the functional operators
import torch.distributed.tensor  # defines the operators of DTensor
from torch.distributed.distributed_c10d import _resolve_process_group


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective as this rank issued it; `payload` and `ring_bytes` in bytes (see the module)."""

    kind: str
    payload: int
    ring_bytes: float
    group_name: str
    group_size: int
    tag: str
    phase: str
    tensors: int
    dtype: torch.dtype | None
    thread: str


class CollectiveCounter:
    """Context manager that records every collective of this process.

    with CollectiveCounter(tags={"shard": group}) as counter:
        with counter.phase("step"):
            optimizer.step()
    assert counter.calls(phase="step") == 0

    `tags` names process groups; other groups are tagged with their description. Counters may be nested.
    """

    def __init__(self, *, tags: dict[str, dist.ProcessGroup] | None = None) -> None:
        self.records: list[CollectiveRecord] = []
        self._tags = {group.group_name: tag for tag, group in (tags or {}).items()}
        self._phase = ""
        self._lock = threading.Lock()

    def tag(self, group: dist.ProcessGroup, name: str) -> None:
        """Name a process group in later records."""
        self._tags[group.group_name] = name

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Label what is issued inside the block, on any thread."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def select(
        self, kind: str | None = None, *, tag: str | None = None, phase: str | None = None
    ) -> list[CollectiveRecord]:
        """Records of one kind (`broadcast`, `reduce`, `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, ...),
        tag, phase."""
        with self._lock:
            records = list(self.records)
        wanted = (("kind", kind), ("tag", tag), ("phase", phase))
        return [r for r in records if all(value is None or getattr(r, field) == value for field, value in wanted)]

    def calls(self, kind: str | None = None, *, tag: str | None = None, phase: str | None = None) -> int:
        """Number of collectives; barriers count."""
        return len(self.select(kind, tag=tag, phase=phase))

    def ring_bytes(self, kind: str | None = None, *, tag: str | None = None, phase: str | None = None) -> float:
        """Bytes that this rank sends under the ring model."""
        return sum(r.ring_bytes for r in self.select(kind, tag=tag, phase=phase))

    def payload(self, kind: str | None = None, *, tag: str | None = None, phase: str | None = None) -> int:
        """Sum of the payloads in bytes."""
        return sum(r.payload for r in self.select(kind, tag=tag, phase=phase))

    def by_kind(self) -> dict[str, tuple[int, float]]:
        """`{kind: (calls, ring bytes)}`."""
        calls = Counter(r.kind for r in self.select())
        return {kind: (count, self.ring_bytes(kind)) for kind, count in sorted(calls.items())}

    def clear(self) -> None:
        """Forget all records."""
        with self._lock:
            self.records.clear()

    def __enter__(self) -> CollectiveCounter:
        _open(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _close(self)

    def _record(self, kind: str, measured: _Measured, group: dist.ProcessGroup) -> None:
        name = group.group_name
        record = CollectiveRecord(
            kind=kind,
            payload=measured.payload,
            ring_bytes=measured.ring_bytes,
            group_name=name,
            group_size=group.size(),
            tag=self._tags.get(name, group.group_desc or name),
            phase=self._phase,
            tensors=measured.tensors,
            dtype=measured.dtype,
            thread=threading.current_thread().name,
        )
        with self._lock:
            self.records.append(record)


@dataclass(frozen=True)
class _Measured:
    payload: int
    ring_bytes: float
    tensors: int = 0
    dtype: torch.dtype | None = None


_Measure = Callable[[list[Any], dist.ProcessGroup], _Measured]


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _flat(item)]
    return []


def _nbytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _flat(value))


def _ring(operand: int, *, rounds: int = 1, times_size: bool = False) -> _Measure:
    """The ring formula on operand number `operand`; with `times_size` the payload is N times that operand."""

    def measure(operands: list[Any], group: dist.ProcessGroup) -> _Measured:
        tensors = _flat(operands[operand])
        size = group.size()
        payload = _nbytes(tensors) * (size if times_size else 1)
        return _Measured(
            payload, rounds * payload * (size - 1) / size, len(tensors), tensors[0].dtype if tensors else None
        )

    return measure


def _all_to_all_split(operand: int, splits: int) -> _Measure:
    """One tensor, split on its first dimension by `splits` (evenly if empty)."""

    def measure(operands: list[Any], group: dist.ProcessGroup) -> _Measured:
        tensor, sizes = operands[operand], operands[splits]
        payload = _nbytes(tensor)
        if sizes:
            rows = max(tensor.shape[0], 1) if tensor.dim() else 1
            kept = payload / rows * sizes[group.rank()]
        else:
            kept = payload / group.size()
        return _Measured(payload, payload - kept, 1, tensor.dtype)

    return measure


def _all_to_all_list(operands: list[Any], group: dist.ProcessGroup) -> _Measured:
    inputs = _flat(operands[1])
    sent = sum(_nbytes(t) for peer, t in enumerate(inputs) if peer != group.rank())
    return _Measured(_nbytes(inputs), sent, len(inputs), inputs[0].dtype if inputs else None)


def _send(operands: list[Any], group: dist.ProcessGroup) -> _Measured:
    tensors = _flat(operands[0])
    return _Measured(_nbytes(tensors), _nbytes(tensors), len(tensors), tensors[0].dtype)


def _recv(operands: list[Any], group: dist.ProcessGroup) -> _Measured:
    """Counted as bytes by the sender."""
    tensors = _flat(operands[0])
    return _Measured(0, 0, len(tensors), tensors[0].dtype)


def _nothing(operands: list[Any], group: dist.ProcessGroup) -> _Measured:
    return _Measured(0, 0)


# Methods of ProcessGroup: (output or in-place operand, input, ...). Names that this torch lacks are passed over.
_METHODS: dict[str, tuple[str, _Measure]] = {
    "broadcast": ("broadcast", _ring(0)),
    "reduce": ("reduce", _ring(0)),
    "allreduce": ("all_reduce", _ring(0, rounds=2)),
    "allreduce_coalesced": ("all_reduce", _ring(0, rounds=2)),
    "allgather": ("all_gather", _ring(0)),
    "allgather_coalesced": ("all_gather", _ring(0)),
    "_allgather_base": ("all_gather", _ring(0)),
    "all_gather_single": ("all_gather", _ring(0)),
    "all_gather_single_coalesced": ("all_gather", _ring(0)),
    "allgather_into_tensor_coalesced": ("all_gather", _ring(0)),
    "reduce_scatter": ("reduce_scatter", _ring(1)),
    "_reduce_scatter_base": ("reduce_scatter", _ring(1)),
    "reduce_scatter_single": ("reduce_scatter", _ring(1)),
    "reduce_scatter_single_coalesced": ("reduce_scatter", _ring(1)),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _ring(1)),
    "all_to_all_single": ("all_to_all", _all_to_all_split(1, 3)),
    "alltoall_base": ("all_to_all", _all_to_all_split(1, 3)),
    "alltoall": ("all_to_all", _all_to_all_list),
    "gather": ("gather", _ring(1, times_size=True)),
    "scatter": ("scatter", _ring(0, times_size=True)),
    "send": ("send", _send),
    "recv": ("recv", _recv),
    "recv_anysource": ("recv", _recv),
    "barrier": ("barrier", _nothing),
}

# Functional operators: (input, ..., group), the group being the argument called `group_name`.
_OPERATORS: dict[str, tuple[str, _Measure]] = {
    "_c10d_functional.broadcast": ("broadcast", _ring(0)),
    "_c10d_functional.broadcast_": ("broadcast", _ring(0)),
    "_c10d_functional.all_reduce": ("all_reduce", _ring(0, rounds=2)),
    "_c10d_functional.all_reduce_": ("all_reduce", _ring(0, rounds=2)),
    "_c10d_functional.all_reduce_coalesced": ("all_reduce", _ring(0, rounds=2)),
    "_c10d_functional.all_reduce_coalesced_": ("all_reduce", _ring(0, rounds=2)),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", _ring(0, times_size=True)),
    "_c10d_functional.all_gather_into_tensor_out": ("all_gather", _ring(0, times_size=True)),
    "_c10d_functional.all_gather_into_tensor_coalesced": ("all_gather", _ring(0, times_size=True)),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", _ring(0)),
    "_c10d_functional.reduce_scatter_tensor_out": ("reduce_scatter", _ring(0)),
    "_c10d_functional.reduce_scatter_tensor_coalesced": ("reduce_scatter", _ring(0)),
    "_c10d_functional.all_to_all_single": ("all_to_all", _all_to_all_split(0, 2)),
    "_c10d_functional_autograd.all_gather_into_tensor": ("all_gather", _ring(0, times_size=True)),
    "_c10d_functional_autograd.reduce_scatter_tensor": ("reduce_scatter", _ring(0)),
    "_c10d_functional_autograd.all_to_all_single": ("all_to_all", _all_to_all_split(0, 2)),
    "_dtensor.shard_dim_alltoall": ("all_to_all", _ring(0)),
}

_open_counters: list[CollectiveCounter] = []
_undo: list[Callable[[], None]] = []
_inside_operator = threading.local()


def _open(counter: CollectiveCounter) -> None:
    if not _open_counters:
        for name, (kind, measure) in _METHODS.items():
            if name in dist.ProcessGroup.__dict__:
                _wrap_method(name, kind, measure)
        for name, (kind, measure) in _OPERATORS.items():
            _wrap_operator(name, kind, measure)
    _open_counters.append(counter)


def _close(counter: CollectiveCounter) -> None:
    _open_counters.remove(counter)
    if not _open_counters:
        while _undo:
            _undo.pop()()


def _note(kind: str, measure: _Measure, operands: list[Any], group: dist.ProcessGroup) -> None:
    measured = measure(operands, group)
    for counter in _open_counters:
        counter._record(kind, measured, group)


def _wrap_method(name: str, kind: str, measure: _Measure) -> None:
    # From __dict__: attribute access strips the binding descriptor, and what it returns would not bind when put back.
    descriptor = dist.ProcessGroup.__dict__[name]
    original = getattr(dist.ProcessGroup, name)

    @functools.wraps(original)
    def counted(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_inside_operator, "active", False):
            _note(kind, measure, [*args, *kwargs.values()], self)
        return original(self, *args, **kwargs)

    setattr(dist.ProcessGroup, name, counted)
    _undo.append(lambda: setattr(dist.ProcessGroup, name, descriptor))


class _CountedOperator:
    """Stands for an operator packet in its namespace; attribute access (overloads) passes through, calls are
    counted."""

    def __init__(self, packet: Any, kind: str, measure: _Measure) -> None:
        self._packet = packet
        self._kind = kind
        self._measure = measure

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._count(self._packet, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._packet, name)
        if name == "default":
            return functools.partial(self._call_overload, value)
        return value

    def _call_overload(self, overload: Any, *args: Any, **kwargs: Any) -> Any:
        return self._count(overload, args, kwargs)

    def _count(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = kwargs.get("out")
        operands = [*args, *(value for key, value in kwargs.items() if key != "out")]
        group = operands[-1]
        if isinstance(group, str):
            group = _resolve_process_group(group)
        if getattr(_inside_operator, "active", False):
            return target(*args, **kwargs)
        _note(self._kind, self._measure, operands, group)
        _inside_operator.active = True
        try:
            return target(*args, **kwargs) if out is None else target(*operands, out=out)
        finally:
            _inside_operator.active = False


def _wrap_operator(name: str, kind: str, measure: _Measure) -> None:
    namespace_name, operator = name.split(".")
    namespace = getattr(torch.ops, namespace_name)
    packet = getattr(namespace, operator, None)
    if packet is None:
        return
    setattr(namespace, operator, _CountedOperator(packet, kind, measure))
    _undo.append(lambda: setattr(namespace, operator, packet))
