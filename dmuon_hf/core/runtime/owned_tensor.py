"""A DTensor whose whole content lies at one coordinate of its mesh.

`OwnedTensor` is what a dedicated parameter, its gradient and its optimizer state are between passes: the global
shape on every rank, the values on the owner, zero rows elsewhere. It lives on the mesh of the whole grid, as the
DTensors beside it do. On each axis that it is owned over it declares the placement ``Shard(0)``, which is true but for
the cut (all rows at one coordinate), so that code which sorts tensors by mesh and placement treats it as one more
sharded DTensor. On the other axes of its mesh, if there are any, it has ordinary placements.

Operators run on the local tensors and never redistribute. Those that would need values a rank does not have are refused
(see :mod:`.owned_dispatch`) and name ``full_tensor()`` as the way round.

[Note: content versions]
All handles of one storage (``detach()``, ``.data``, the ``nn.Parameter`` itself) share one `Content`. Every operator
that writes bumps its version, on every rank, since the same program runs on every rank. A gathered copy of a weight is
valid only while the version it was taken at is the current one. Code that writes ``to_local()`` directly bypasses the
dispatcher and must call ``tensor.content.bump()``, on every rank of the mesh and not on the owner alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch._ops import OpOverload
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dmuon_hf.core.errors import ConfigurationError, DMuonError
from dmuon_hf.core.runtime.owned_autograd import gather, in_owned_form, local_part, summed_axes
from dmuon_hf.core.runtime.owned_scalar import replicated
from dmuon_hf.core.runtime.ownership import Ownership

__all__ = ["Content", "GradHook", "Origin", "OwnedTensor"]


class Origin(NamedTuple):
    """The weight that a tensor is, or was made of, and the hook boundary that gathers it."""

    name: str
    unit: str


class GradHook:
    """A hook on the gradient of an owned leaf that is this package's own; any other there is the user's."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._call = call

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        return self._call(grad)


class Content:
    """The identity of one storage: a count of the writes to it, shared by all its handles."""

    __slots__ = ("version",)

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def bump(self) -> None:
        """Record a write. To be called on every rank of the mesh."""
        self.version += 1

    def __repr__(self) -> str:
        return f"Content(version={self.version})"


