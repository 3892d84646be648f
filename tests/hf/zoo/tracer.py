"""Follows what comes out of each projection through a model's own forward, and learns which rows belong together.

Every number that a traced weight puts out is accompanied by a shadow: the row of the weight that it came from. What
only moves numbers (views, splits, indexing, concatenation) moves the shadow alike; what works on each number by itself
(activations, biases, rotations, norms) keeps it. Where numbers are combined (a matrix product, attention, a product of
two parts) the rows that arrive together play one role. Rows that never arrive together play several: the weight is
fused, and its logical matrices are these sets of rows.

All of it runs on meta, so a model of any size is traced in a second. Questions about values that meta tensors do not
have are answered so that the forward goes on: no check fails, every mask selects all, every index is the first.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["RoleTracer"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MOVES = _names(
    """
    __getitem__ H T adjoint broadcast_to cat chunk clone concat concatenate contiguous dsplit expand expand_as flatten
    flip hsplit mH mT movedim narrow pad permute repeat repeat_interleave reshape reshape_as roll select split
    split_with_sizes squeeze stack swapaxes swapdims t tensor_split tile transpose unbind unflatten unfold unsqueeze
    view view_as vsplit
    """
)
_KEEPS = _names(
    """
    __add__ __iadd__ __imul__ __isub__ __itruediv__ __mul__ __neg__ __pow__ __radd__ __rmul__ __rsub__ __rtruediv__
    __sub__ __truediv__ _threshold abs add add_ alpha_dropout batch_norm bfloat16 celu clamp clamp_ clamp_max clamp_min
    clip cos cumsum detach div div_ double dropout dropout_ elu erf exp exp2 expm1 feature_dropout float float_power
    gelu gelu_ group_norm half hardsigmoid hardswish hardtanh instance_norm layer_norm leaky_relu log log1p log_softmax
    logsigmoid masked_fill masked_fill_ mish mul mul_ multiply nan_to_num neg negative normalize pow prelu relu relu6
    relu_ requires_grad_ rms_norm rsqrt rsub selu sigmoid sigmoid_ silu silu_ sin softmax softplus sqrt square sub sub_
    subtract tanh tanh_ threshold to tril triu true_divide type type_as where
    """
)
_LINEAR_COMBINATIONS = _names(
    "__add__ __iadd__ __isub__ __radd__ __rsub__ __sub__ add add_ rsub sub sub_ subtract where"
)
_TELLS = _names(
    """
    __eq__ __format__ __ge__ __get__ __gt__ __hash__ __le__ __len__ __lt__ __ne__ __repr__ __setitem__ all amax amin any
    argmax argmin bool count_nonzero data_ptr device dim dtype element_size empty_like eq finfo full_like ge grad_fn gt
    is_complex is_contiguous is_cpu is_cuda is_floating_point is_leaf is_meta is_nested is_quantized is_sparse isfinite
    isinf isnan itemsize layout le linalg_vector_norm logsumexp lt max mean min names nbytes ndim ne new_empty new_full
    new_ones new_zeros norm numel ones_like rand_like requires_grad result_type shape size std storage_offset stride sum
    topk var var_mean vector_norm zeros_like
    """
)
"""What asks about numbers or reduces them to a statistic: neither moves a role nor decides one."""
_PRODUCTS = _names("__matmul__ _grouped_mm addmm baddbmm bmm conv1d grouped_mm linear matmul mm")
_OF_WEIGHTS = _names(
    "T __getitem__ contiguous float index_select mT permute reshape select squeeze t to transpose view"
)


class RoleTracer(TorchFunctionMode):
    """While entered, follows the outputs of `weights` (name -> parameter, 2-D or a stack of such).

    `roles()` then says for every weight whose output was seen the sets of rows that play one role.

    Args:
        transposed: whether the weight of a name is stored `(in, out)`.
    """

    def __init__(self, weights: Mapping[str, Tensor], transposed: Callable[[str], bool]) -> None:
        super().__init__()
        self._names = list(weights)
        self._starts: list[int] = []
        self._rows: dict[str, tuple[int, int]] = {}
        # The tensors are kept beside their ids, so that no id is given to another one.
        self._weights: dict[int, tuple[str, Tensor]] = {}
        self._shadows: dict[int, tuple[Tensor, Tensor]] = {}
        self._sites: dict[Any, int] = {}
        self._seen: set[str] = set()
        self._joined: list[Tensor] = []
        self._total = 0
        for name, weight in weights.items():
            rows = weight.shape[-1 if transposed(name) else -2]
            self._starts.append(self._total)
            self._rows[name] = (self._total, rows)
            self._weights[id(weight)] = (name, weight)
            self._total += rows
        # One row more, of what is marked.
        self._names.append("")
        self._starts.append(self._total)
        self._total += 1
        self._read = torch.zeros(self._total, dtype=torch.bool)

    def mark(self, tensor: Tensor) -> None:
        """Follow an input as the output of a weight that is none of these: what meets it is not one role with it."""
        self._shadows[id(tensor)] = (tensor, torch.full((), self._total - 1).expand(tensor.shape))

    def has_seen(self, name: str) -> bool:
        """Whether something came out of a weight."""
        return name in self._seen

    def has_read(self, name: str) -> bool:
        """Whether all that came out of a weight went into something."""
        start, rows = self._rows[name]
        return bool(self._read[start : start + rows].all())

    def roles(self) -> dict[str, list[Tensor]]:
        """Rows of each role of every weight that was seen, by their first row; rows that nothing read are absent."""
        labels = self._labels()
        result: dict[str, list[Tensor]] = {}
        for name in sorted(self._seen):
            start, count = self._rows[name]
            part = labels[start : start + count]
            sets = [(part == label).nonzero().flatten() for label in part.unique().tolist() if label >= 0]
            if sets:
                result[name] = sorted(sets, key=lambda rows: int(rows[0]))
        return result

    def _labels(self) -> Tensor:
        """One number for all rows that were joined, directly or over others; -1 for rows that nothing read."""
        labels = torch.full((self._total,), -1, dtype=torch.int64)
        parents: list[int] = []

        def root(label: int) -> int:
            while parents[label] != label:
                label = parents[label]
            return label

        for rows in self._joined:
            roots = sorted({root(label) for label in labels[rows].unique().tolist() if label >= 0})
            if not roots:
                roots = [len(parents)]
                parents.append(roots[0])
            for other in roots[1:]:
                parents[other] = roots[0]
            labels[rows[labels[rows] < 0]] = roots[0]
        used = labels >= 0
        roots_of = torch.tensor([root(label) for label in range(len(parents))], dtype=torch.int64)
        labels[used] = roots_of[labels[used]]
        return labels

    # -- the mode ------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "__get__")
        if func is torch.nn.functional.multi_head_attention_forward:
            return self._inside(func, args, kwargs)
        if name in ("split", "split_with_sizes"):
            args = _adding_up(args, kwargs)
        result = _run(func, name, args, kwargs)
        with torch._C.DisableTorchFunction():
            self._follow(func, name, args, kwargs, result)
        return result

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow the steps of a function of torch that is written in Python."""
        with mock.patch.object(torch.nn.functional, "has_torch_function", return_value=False), self:
            return func(*args, **kwargs)

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        tagged = [tensor for tensor in tensors if id(tensor) in self._shadows]
        weight = next((tensor for tensor in tensors if id(tensor) in self._weights), None)
        if weight is not None and isinstance(result, Tensor):
            self._pass_weight(name, self._weights[id(weight)][0], weight is tensors[0], tagged, result)
        elif tagged and name not in _TELLS:
            moved = name in _MOVES and self._move(func, name, args, kwargs, result)
            kept = not moved and isinstance(result, Tensor) and self._keep(name, args, kwargs, tagged, result)
            if not moved and not kept:
                self._combine((name, _call_site()), tagged)

    def _pass_weight(self, function: str, name: str, is_left: bool, tagged: list[Tensor], result: Tensor) -> None:
        start, rows = self._rows[name]
        if function in _PRODUCTS:
            self._combine(name, tagged)
            channels_first = function == "conv1d" or is_left
            if result.shape[-2 if channels_first else -1] == rows:
                index = torch.arange(start, start + rows)
                self._shadows[id(result)] = (result, (index[:, None] if channels_first else index).expand(result.shape))
                self._seen.add(name)
        elif function in _OF_WEIGHTS and rows in result.shape[-2:]:
            self._weights[id(result)] = (name, result)

    def _shadow(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in self._shadows:
            return self._shadows[id(value)][1]
        if not value.is_meta:
            return value
        # Floats that no weight put out carry no rows; an index takes the first, a mask all.
        if value.is_floating_point():
            return torch.full((), -1, dtype=torch.int64).expand(value.shape)
        return torch.full((), int(value.dtype == torch.bool), dtype=value.dtype).expand(value.shape)

    def _move(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> bool:
        try:
            if name == "pad":
                shadows = torch.nn.functional.pad(self._shadow(args[0]), args[1], value=-1)
            else:
                moved_args, moved_kwargs = tree_map(self._shadow, (args, kwargs))
                shadows = func(*moved_args, **moved_kwargs)
        except (RuntimeError, TypeError, IndexError, ValueError):
            return False
        pairs = list(zip(tree_flatten(result)[0], tree_flatten(shadows)[0], strict=False))
        if any(not isinstance(moved, Tensor) or moved.shape != shadow.shape for moved, shadow in pairs):
            return False
        self._shadows.update({id(moved): (moved, shadow) for moved, shadow in pairs})
        return True

    def _keep(self, name: str, args: Any, kwargs: Any, tagged: list[Tensor], result: Tensor) -> bool:
        """Whether every number of the result stands for the row that its number in `tagged` stood for."""
        convolution = _is_depthwise(name, args, kwargs)
        if name not in _KEEPS and not convolution:
            return False
        shadows = [self._shadows[id(tensor)][1] for tensor in tagged]
        sets = [_rows(shadow) for shadow in shadows]
        if len({self._owner(rows) for rows in sets if rows.numel()}) > 1:
            return False
        if any(not torch.equal(rows, sets[0]) for rows in sets[1:]):
            # A sum of equally many rows is a rotation of halves of one role; any other pair meets as two roles.
            if name not in _LINEAR_COMBINATIONS or len({rows.numel() for rows in sets}) > 1:
                return False
            self._joined.append(torch.cat(sets))
        shadow = next((shadow for shadow in shadows if shadow.shape == result.shape), shadows[0])
        if convolution:
            # Every position of a channel stands for one row.
            shadow = shadow.flatten(2)[..., :1].reshape(*shadow.shape[:2], *[1] * (result.ndim - 2))
        try:
            self._shadows[id(result)] = (result, shadow.expand(result.shape))
        except RuntimeError:
            return False
        return True

    def _combine(self, site: Any, tagged: list[Tensor]) -> None:
        """Join the rows that each tensor brings here, and those that the same place of the code got before."""
        for position, tensor in enumerate(tagged):
            rows = _rows(self._shadows[id(tensor)][1])
            self._read[rows] = True
            for part in self._by_owner(rows):
                place = (site, position, self._owner(part))
                first = self._sites.setdefault(place, int(part[0]))
                self._joined.append(torch.cat([part, torch.tensor([first])]))

    def _owner(self, rows: Tensor) -> str:
        return self._names[bisect.bisect_right(self._starts, int(rows[0])) - 1]

    def _by_owner(self, rows: Tensor) -> list[Tensor]:
        owners = torch.bucketize(rows, torch.tensor(self._starts), right=True)
        return [rows[owners == owner] for owner in owners.unique().tolist()]


def _rows(shadow: Tensor) -> Tensor:
    """The rows in a shadow, sorted. Broadcast dimensions hold nothing new and are looked at once."""
    for dim, (stride, size) in enumerate(zip(shadow.stride(), shadow.shape, strict=True)):
        if stride == 0 and size > 1:
            shadow = shadow.narrow(dim, 0, 1)
    unique = shadow.flatten().unique()
    return unique[unique >= 0]


def _is_depthwise(name: str, args: Any, kwargs: Any) -> bool:
    if name not in ("conv1d", "conv2d"):
        return False
    weight = kwargs["weight"] if "weight" in kwargs else args[1]
    groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
    return bool(groups == weight.shape[0] and weight.shape[1] == 1)


def _call_site() -> tuple[tuple[int, int], ...]:
    """The instructions that led here: loops come by again, calls from two places of one line do not."""
    frame, site = sys._getframe(3), []
    while frame is not None and len(site) < 40:
        site.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(site)


# -- values that meta tensors do not have ------------------------------------------------------------------------------


def _run(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if first is not None and first.is_meta:
        if name in _ANSWERS:
            return _ANSWERS[name](first)
        if (name == "where" and len(args) == 1) or (name == "nonzero" and (kwargs.get("as_tuple") or len(args) > 1)):
            return tuple(_first_index() for _ in range(first.ndim))
        if name == "nonzero" and first.ndim == 1 and "as_tuple" in kwargs:
            # Some of the first, which are enough to go on: where they are experts, each is called.
            return torch.empty(min(len(first), 4), 1, dtype=torch.int64, device="meta")
        if name in ("argwhere", "nonzero"):
            return _first_index(first.ndim)
        if name in ("unique", "unique_consecutive"):
            return func(torch.zeros(1, dtype=first.dtype), *args[1:], **kwargs)
        if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            return first.flatten(0, args[1].ndim - 1)
        if name in ("__getitem__", "__setitem__"):
            args = (first, tree_map(_known_index, args[1]), *args[2:])
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    if name != "__setitem__" and any(tensor.is_meta for tensor in tensors):
        args, kwargs = tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, (args, kwargs))
    return func(*args, **kwargs)


def _first_index(*shape: int) -> Tensor:
    return torch.zeros(1, *shape, dtype=torch.int64, device="meta")


def _adding_up(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of a split whose sizes were read from a tensor without values: the first part takes what is left."""
    if len(args) < 2 or not isinstance(args[1], (list, tuple)):
        return args
    tensor, sizes = args[:2]
    rest = tensor.shape[kwargs.get("dim", args[2] if len(args) > 2 else 0)] - sum(sizes)
    return tensor, [sizes[0] + max(rest, 0), *sizes[1:]], *args[2:]


def _known_index(index: Any) -> Any:
    if isinstance(index, Tensor) and index.is_meta and index.ndim == 1 and index.dtype == torch.bool:
        return slice(None)
    unknown = isinstance(index, Tensor) and index.is_meta and index.ndim == 0 and not index.is_floating_point()
    return 0 if unknown else index


_ANSWERS: Mapping[str, Callable[[Tensor], Any]] = {
    "__bool__": lambda _: False,
    "__contains__": lambda _: False,
    "__float__": lambda _: 1.0,
    "__index__": lambda _: 1,
    "__int__": lambda _: 1,
    "allclose": lambda _: False,
    "equal": lambda _: False,
    "is_nonzero": lambda _: False,
    "item": lambda _: 1,
    "masked_select": lambda tensor: tensor.flatten(),
    "tolist": lambda tensor: torch.ones(tensor.shape, dtype=torch.int64).tolist(),
}
