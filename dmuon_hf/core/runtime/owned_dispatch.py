"""The operators of `OwnedTensor`: most run on the local tensors, a few communicate, the rest is refused.

[Note: operators on owned tensors]
Elementwise operators need no communication: owner and others run the same one on their part, and the empty part
keeps dtype and shape in step. ``copy_`` from another layout, whole-tensor statistics and norms are collectives over
the tensor's mesh.

[Note: random numbers in owned tensors]
Every rank draws the whole matrix, and the owner keeps it: one matrix at a time, whatever the number of ranks. So equal
generators stay equal, and an initialiser gives a dedicated weight the values that it would have in one process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard, cast

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map

from dmuon_hf.core.errors import ConfigurationError, DMuonError
from dmuon_hf.core.runtime.owned_ops import (
    is_draw,
    is_elementwise,
    is_foreach,
    is_owner_scalar,
    is_random,
    is_view,
    mutated_arguments,
)
from dmuon_hf.core.runtime.owned_scalar import OwnedScalar, replicated
from dmuon_hf.core.runtime.owned_tensor import Content, OwnedTensor, make_owned, owned_spec
from dmuon_hf.core.runtime.ownership import broadcast_from_owner

__all__ = ["dispatch"]

aten = torch.ops.aten

_PARAMETRISING = frozenset(
    str(Path(parametrize.__file__).with_name(name))
    for name in ("parametrize.py", "parametrizations.py", "weight_norm.py", "spectral_norm.py")
)

_Operator: TypeAlias = "Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]"


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one aten operator that has an owned tensor among its arguments, and record what it wrote.

    Raises:
        NotImplementedError: the operator is not defined on owned tensors.
        ConfigurationError: it is called to parametrise one.
        DMuonError: its arguments do not lie alike.
    """
    run = _SPECIAL.get(func) or _by_kind(func)
    if run is None:
        raise _undefined(func, next(t for t in tree_leaves((args, kwargs)) if _owned(t)))
    result = run(func, args, kwargs)
    written = [tensor._content for tensor in mutated_arguments(func, args, kwargs) if _owned(tensor)]
    for content in {id(content): content for content in written}.values():
        content.bump()
    return result


def _owned(value: object) -> TypeGuard[OwnedTensor]:
    return isinstance(value, OwnedTensor)


def _lie_alike(left: OwnedTensor, right: OwnedTensor) -> bool:
    return left._ownership == right._ownership and left.device_mesh == right.device_mesh


def _undefined(what: OpOverload | str, tensor: OwnedTensor) -> Exception:
    """The error that names the weight and its block, says why, and how to go on."""
    origin = tensor.origin
    subject = "an owned tensor" if origin is None else f"{origin.name}, an owned weight"
    if _called_from(_PARAMETRISING):
        # Torch takes a NotImplementedError for a parametrisation without an inverse, and fails elsewhere.
        return ConfigurationError(
            f"{subject}, cannot be parametrised: no rank has all its values. Parametrise before dedicate_params(), and "
            "leave the weight out of its predicate"
        )
    if isinstance(what, OpOverload) and is_random(what):
        return NotImplementedError(
            f"{what} is not defined on {subject}: it draws something else than one number for each element. Draw on "
            "every rank into a plain tensor of the whole shape and copy_() it in"
        )
    block = ""
    if origin is not None:
        where = "the model" if origin.unit == "(root)" else f"block {origin.unit!r}"
        block = f"use it inside of the forward of {where}, which gathers it, or between unshard() and reshard() of it; "
    where, there = ("in rows on all ranks", "of each rank") if tensor.owner < 0 else ("on one rank", "on the owner")
    return NotImplementedError(
        f"{what} is not defined on {subject}: its values lie {where}. To go on: {block}gather it with "
        f"tensor.full_tensor(), which is differentiable; or work on tensor.to_local() {there}"
    )


