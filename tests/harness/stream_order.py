"""Happens-before on the streams of an accelerator: races, and memory that is given back too early.

A program on an accelerator only issues work: what orders two operations on different streams are events. Each stream
has a vector clock here; an event is a copy of one, and waiting joins it. Two accesses to one storage from two streams,
at least one of them a write, with neither known to the other, are a race.

The caching allocator gives a freed block back to the stream that allocated it, at once. So every other stream that
used it must have been waited for by then, or recorded with ``record_stream``.

The host's own synchronisations are left out: what is in order here is in order without them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Clock = dict[int, int]


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if count > clock.get(stream, 0):
            clock[stream] = count


@dataclass(frozen=True)
class Event:
    """What a stream had done, and knew of others, when the event was recorded."""

    clock: Clock


class Stream:
    """One stream: its clock counts its own operations and what it has waited for of others'."""

    def __init__(self, order: StreamOrder, name: str) -> None:
        self.number = next(order.numbers)
        self.name = name
        self.clock: Clock = {}
        self._order = order

    def record_event(self) -> Event:
        return Event(dict(self.clock))

    def wait_event(self, event: Event) -> None:
        # What was freed before this call was not protected by it.
        self._order.collect_freed()
        _join(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


@dataclass
class _Access:
    count: int
    what: str
    stream: Stream


@dataclass
class _Memory:
    """A storage: which stream allocated its bytes, and each stream's last accesses to them."""

    name: str
    home: Stream
    weak: StorageWeakRef
    reads: dict[int, _Access] = field(default_factory=dict)
    writes: dict[int, _Access] = field(default_factory=dict)
    recorded: list[Stream] = field(default_factory=list)

    def forget(self) -> None:
        self.reads, self.writes, self.recorded = {}, {}, []


class StreamOrder:
    """Records accesses and judges them. ``problems`` is empty for a correct program.

    Attributes:
        problems: One sentence per race and per early free, each pair of operations once.
        accesses: How many were seen, by name of the stream; to assert that a test saw anything.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.default = Stream(self, "compute")
        self.current = self.default
        self.problems: list[str] = []
        self.accesses: dict[str, int] = {}
        self._memory: dict[int, _Memory] = {}

    # -- streams ------------------------------------------------------------------------------------------------------

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocated(self, tensor: torch.Tensor, what: str) -> None:
        """The storage of ``tensor`` was allocated by the current stream, if it is not known yet."""
        self._memory_of(tensor, what, home=self.current)

    def reallocated(self, storage: torch.UntypedStorage) -> None:
        """``resize_`` gave an emptied storage new bytes, on the current stream."""
        memory = self._memory.get(storage._cdata)
        if memory is not None:
            memory.forget()
            memory.home = self.current

    def emptied(self, storage: torch.UntypedStorage) -> None:
        """``resize_(0)`` gave the bytes of a storage back."""
        memory = self._memory.get(storage._cdata)
        if memory is not None:
            self._judge_free(memory)
            memory.forget()

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """``tensor.record_stream(stream)``: its bytes are not given back before ``stream`` is done with them."""
        self._memory_of(tensor, "a tensor from before", home=self.current).recorded.append(stream)

    def collect_freed(self) -> None:
        """Judge the storages whose last reference went since the last call."""
        for key in [key for key, memory in self._memory.items() if memory.weak.expired()]:
            self._judge_free(self._memory.pop(key))

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """What to call the storage of ``tensor``."""
        self._memory_of(tensor, name, home=self.current).name = name

    # -- accesses -----------------------------------------------------------------------------------------------------

    def operation(
        self, what: str, *, reads: list[torch.Tensor], writes: list[torch.Tensor], stream: Stream | None = None
    ) -> None:
        """One operation on ``stream``, by default the current one."""
        self.collect_freed()
        stream = stream or self.current
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        self.accesses[stream.name] = self.accesses.get(stream.name, 0) + 1
        written = {tensor.untyped_storage()._cdata for tensor in writes}
        for tensor in writes:
            self._access(tensor, what, stream, write=True)
        for tensor in reads:
            if tensor.untyped_storage()._cdata not in written:
                self._access(tensor, what, stream, write=False)

    def _access(self, tensor: torch.Tensor, what: str, stream: Stream, *, write: bool) -> None:
        if tensor.numel() == 0:
            return
        memory = self._memory_of(tensor, f"a tensor that {what} found", home=self.current)
        for kind in (memory.writes, memory.reads) if write else (memory.writes,):
            for number, earlier in kind.items():
                if number != stream.number and stream.clock.get(number, 0) < earlier.count:
                    verb = "wrote" if kind is memory.writes else "read"
                    self._report(
                        f"race on {memory.name}: {earlier.what} {verb} it on {earlier.stream.name}, "
                        f"{what} {'writes' if write else 'reads'} it on {stream.name} without waiting"
                    )
        access = _Access(stream.clock[stream.number], what, stream)
        (memory.writes if write else memory.reads)[stream.number] = access

    def _judge_free(self, memory: _Memory) -> None:
        # The allocator waits for what the recorded streams were given by now, and what they had waited for themselves.
        awaited = [memory.home, *memory.recorded]
        for kind in (memory.writes, memory.reads):
            for number, access in kind.items():
                if all(stream.clock.get(number, 0) < access.count for stream in awaited):
                    self._report(
                        f"early free of {memory.name}: it goes back to {memory.home.name}, which has not waited for "
                        f"{access.what} on {access.stream.name}"
                    )

    def _memory_of(self, tensor: torch.Tensor, what: str, *, home: Stream) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            name = f"{what} {tuple(tensor.shape)}"
            memory = self._memory[storage._cdata] = _Memory(name, home, StorageWeakRef(storage))
        return memory

    def _report(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
