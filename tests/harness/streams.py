"""A pretended accelerator: the runtime takes its path for one, on CPU tensors, and the order of its streams is judged.

Inside :func:`fake_accelerator` the runtime gets streams and events of :class:`StreamOrder` in place of a device's. A
dispatch mode tells it what every operator reads and writes, on the stream that is current. Collectives run where NCCL
runs them: an asynchronous one on a stream of its group, which waits for the current stream when it is issued and which
``work.wait()`` makes the current stream wait for, its tensors kept until then; any other on the current stream. Those
of other groups than the package's own, FSDP2's among them, count as the latter. Data really moves, over gloo, at the
time of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmuon_hf.core.device import DeviceHandle
from dmuon_hf.core.runtime import collectives, comm_context, reduction
from dmuon_hf.core.runtime.owned_ops import mutated_arguments
from dmuon_hf.core.sharded import exchange
from tests.harness.stream_order import Event, Stream, StreamOrder

# Operators that touch the description of a tensor and not its bytes.
_NO_ACCESS = frozenset(
    {"aten::set_", "aten::resize_", "aten::detach", "aten::alias", "aten::_unsafe_view", "aten::_reshape_alias"}
)
_ALLOCATING = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})
_ALLOCATING |= {"aten::new_empty_strided"}
# Operators that take the form of an argument and not its values.
_FORM_ALONE = frozenset(
    {"aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_zeros", "aten::new_ones", "aten::new_full"}
)

# Methods of ProcessGroup whose first operand is written, and whose second one, where it holds tensors, is read.
_METHODS = (
    "broadcast",
    "reduce",
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "all_to_all_single",
    "alltoall_base",
    "gather",
    "scatter",
)


class FakeWork:
    """The handle of an asynchronous collective."""

    def __init__(self, order: StreamOrder, event: Event, kept: Sequence[torch.Tensor]) -> None:
        self._order = order
        self._event = event
        self._kept = list(kept)

    def wait(self, timeout: Any = None) -> bool:
        self._order.current.wait_event(self._event)
        self._kept.clear()
        return True


class InsideCoalescing:
    """What a collective returns that is to be fused with others: its end is not recorded."""

    def wait(self, timeout: Any = None) -> bool:
        raise AssertionError("a fused collective was waited for by itself")


class FakeHandle(DeviceHandle):
    """The streams of a :class:`StreamOrder` behind the interface of a device."""

    def __init__(self, device: torch.device, *, order: StreamOrder) -> None:
        super().__init__(device)
        self._order = order
        self._made = 0

    @property
    def is_cpu(self) -> bool:
        return False

    def new_stream(self, *, high_priority: bool) -> Stream:
        self._made += 1
        return Stream(self._order, f"side stream {self._made}")

    def current_stream(self) -> Stream:
        return self._order.current

    def stream(self, stream: Stream) -> AbstractContextManager[Any]:
        return self._order.on(stream)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._order.record_stream(tensor, stream)


class _Operators(TorchDispatchMode):
    """Tells the order what every operator on plain tensors reads and writes."""

    def __init__(self, accelerator: _Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # it comes back as operators on plain tensors
        order = self._accelerator.order
        order.collect_freed()
        before = {tensor.untyped_storage()._cdata for tensor in _plain((args, kwargs))}
        result = func(*args, **kwargs)
        if not self._accelerator.silent:
            self._note(func, args, kwargs, result, before)
        return result

    def _note(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: set[int]
    ) -> None:
        name = func._schema.name
        new = [tensor for tensor in _plain(result) if tensor.untyped_storage()._cdata not in before]
        for tensor in new:
            self._accelerator.order.allocated(tensor, name.removeprefix("aten::"))
        if name in _NO_ACCESS or name in _ALLOCATING or func.is_view:
            return
        writes = [*_plain(list(mutated_arguments(func, args, kwargs))), *new]
        reads = [] if name in _FORM_ALONE else _plain((args, kwargs))
        self._accelerator.order.operation(name.removeprefix("aten::"), reads=reads, writes=writes)


def _plain(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested value that have bytes."""
    leaves = (leaf for leaf in tree_leaves(value) if type(leaf) in (torch.Tensor, torch.nn.Parameter))
    return [leaf for leaf in leaves if not leaf.is_meta]