def _called_from(files: Collection[str]) -> bool:
    """Whether a function of one of ``files`` is being called."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename not in files:
        frame = frame.f_back
    return frame is not None


def _like(local: torch.Tensor, reference: OwnedTensor, content: Content) -> OwnedTensor:
    spec = reference._spec
    if local.dtype != reference.dtype:
        spec = owned_spec(reference.device_mesh, reference.shape, local.dtype, reference._ownership)
    return make_owned(local, spec, reference._ownership, content, reference._origin)


def _by_kind(func: OpOverload) -> _Operator | None:
    if is_elementwise(func):
        return _elementwise
    if is_foreach(func):
        return _foreach
    if is_owner_scalar(func):
        return _owner_scalar
    if is_draw(func):
        return _draw
    return None


def _local_argument(func: OpOverload, value: Any, reference: OwnedTensor) -> Any:
    """The local part of one argument beside ``reference``; refuses what does not line up with it."""
    if isinstance(value, OwnedTensor):
        if value.shape == reference.shape and _lie_alike(value, reference):
            return value._local_tensor
        raise DMuonError(f"{func}: owned tensors differ in owner, shape or mesh: {reference} and {value}")
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, OwnedScalar):
        return value._local_tensor
    if value.ndim == 0:
        return value.full_tensor() if isinstance(value, DTensor) else value
    return reference._ownership.cut(_whole_argument(func, value, reference), reference._spec)


def _whole_argument(func: OpOverload, value: torch.Tensor, reference: OwnedTensor) -> torch.Tensor:
    """A tensor that every rank has in full, plain or replicated, in the shape of ``reference``."""
    if isinstance(value, DTensor):
        everywhere = value.device_mesh == reference.device_mesh and all(p.is_replicate() for p in value.placements)
    else:
        everywhere = True
    fits = value.ndim <= reference.ndim and all(
        theirs in (1, ours) for theirs, ours in zip(reversed(value.shape), reversed(reference.shape), strict=False)
    )
    if not everywhere or not fits:
        raise DMuonError(
            f"{func} mixes {reference} with a {type(value).__name__} of shape {tuple(value.shape)}, which not every "
            "rank has in full: gather the owned one with full_tensor(), or copy the other into an owned tensor with "
            "copy_()"
        )
    # Of a backward pass no gradient goes further to what stands beside the owned tensor.
    if value.requires_grad and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
        raise DMuonError(
            f"{func} mixes {reference} with a {type(value).__name__} that requires a gradient, which would be known on "
            "one rank only: compute on full_tensor() of the owned one instead"
        )
    return (value._local_tensor if isinstance(value, DTensor) else value).expand(reference.shape)


def _refuse_to_write(func: OpOverload, written: torch.Tensor, reference: OwnedTensor) -> None:
    if not _owned(written):
        raise DMuonError(
            f"{func} writes values of {reference}, which lie on one rank, into a {type(written).__name__}: pass "
            "full_tensor() of the owned one"
        )


def _elementwise(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Run on the local tensors; a result has the layout of the arguments."""
    flat = tree_leaves((args, kwargs))
    owned = [value for value in flat if isinstance(value, OwnedTensor)]
    for written in mutated_arguments(func, args, kwargs):
        _refuse_to_write(func, written, owned[0])
    local_args, local_kwargs = tree_map(lambda value: _local_argument(func, value, owned[0]), (args, kwargs))
    result = func(*local_args, **local_kwargs)
    if func._schema.is_mutable:
        return next(iter(mutated_arguments(func, args, kwargs)))
    content = owned[0]._content if is_view(func) else Content(1 + max(tensor._content.version for tensor in owned))
    return _like(result, owned[0], content)