class OwnedTensor(DTensor):
    """A DTensor whose values lie on one rank of its mesh, the owner; the other ranks hold zero rows.

    Made with :meth:`from_local`. ``shape`` and ``dtype`` are global and equal on all ranks, ``to_local()`` is the
    whole tensor on the owner and has shape ``(0, *shape[1:])`` elsewhere. Elementwise operators,
    ``torch._foreach_*``, norms, whole-tensor statistics, the torch optimizers, GradScaler and distributed
    checkpoints work on it. Elementwise ones need no communication; norms and statistics are collectives over the
    mesh. Anything else raises NotImplementedError.
    """

    # No __slots__: asynchronous checkpoints copy `__dict__` and the class's own `__slots__`, and must reach DTensor's.
    _ownership: Ownership
    _content: Content
    _origin: Origin | None
    _grad_kept_in_form: bool

    @staticmethod
    def from_local(  # type: ignore[override]
        local: torch.Tensor,
        mesh: DeviceMesh,
        *,
        owner: int,
        shape: Sequence[int],
        unowned: Mapping[int, Placement] | None = None,
        origin: Origin | None = None,
        requires_grad: bool = False,
    ) -> OwnedTensor:
        """Wrap this rank's part, without copying and without communication. Called on every rank of ``mesh``.

        Args:
            local: contiguous; on the owner the whole tensor, elsewhere an empty one of shape ``(0, *shape[1:])``. With
                ``unowned`` axes the owner's coordinate on the others is held by several ranks, each with its part.
            mesh: a mesh of any number of dimensions.
            owner: rank that holds the values, counted row by row through the axes that are owned over.
            shape: global shape, at least one dimension.
            unowned: placements on the mesh axes, by index, that the tensor is not owned over; none by default.
            origin: what errors call it.
            requires_grad: whether the result is a leaf that requires a gradient.

        Raises:
            ConfigurationError: for an owner outside of the mesh, or a local tensor of the wrong form.
        """
        ownership = Ownership.on(mesh, owner, unowned or {})
        if not shape:
            raise ConfigurationError("an owned tensor has at least one dimension")
        spec = owned_spec(mesh, shape, local.dtype, ownership)
        part = ownership.part(spec)[0]
        expected = tuple(part) if ownership.is_owner else (0, *part[1:])
        if tuple(local.shape) != expected:
            role = f"the owner, rank {owner}," if ownership.is_owner else f"a rank other than the owner {owner}"
            raise ConfigurationError(f"{role} must hold a local tensor of shape {expected}, got {tuple(local.shape)}")
        if not local.is_contiguous():
            raise ConfigurationError("the local tensor must be contiguous: call .contiguous() first")
        return make_owned(local.detach(), spec, ownership, Content(), origin, requires_grad)

    @staticmethod
    def from_parts(
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: Sequence[int],
        origin: Origin | None = None,
    ) -> OwnedTensor:
        """A tensor without an owner: wrap this rank's part by ordinary placements. No copy, no communication.

        Args:
            local: contiguous, of the shape that the placements give this rank.
            mesh: a mesh of any number of dimensions.
            placements: one for each of them, ``Shard`` or ``Replicate``.
            shape: global shape, at least one dimension.
            origin: what errors call it.
        """
        ownership = Ownership.everywhere(placements)
        return make_owned(local.detach(), owned_spec(mesh, shape, local.dtype, ownership), ownership, Content(), origin)

    def like(self, local: torch.Tensor) -> OwnedTensor:
        """A new tensor in this one's layout around this rank's part, which fits. No copy, no communication."""
        return make_owned(
            local.detach(),
            owned_spec(self.device_mesh, self.shape, local.dtype, self._ownership),
            self._ownership,
            Content(),
            self._origin,
        )

    @property
    def owner(self) -> int:
        """Rank that holds the values, counted row by row through the mesh axes that the tensor is owned over.

        -1 for a tensor without an owner, of which every rank holds a part.
        """
        return self._ownership.owner

    @property
    def owned_axes(self) -> tuple[int, ...]:
        """The axes of the mesh that the tensor is owned over; it has ordinary placements on the others."""
        return self._ownership.axes

    @property
    def is_owner(self) -> bool:
        """Whether this rank holds values."""
        return self._ownership.is_owner

    @property
    def origin(self) -> Origin | None:
        """The weight that this is or was made of, if that is known; also of gradients and state."""
        return self._origin

    @property
    def content(self) -> Content:
        """The write counter shared by all handles of this storage; see [Note: content versions]."""
        return self._content

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Broadcast the values from the owner, differentiably. A collective: called on every rank of the mesh.

        Args:
            grad_placements: what the ranks' gradients of the result are to each other, by mesh axis: equal
                (``Replicate()``, the default) as of a penalty on weights, which every rank computes alike; or shares
                of a sum (``Partial()``), which the backward pass reduces to the owner, a collective.

        Returns:
            A plain tensor of the global shape that shares nothing with this one.
        """
        if self._local_tensor.is_meta:
            return self._local_tensor.new_empty(self.shape)
        ownership, mesh = self._ownership, self.device_mesh
        value = gather(self, summed_axes(self, grad_placements))
        if ownership.is_whole(self._spec):
            return value
        beside = [Replicate() if axis in ownership.axes else self.placements[axis] for axis in range(mesh.ndim)]
        spread = DTensor.from_local(value, mesh, beside, run_check=False, shape=self.shape, stride=self.stride())
        outer = grad_placements or [Replicate()] * mesh.ndim
        return spread.full_tensor(
            grad_placements=[Replicate() if axis in ownership.axes else outer[axis] for axis in range(mesh.ndim)]
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """What this rank holds, sharing storage: all values on the owner, zero rows elsewhere. Differentiable."""
        return local_part(self) if torch.is_grad_enabled() else self._local_tensor

    def requires_grad_(self, requires_grad: bool = True) -> OwnedTensor:
        super().requires_grad_(requires_grad)
        _keep_grad_in_form(self)
        return self

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return a replicated DTensor of the values, differentiably, or this tensor itself for its own placements.

        A collective over the mesh unless the placements are its own, awaited whatever ``async_op`` says.

        Raises:
            NotImplementedError: for any other target; distribute the result of :meth:`full_tensor` instead.
        """
        mesh = device_mesh if device_mesh is not None else self.device_mesh
        target = tuple(placements) if placements is not None else (Replicate(),) * mesh.ndim
        if forward_dtype is not None or backward_dtype is not None:
            raise NotImplementedError(
                "redistribute() of an owned tensor changes no dtype: call .to(dtype) on the result"
            )
        if mesh == self.device_mesh and target == self.placements:
            return self
        if mesh == self.device_mesh and all(placement.is_replicate() for placement in target):
            return replicated(self.full_tensor(), mesh)
        raise NotImplementedError(
            f"an owned tensor can only be redistributed to Replicate() on its own mesh, not to {target}: "
            "use distribute_tensor(tensor.full_tensor(), mesh, placements)"
        )

    @property
    def data(self) -> torch.Tensor:
        """A handle of the same storage that is detached from autograd.

        A plain tensor of the same shape and dtype, which every rank assigns whole, is copied into it.
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        same = value.shape == self.shape and value.dtype == self.dtype
        if isinstance(value, DTensor) or not same:
            raise DMuonError(
                f"assigning .data of shape {tuple(value.shape)} and {value.dtype} would detach {self} from its "
                "storage: use tensor.copy_(value)"
            )
        with torch.no_grad():
            self.detach().copy_(value)

    # Distributed checkpoints: the owner alone writes and reads one chunk that covers the whole tensor.

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        chunk = self._chunk()
        # A part may be empty, where a tensor is cut into more than it has rows.
        if not self.is_owner or (0 in chunk.sizes and 0 not in self.shape):
            return []
        data = TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(self._local_tensor), size=self.shape
        )
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # Called on every rank of the mesh when a load is planned, and the load then writes the owner's storage behind
        # the dispatcher: the only place where all ranks learn of it.
        self._content.bump()
        return [self._chunk()] if self.is_owner else []

    def _chunk(self) -> ChunkStorageMetadata:
        sizes, offsets = self._ownership.part(self._spec)
        return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._local_tensor

    # Wrapper-subclass protocol, copying and printing.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local_tensor"], (self._spec, self._ownership, self._content, self._origin, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> OwnedTensor:
        return make_owned(inner_tensors["_local_tensor"], *flatten_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedTensor:
        if id(self) in memo:
            return cast(OwnedTensor, memo[id(self)])
        if not self.is_leaf:
            raise DMuonError("only leaf tensors can be deep-copied: call .detach() first")
        local = self._local_tensor.detach().clone()
        content = Content(self._content.version + 1)
        duplicate = make_owned(local, self._spec, self._ownership, content, self._origin, self.requires_grad)
        memo[id(self)] = duplicate
        kept = {name: value for name, value in self.__dict__.items() if name not in duplicate.__dict__}
        duplicate.__dict__.update(copy.deepcopy(kept, memo))  # `_is_param` makes it an nn.Parameter
        if self.grad is not None:
            duplicate.grad = copy.deepcopy(self.grad, memo)
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise DMuonError(
            "an owned tensor cannot be pickled, since only its owner has the values: save tensor.full_tensor(), a full "
            "state dict (get_model_state_dict, get_optimizer_state_dict, which every rank calls), or use "
            "torch.distributed.checkpoint"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        named = f"{self._origin.name}, " if self._origin is not None else ""
        return (
            f"OwnedTensor({named}shape={tuple(self.shape)}, dtype={self.dtype}, device={self._local_tensor.device}, "
            f"owner={self.owner}, is_owner={self.is_owner}, version={self._content.version})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The operators are defined in terms of this class.
        from dmuon_hf.core.runtime.owned_dispatch import dispatch

        return dispatch(func, args, kwargs or {})


def owned_spec(mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype, ownership: Ownership) -> DTensorSpec:
    """The DTensor layout of an owned tensor: contiguous, and as good as sharded on its rows."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    return DTensorSpec(mesh, ownership.placements, tensor_meta=meta)


