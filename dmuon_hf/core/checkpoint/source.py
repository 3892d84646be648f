"""Where a load takes its whole tensors from, and the check that all ranks agree to load them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.grid_group import GridGroup

__all__ = ["Source", "check_together", "flaw"]

SHOWN_PROBLEMS = 8
"""Problems that an error message lists before it counts the rest."""


@dataclass(frozen=True, slots=True)
class _Outline:
    """A tensor that rank 0 has and will send."""

    shape: torch.Size
    dtype: torch.dtype


class Source:
    """A flat state dict of whole tensors that every rank has, or that rank 0 has and sends to the others.

    Which of the two is agreed on by all ranks when it is opened, from who passed anything. ``extra`` travels along.
    """

    def __init__(self, entries: dict[Any, Any], extra: Any, sent: bool, group: GridGroup | None) -> None:
        self._entries = entries
        self._sent = sent
        self._group = group
        self.extra = extra

    @classmethod
    def open(cls, entries: dict[Any, Any], *, filled: bool, group: GridGroup | None, extra: Any) -> Source:
        """Agree on where values come from. A collective over ``group``; in one process they are this rank's.

        Args:
            entries: what this rank was given.
            filled: whether that is a state dict at all, and not the empty stand-in of a rank that did not read it.
            group: all ranks that load; None in one process.
            extra: whatever belongs to the state dict beside its entries.

        Raises:
            ConfigurationError: on every rank, if some ranks have nothing and rank 0 is one of them, or it has what
                cannot be sent.
        """
        entries, extra = tree_map(_plain, entries), tree_map(_plain, extra)
        if group is None or group.size == 1:
            return cls(entries, extra, False, group)
        flags = group.all_gather_object(filled)
        if all(flags) or not any(flags):
            return cls(entries, extra, False, group)
        if not flags[0]:
            empty = [rank for rank, flag in enumerate(flags) if not flag]
            raise ConfigurationError(
                f"ranks {empty} passed an empty state dict, rank 0 among them: pass it on every rank or on rank 0"
            )
        mine = _packed({key: _outlined(value) for key, value in entries.items()}, extra) if group.rank == 0 else None
        parcel = group.broadcast_object(mine)
        if isinstance(parcel, str):
            raise ConfigurationError(f"the state dict of rank 0 cannot be sent, nothing was loaded: {parcel}")
        outlines, extra = pickle.loads(parcel)
        return cls(entries if group.rank == 0 else outlines, extra, True, group)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def value(self, key: Hashable) -> Any:
        """A value that is no tensor."""
        return self._entries[key]

    def tensor(self, key: Hashable, device: torch.device) -> Tensor:
        """A whole plain tensor; a collective if rank 0 sends, and on ``device`` then."""
        value = self._entries[key]
        if not self._sent:
            return torch.as_tensor(value)
        if isinstance(value, _Outline):
            received = torch.empty(value.shape, dtype=value.dtype, device=device)
        else:
            received = torch.as_tensor(value).to(device).contiguous()
        wire = received.view(torch.uint8) if received.element_size() == 1 else received
        assert self._group is not None
        self._group.broadcast(wire, 0)
        return received

    def problems(self, targets: Mapping[Any, Any], tied: Iterable[tuple[Any, ...]] = ()) -> Iterator[str]:
        """What keeps this from being loaded into ``targets``, in words; of ``tied`` keys one is enough."""
        siblings = {key: group for group in tied for key in group}
        for key in self._entries:
            if key not in targets:
                yield f"{_shown(key)} is unexpected"
        for key, target in targets.items():
            if key in self._entries:
                yield from _misfit(_shown(key), target, self._entries[key])
            elif not any(other in self._entries for other in siblings.get(key, ())):
                yield f"{_shown(key)} is missing"
        for group in tied:
            present = [key for key in group if isinstance(self._entries.get(key), Tensor)]
            for other in present[1:]:
                if not _same(self._entries[present[0]], self._entries[other]):
                    yield f"{_shown(present[0])} and {_shown(other)} are one tied parameter but have different values"


def check_together(problems: Callable[[], Iterable[str]], what: str, group: GridGroup | None) -> None:
    """Raise on every rank of ``group`` if any has a problem, so that all load or none does. A collective."""
    mine = list(problems())
    found = [mine]
    if group is not None:
        found = group.all_gather_object([*mine[:SHOWN_PROBLEMS], *[""] * (len(mine) - SHOWN_PROBLEMS)])
    for rank, listed in enumerate(found):
        if listed:
            more = f"; and {len(listed) - SHOWN_PROBLEMS} more" if len(listed) > SHOWN_PROBLEMS else ""
            raise ConfigurationError(
                f"the {what} does not fit (rank {rank}), nothing was loaded: {'; '.join(listed[:SHOWN_PROBLEMS])}{more}"
            )


def _plain(value: Any) -> Any:
    """A tensor as one that can be sent and copied from: detached, awaited, without a class of its own. Copies nothing.

    What has no values of its own here, and what is no tensor, is given back as it is.
    """
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if isinstance(value, AsyncCollectiveTensor):
        value = value.wait()
    return value if flaw(value) else value.as_subclass(Tensor).resolve_conj().resolve_neg()


def flaw(value: Tensor) -> str:
    """Why a tensor cannot be loaded whatever it is loaded into, as the end of a sentence; empty if it can."""
    if isinstance(value, DTensor):
        return "is distributed, but whole tensors are loaded here; torch has functions for sharded ones"
    if isinstance(value, FakeTensor) or value.is_meta:
        return "is on the meta device and has no values"
    if _is_wrapper(value):
        return f"is a {type(value).__name__}, but plain tensors are loaded here"
    if value.is_quantized:
        return "is quantised: call dequantize() first"
    if value.layout != torch.strided:
        return (
            f"is {str(value.layout).removeprefix('torch.')}, but strided tensors are loaded here: call to_dense() first"
        )
    return ""


def _is_wrapper(value: object) -> bool:
    return is_traceable_wrapper_subclass(value)


def fits_dtype(value: Tensor | _Outline, dtype: torch.dtype) -> bool:
    """Whether values load into ``dtype``: of the same kind (floating, complex, integer, bool), or whole scalars.

    A whole tensor of integers in place of floating-point numbers is a quantised weight more often than not.
    """
    if _kind(value.dtype) != _kind(dtype):
        return len(value.shape) == 0 and torch.can_cast(value.dtype, dtype)
    try:
        torch.zeros(value.dtype.itemsize, dtype=torch.uint8).view(value.dtype).to(dtype)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def _packed(outlines: dict[Any, Any], extra: Any) -> bytes | str:
    """What rank 0 sends ahead of the tensors, or why it cannot: other ranks wait for either."""
    try:
        return pickle.dumps((outlines, extra))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _outlined(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # A pickled scalar on a device would be made on the sender's device by every rank. What has a flaw is not sent.
    return _Outline(value.shape, value.dtype) if value.ndim > 0 or flaw(value) else value.cpu()


def _shown(key: Any) -> str:
    return key if isinstance(key, str) else "/".join(map(str, key))


def _same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit but for the dtype: NaN equals NaN. What has a flaw is named for that."""
    if left is right or flaw(left) or flaw(right):
        return True
    return left.shape == right.shape and torch.allclose(left, right.to(left), rtol=0.0, atol=0.0, equal_nan=True)


def _misfit(name: str, target: Any, value: Any) -> Iterator[str]:
    if not isinstance(target, Tensor):
        return
    if isinstance(value, Tensor) and (reason := flaw(value)):
        yield f"{name} {reason}"
    elif isinstance(value, (Tensor, _Outline, int, float)):
        given = value if isinstance(value, (Tensor, _Outline)) else torch.as_tensor(value)
        if tuple(given.shape) != tuple(target.shape):
            yield f"{name} has shape {tuple(given.shape)}, but {tuple(target.shape)} here"
        elif not fits_dtype(given, target.dtype):
            yield f"{name} has dtype {given.dtype}, which does not load into {target.dtype}"
    else:
        yield f"{name} is a {type(value).__name__}, not a tensor"