class _Accelerator:
    """Process groups and storages as a device with NCCL has them."""

    def __init__(self, order: StreamOrder) -> None:
        self.order = order
        self.silent = False
        self._streams: dict[str, Stream] = {}
        self._fused: list[torch.Tensor] | None = None

    def collective(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def issued(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            before, self.silent = self.silent, True
            try:
                work = original(group, *args, **kwargs)
                if work is not None:
                    work.wait()
            finally:
                self.silent = before
            return self._issued(name, group, [*args, *kwargs.values()])

        return issued

    def _issued(self, name: str, group: dist.ProcessGroup, operands: list[Any]) -> Any:
        what = f"{name} of {group.group_desc}"
        writes = _plain(operands[0])
        reads = _plain(operands[1]) if len(operands) > 1 else []
        asynchronous = any(getattr(operand, "asyncOp", False) for operand in operands)
        if not (asynchronous and group.group_desc.startswith("dmuon_")):
            self.order.operation(what, reads=reads, writes=writes)
            return FakeWork(self.order, self.order.current.record_event(), ())
        stream = self._streams.setdefault(group.group_name, Stream(self.order, f"NCCL's stream of {group.group_desc}"))
        stream.wait_stream(self.order.current)
        self.order.operation(what, reads=reads, writes=writes, stream=stream)
        if self._fused is not None:
            self._fused += [*writes, *reads]
            return InsideCoalescing()
        return FakeWork(self.order, stream.record_event(), [*writes, *reads])

    @contextmanager
    def coalescing_manager(self, group: Any, device: torch.device, async_ops: bool = False) -> Iterator[Any]:
        """What the collectives inside return is of no use; the manager gets one work for all."""
        assert async_ops, "a fused collective that is not asynchronous"
        manager = dist.distributed_c10d._CoalescingManager()
        self._fused = []
        yield manager
        fused, self._fused = self._fused, None
        manager.append(FakeWork(self.order, self._streams[group.group_name].record_event(), fused))  # type: ignore[arg-type]

    def resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            self.order.collect_freed()
            if size == 0 and storage.nbytes() > 0:
                self.order.emptied(storage)
            elif size > 0 and storage.nbytes() == 0:
                self.order.reallocated(storage)
            return original(storage, size)

        return resized


@contextmanager
def fake_accelerator(*, nccl: bool = True) -> Iterator[StreamOrder]:
    """Pretend inside the block that the runtime runs on an accelerator, and judge the order of its streams.

    Dedicate the model inside. ``nccl=False`` takes the path for accelerators with another backend.
    """
    order = StreamOrder()
    accelerator = _Accelerator(order)
    with ExitStack() as patches:

        def patch(where: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(where, name, value))

        for module in (comm_context, exchange):
            patch(module, "DeviceHandle", functools.partial(FakeHandle, order=order))
        patch(collectives, "_coalescing_manager", accelerator.coalescing_manager)
        for module in (collectives, reduction):
            patch(module, "uses_nccl", lambda group, device: nccl)
        for name in _METHODS:
            if name in dist.ProcessGroup.__dict__:
                descriptor = dist.ProcessGroup.__dict__[name]
                original = getattr(dist.ProcessGroup, name)
                setattr(dist.ProcessGroup, name, accelerator.collective(original, name))
                patches.callback(setattr, dist.ProcessGroup, name, descriptor)
        patch(torch.UntypedStorage, "resize_", accelerator.resize(torch.UntypedStorage.resize_))
        patches.enter_context(_Operators(accelerator))
        yield order