def make_owned(
    local: torch.Tensor,
    spec: DTensorSpec,
    ownership: Ownership,
    content: Content,
    origin: Origin | None = None,
    requires_grad: bool = False,
) -> OwnedTensor:
    """An owned tensor of parts that are known to fit; `OwnedTensor.from_local` checks them."""
    tensor = cast(OwnedTensor, OwnedTensor.__new__(OwnedTensor, local, spec, requires_grad=requires_grad))
    tensor._ownership = ownership
    tensor._content = content
    tensor._origin = origin
    tensor._grad_kept_in_form = False
    if requires_grad:
        _keep_grad_in_form(tensor)
    return tensor


def _keep_grad_in_form(leaf: OwnedTensor) -> None:
    """Have gradients that autograd knows whole on every rank, as that of ``weight.sum()``, arrive as owned ones."""
    if not leaf.requires_grad or not leaf.is_leaf or leaf._grad_kept_in_form:
        return
    # The layout alone: torch keeps these hooks where the garbage collector does not look for the leaf, and
    # `Module.to` refuses to convert a tensor that is referred to weakly.
    layout = leaf.like(leaf._local_tensor.new_empty((0, *leaf._local_tensor.shape[1:])))
    leaf.register_hook(GradHook(lambda grad: in_owned_form(grad, layout)))
    leaf._grad_kept_in_form = True