def _foreach(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Run the indices that hold owned tensors on their local tensors and leave the others to torch."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and len(value) > 0]
    count = len(lists[0])
    owned: dict[int, OwnedTensor] = {}
    for i, items in enumerate(zip(*lists, strict=True)):
        owned.update((i, item) for item in items if _owned(item))
    for position, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            values = args[position] if position < len(args) else kwargs.get(declared.name)
            if isinstance(values, (list, tuple)) and values:
                for i, reference in owned.items():
                    _refuse_to_write(func, values[i], reference)
    others = [i for i in range(count) if i not in owned]

    def local(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [_local_argument(func, value[i], reference) for i, reference in owned.items()] if value else []
        if isinstance(value, DTensor):
            value = value.full_tensor()
        return value[list(owned)] if _has_one_per_index(value, count) else value

    def remaining(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [value[i] for i in others] if value else []
        return value[others] if _has_one_per_index(value, count) else value

    results: dict[int, torch.Tensor] = {}
    values = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    for (i, reference), value in zip(owned.items(), values or (), strict=False):
        results[i] = _like(value, reference, Content(1 + reference._content.version))
    if others:
        values = func(*map(remaining, args), **{name: remaining(value) for name, value in kwargs.items()})
        results.update(zip(others, values or (), strict=False))
    return None if func._schema.is_mutable else [results[i] for i in range(count)]


def _has_one_per_index(value: Any, count: int) -> bool:
    """Whether a foreach argument is a 1-D tensor of scalars, as ``_foreach_addcdiv_.Tensor`` takes them."""
    return isinstance(value, torch.Tensor) and value.ndim == 1 and len(value) == count


def _copy(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``copy_``: the owner takes the values of a plain full tensor, or of a DTensor of any layout.

    A collective when the source is distributed otherwise than the destination.
    """
    destination, source, *rest = args
    if not isinstance(destination, OwnedTensor):
        raise DMuonError(f"copy_ into a {type(destination).__name__} from an owned tensor: pass source.full_tensor()")
    if source.ndim > 0 and source.shape != destination.shape:
        raise DMuonError(
            f"copy_: source of shape {tuple(source.shape)} into {destination}: every rank passes the whole tensor"
        )
    if isinstance(source, OwnedTensor) and _lie_alike(source, destination):
        source = source._local_tensor
    elif isinstance(source, DTensor):
        source = source.full_tensor()
    if source.ndim > 0 and source.shape == destination.shape:
        source = destination._ownership.cut(source, destination._spec)
    func(destination._local_tensor, source, *rest, **kwargs)
    return destination


def _draw(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """See [Note: random numbers in owned tensors]."""
    tensor, *rest = args
    local, ownership = tensor._local_tensor, tensor._ownership
    keeps_all = ownership.is_owner and ownership.is_whole(tensor._spec)
    drawn = func(local if keeps_all else local.new_empty(tensor.shape), *rest, **kwargs)
    if not keeps_all:
        shape, offset = ownership.part(tensor._spec) if ownership.is_owner else (local.shape, [0] * local.ndim)
        for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
            drawn = drawn.narrow(dim, start, length)
    if not func._schema.is_mutable:
        return _like(drawn.contiguous(), tensor, Content(1 + tensor._content.version))
    if not keeps_all:
        local.copy_(drawn)
    return cast(OwnedTensor, tensor)


def _new_empty(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``new_empty`` of the same shape, which is how checkpoint staging makes its copy."""
    tensor, size = args
    if tuple(size) != tuple(tensor.shape):
        raise _undefined(f"new_empty({tuple(size)})", tensor)
    return _elementwise(aten.empty_like.default, (tensor,), kwargs)


def _foreach_copy(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    destinations, sources, *rest = args
    for destination, source in zip(destinations, sources, strict=True):
        if _owned(destination) or _owned(source):
            _copy(aten.copy_.default, (destination, source, *rest), kwargs)
        else:
            destination.copy_(source, *rest, **kwargs)


def _owner_scalar(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """A statistic of the whole tensor: the owner computes it and broadcasts one element. A collective.

    What has no owner is gathered for it, so that the number does not depend on how many ranks there are.
    """
    tensor = args[0]
    if tensor.owner < 0:
        value = func(_gathered(tensor), *args[1:], **kwargs)
        if value.numel() != 1:
            raise _undefined(f"{func} along single dimensions", tensor)
        return _as_scalar(value, tensor)
    _require_whole(func, tensor)
    outline = func(tensor._local_tensor.new_empty(tensor.shape, device="meta"), *args[1:], **kwargs)
    if outline.numel() != 1:
        raise _undefined(f"{func} along single dimensions", tensor)
    local = tensor._local_tensor
    value = func(local, *args[1:], **kwargs) if tensor.is_owner else local.new_empty(outline.shape, dtype=outline.dtype)
    broadcast_from_owner(value, tensor.device_mesh, tensor._ownership)
    return _as_scalar(value, tensor)


def _as_scalar(value: torch.Tensor, tensor: OwnedTensor) -> DTensor:
    return OwnedScalar.of(value, tensor.device_mesh) if value.ndim == 0 else replicated(value, tensor.device_mesh)


def _gathered(tensor: OwnedTensor) -> torch.Tensor:
    """The whole of a tensor without an owner. A collective."""
    return DTensor.__new__(DTensor, tensor._local_tensor, tensor._spec, requires_grad=False).full_tensor()


def _require_whole(func: OpOverload, tensor: OwnedTensor) -> None:
    if not tensor._ownership.is_whole(tensor._spec):
        raise NotImplementedError(
            f"{func} of an owned tensor that further mesh axes share out ({tensor.placements}): gather it with "
            "full_tensor() first"
        )


def _compare(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``torch.equal`` and ``torch.allclose`` of owned tensors, decided by their owner. A collective."""
    reference = next(tensor for tensor in args if _owned(tensor))
    if reference.owner < 0:
        return bool(func(*(_gathered(value) if _owned(value) else value for value in args), **kwargs))
    _require_whole(func, reference)
    local = [_local_argument(func, value, reference) for value in args]
    verdict = torch.zeros((), dtype=torch.uint8, device=reference._local_tensor.device)
    if reference.is_owner:
        verdict.fill_(func(*local, **kwargs))
    broadcast_from_owner(verdict, reference.device_mesh, reference._ownership)
    return bool(verdict.item())


def _as_sharded(tensor: OwnedTensor, order: float) -> DTensor:
    """The same values as a plain DTensor whose per-rank norms combine to the norm of the whole."""
    local = tensor._local_tensor
    if order < 0:
        raise _undefined(f"a norm of order {order}", tensor)
    if math.isinf(order) and local.shape[0] == 0:
        local = local.new_zeros(
            (1, *local.shape[1:])
        )  # the maximum over no rows is not defined; over a zero row it is 0
    return DTensor.__new__(DTensor, local, tensor._spec, requires_grad=False)


def _vector_norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Norm of the whole tensor as a partial DTensor: torch reduces all norms of a model in one collective."""
    tensor, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    keepdim = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    if keepdim or (dim is not None and len(dim) != tensor.ndim):
        raise _undefined(f"{func} along single dimensions", tensor)
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _owner_scalar(func, args, kwargs)
    return cast(DTensor, func(_as_sharded(tensor, order), order, dtype=kwargs.get("dtype")))


def _foreach_norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    tensors = [_as_sharded(tensor, order) if isinstance(tensor, OwnedTensor) else tensor for tensor in args[0]]
    return cast("list[torch.Tensor]", func(tensors, *args[1:], **kwargs))


def _unscale(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's check: unscale in place and agree over the mesh on whether any gradient is not finite."""
    gradients, found_inf, inverse_scale = args
    others = [tensor for tensor in gradients if not _owned(tensor)]
    owned = [tensor for tensor in gradients if _owned(tensor)]
    if others:
        func(others, found_inf, inverse_scale)
    func([tensor._local_tensor for tensor in owned], found_inf, inverse_scale)
    for mesh in {id(mesh): mesh for mesh in (tensor.device_mesh for tensor in owned)}.values():
        for axis in range(mesh.ndim):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))


_SPECIAL: dict[OpOverload, _Operator] = {
    aten.copy_.default: _copy,
    aten._foreach_copy_.default: _foreach_copy,
    aten.allclose.default: _compare,
    aten.equal.default: _compare,
    aten.new_empty.default: _new_empty,
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
