"""Loads of ``torch.distributed.checkpoint`` that happen as a whole, on all ranks, or not at all.

torch reads each part straight into the tensor that it is for, which is the model's own: a file that turns out to be cut
off leaves half of the weights overwritten. Here parts are read into host memory, checked against what they are for, and
copied once every rank has read all of its own. That takes as much host memory for the time of the load as this rank's
parts. What is wrong is one `ConfigurationError` on every rank, which names the key and its file.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from dmuon_hf.core.checkpoint.boxes import cover
from dmuon_hf.core.checkpoint.hyperparameters import other_update_rule
from dmuon_hf.core.checkpoint.source import SHOWN_PROBLEMS, fits_dtype
from dmuon_hf.core.errors import ConfigurationError

__all__ = ["guard_loads", "guards_loads", "into_fresh_tensors", "load_as_a_whole"]

_guarding: weakref.WeakSet[object] = weakref.WeakSet()
_fresh = False


def guard_loads(owner: object) -> None:
    """Have this process load as a whole for as long as ``owner`` lives."""
    _guarding.add(owner)


def guards_loads() -> bool:
    """Whether somebody in this process wants loads as a whole."""
    return bool(_guarding) or _fresh


@contextmanager
def into_fresh_tensors() -> Iterator[None]:
    """Block in which loads go into tensors that nobody uses yet: errors as in others, but no host memory beside."""
    global _fresh
    before, _fresh = _fresh, True
    try:
        yield
    finally:
        _fresh = before


def load_as_a_whole(
    load: Callable[..., None], state_dict: dict[str, Any], storage_reader: Any, *, planner: Any = None, **options: Any
) -> None:
    """Torch's ``load``, which it calls ``_load_state_dict``, with all its arguments. Collective, as they say.

    Raises:
        ConfigurationError: On every rank, if on any something does not fit or cannot be read; no tensor has changed.
    """
    where = str(getattr(storage_reader, "checkpoint_id", "the checkpoint"))
    staged = _StagedPlanner(planner or DefaultLoadPlanner(), where, stages=not _fresh)
    read = storage_reader.read_data
    storage_reader.read_data = _naming_the_key(read, storage_reader, staged, where)
    try:
        load(state_dict, storage_reader, planner=staged, **options)
    except CheckpointException as failure:
        raise _as_one_error(failure, where) from failure
    finally:
        del storage_reader.read_data
    staged.write()


class _StagedPlanner(LoadPlanner):
    """The planner of a load, with host memory in place of the tensors that it reads into."""

    def __init__(self, planner: LoadPlanner, where: str, *, stages: bool) -> None:
        self._planner = planner
        self._where = where
        self._stages = stages
        self._staged: list[tuple[ReadItem, Tensor, Tensor]] = []
        self.read: set[ReadItem] = set()

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._planner.set_up_planner(state_dict, metadata, is_coordinator)
        self._is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        failure: Exception | None = None
        plan: LoadPlan | None = None
        try:
            plan = self._planner.create_local_plan()
        except Exception as error:
            failure = error
        problems = list(_problems(self._planner, thorough=self._is_coordinator)) or ([str(failure)] if failure else [])
        if plan is None or problems:
            more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
            raise ConfigurationError(
                f"{self._where} does not fit, nothing was loaded: {'; '.join(problems[:SHOWN_PROBLEMS])}{more}"
            )
        return plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return self._planner.create_global_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return self._planner.finish_plan(central_plan)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        # Into the state dict, not into what it was made of.
        self._planner.load_bytes(read_item, value)
        self.read.add(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._planner.resolve_tensor(read_item)
        if target.is_meta or not self._stages:
            return target
        buffer = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        self._staged.append((read_item, target, buffer))
        return buffer

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.read.add(read_item)
        if not self._stages:
            self._planner.commit_tensor(read_item, tensor)

    @torch.no_grad()
    def write(self) -> None:
        """Copy what was read to where it belongs, letting go of it."""
        while self._staged:
            item, target, buffer = self._staged.pop()
            target.detach().copy_(buffer)
            self._planner.commit_tensor(item, target)


def _naming_the_key(
    read: Callable[..., Future[None]], reader: Any, staged: _StagedPlanner, where: str
) -> Callable[..., Future[None]]:
    """A reader's ``read_data`` whose error says what could not be read."""

    def read_data(plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            future = read(plan, planner)
            future.wait()
            return future
        except Exception as error:
            # Readers do not say where they were: what was not read yet is read piece by piece.
            for item in plan.items:
                if item not in staged.read:
                    try:
                        read(LoadPlan([item]), planner).wait()
                    except Exception as again:
                        raise _unreadable(where, again, _described(item, reader)) from error
            raise _unreadable(where, error) from error

    return read_data


def _described(item: ReadItem, reader: Any) -> str:
    stored = getattr(reader, "storage_data", {}).get(item.storage_index)
    file = getattr(stored, "relative_path", None)
    return f"{item.storage_index.fqn} in {file}" if file else item.storage_index.fqn


def _unreadable(where: str, error: BaseException, what: str = "") -> ConfigurationError:
    said = f"{type(error).__name__}: {error}"
    return ConfigurationError(
        f"{where} cannot be read, nothing was loaded: {what + ': ' if what else ''}{said}. Most likely the run ended "
        "while it was saved; resume from an earlier checkpoint"
    )


def _as_one_error(failure: CheckpointException, where: str) -> ConfigurationError:
    """What the first rank found that found something of ours; torch collects the errors of all ranks on each."""
    errors = [error for _, (error, _) in sorted(failure.failures.items())]
    ours = next((error for error in errors if isinstance(error, ConfigurationError)), None)
    return ConfigurationError(str(ours)) if ours is not None else _unreadable(where, errors[0])


# What does not fit


def _problems(planner: Any, *, thorough: bool) -> Iterator[str]:
    """What a checkpoint's table of contents says against loading it, in words.

    Args:
        planner: Of torch, or one that keeps ``state_dict`` and ``metadata`` as it does; of others nothing is known.
        thorough: Also look whether the parts of every tensor make up the whole. Once is enough.
    """
    wanted, metadata = getattr(planner, "state_dict", None), getattr(planner, "metadata", None)
    if not isinstance(wanted, Mapping) or not isinstance(metadata, Metadata):
        return
    partial = getattr(planner, "allow_partial_load", False)
    stored = metadata.state_dict_metadata
    left_over = [] if partial else list(_left_over(planner, wanted, metadata))
    if not partial:
        yield from _of_another_update_rule(wanted, stored, left_over)
    for key, target in wanted.items():
        entry = stored.get(key)
        if entry is None:
            if not partial:
                yield f"{key} is missing{_of_another_optimizer(key, stored)}"
        elif isinstance(target, Tensor) != isinstance(entry, TensorStorageMetadata):
            yield f"{key} is {'no tensor' if isinstance(target, Tensor) else 'a tensor'} there, but not here"
        elif isinstance(target, Tensor) and isinstance(entry, TensorStorageMetadata):
            yield from _misfit(key, target, entry, thorough=thorough)
    yield from (f"{key} is unexpected" for key in left_over)


def _misfit(key: str, target: Tensor, entry: TensorStorageMetadata, *, thorough: bool) -> Iterator[str]:
    dtype = entry.properties.dtype
    if tuple(entry.size) != tuple(target.shape):
        yield f"{key} has shape {tuple(entry.size)}, but {tuple(target.shape)} here"
    elif not fits_dtype(torch.empty(entry.size, dtype=dtype, device="meta"), target.dtype):
        yield f"{key} has dtype {dtype}, which does not load into {target.dtype}"
    elif thorough and not cover(tuple(entry.size), [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]):
        yield (
            f"{key} is in parts that overlap or leave gaps, as they do where torch saved a _StridedShard whose size "
            "does not divide"
        )


def _of_another_optimizer(key: str, stored: Mapping[str, Any]) -> str:
    name, _, state = key.rpartition(".")
    if state == "momentum_buffer" and f"{name}.exp_avg" in stored:
        return " (it was saved with AdamW on this parameter: by another optimizer, or with other routes)"
    return ""


def _of_another_update_rule(
    wanted: Mapping[str, Any], stored: Mapping[str, Any], left_over: Sequence[str]
) -> Iterator[str]:
    """What to do where second moments are on one side only, said once, of the first matrix."""
    missing = [key for key in wanted if key not in stored]
    for keys, here, there in ((missing, "normuon", "muon"), (left_over, "muon", "normuon")):
        for name, _, state in (key.rpartition(".") for key in keys):
            if state == "second_moment" and f"{name}.momentum_buffer" in stored:
                yield other_update_rule(name, here, there)
                return


def _left_over(planner: Any, wanted: Mapping[str, Any], metadata: Metadata) -> Iterator[str]:
    """State of parameters that the optimizer here does not have: momentum is never dropped in silence."""
    there = metadata.planner_data or {}
    paths = getattr(planner, "mappings", {})
    holders = {path[:-2] for key, path in paths.items() if key in wanted and path[-1] == "momentum_buffer"}
    for key, path in there.items():
        if key not in wanted and any(len(path) > len(holder) and path[: len(holder)] == holder for holder in holders):
            yield key
