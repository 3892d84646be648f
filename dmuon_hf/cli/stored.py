"""Weights of a checkpoint read piece by piece, whoever wrote it.

| Found                                            | Written by                                            |
|--------------------------------------------------|-------------------------------------------------------|
| `pytorch_model_fsdp_0/`, or a directory of DCP   | FSDP2 with SHARDED_STATE_DICT; `dcp.save` by a loop   |
| `model.safetensors`, or several and their index  | `save_pretrained`; one process, DDP, accelerate       |
| `pytorch_model_fsdp.bin`, `.bin`, `.pt`          | FSDP2 with FULL_STATE_DICT; `torch.save`              |

A dictionary that holds others (`{"model": ..., "optimizer": ...}`) is asked for its `"model"`. Nothing is read before
it is asked for: DCP and safetensors read what is wanted, a file of `torch.save` is mapped into memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dmuon_hf.checkpoint_files import READ_ERRORS, Stored, cause_of, model_in, read_alone, read_metadata
from dmuon_hf.core.errors import ConfigurationError

__all__ = ["Entry", "StoredWeights", "open_weights"]


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What the format of safetensors calls the dtypes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Its elements."""
        return torch.Size(self.shape).numel()


class StoredWeights(Protocol):
    """The weights of one model in one checkpoint."""

    @property
    def path(self) -> Path:
        """File or directory, for people."""
        ...

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Every tensor by the name that the model has for it."""
        ...

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """These tensors, on the CPU.

        Raises:
            ConfigurationError: a file is truncated or damaged; the message names it.
        """
        ...


def open_weights(checkpoint: Path) -> StoredWeights:
    """The weights in `checkpoint`, a directory or a file.

    Raises:
        ConfigurationError: there are none in a form known here, or they cannot be read.
    """
    if not checkpoint.exists():
        raise ConfigurationError(f"{checkpoint} does not exist")
    stored = _stored(checkpoint)
    try:
        if stored.sharded:
            return _Distributed(stored)
        if stored.path.name.endswith(".json"):
            return _indexed(stored.path)
        if stored.path.suffix == ".safetensors":
            return _Safetensors(stored.path, {stored.path: None})
        return _Pickled(stored.path)
    except READ_ERRORS as error:
        raise _damaged(stored.path, error) from error


def _stored(checkpoint: Path) -> Stored:
    if checkpoint.is_file():
        if checkpoint.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".json"):
            raise ConfigurationError(f"{checkpoint} is no .safetensors, .bin, .pt or .pth file, and no directory")
        return Stored(checkpoint, sharded=False)
    if (checkpoint / ".metadata").is_file():
        return Stored(checkpoint, sharded=True)
    inner = sorted(path.parent for path in checkpoint.glob("*/.metadata") if not path.parent.name.startswith("optim"))
    if len(inner) == 1 and not any(checkpoint.glob("*.safetensors")):
        return Stored(inner[0], sharded=True)
    return model_in(checkpoint)


def _damaged(path: Path, error: BaseException) -> ConfigurationError:
    if isinstance(error, ConfigurationError):
        return error
    cause = cause_of(error)
    return ConfigurationError(
        f"{path} cannot be read ({type(cause).__name__}: {cause}): it is truncated, damaged or of another kind"
    )


class _Distributed:
    """A directory of PyTorch's distributed checkpoints."""

    def __init__(self, stored: Stored) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        metadata = read_metadata(stored)
        paths = metadata.planner_data or {}
        tensors = {
            key: (tuple(paths.get(key, (key,))), entry)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        section = _section({path[0] for path, _ in tensors.values() if len(path) > 1}, stored.path)
        self.path = stored.path
        self._keys = {
            ".".join(map(str, path[1:] if section else path)): key
            for key, (path, _) in tensors.items()
            if not section or path[0] == section
        }
        sizes = metadata.state_dict_metadata
        self.entries = {
            name: Entry(tuple(sizes[key].size), sizes[key].properties.dtype)  # type: ignore[union-attr]
            for name, key in self._keys.items()
        }

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        found = {name: torch.empty(self.entries[name].shape, dtype=self.entries[name].dtype) for name in names}
        flat: dict[str, Any] = {self._keys[name]: tensor for name, tensor in found.items()}
        try:
            read_alone(flat, self.path)
        except READ_ERRORS as error:
            raise _damaged(self.path, error) from error
        return found


def _section(sections: Collection[Any], path: Path) -> str | None:
    """The key under which a nested state dict has the weights; None for one that is not nested."""
    candidates = [str(name) for name in sections if not str(name).startswith("optim")]
    if not sections or "model" in candidates:
        return "model" if sections else None
    if len(candidates) == 1:
        return candidates[0]
    raise ConfigurationError(
        f"{path} holds {sorted(map(str, sections))} and none of them is called 'model': save the weights under 'model'"
    )


def _indexed(index: Path) -> StoredWeights:
    files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    paths = {index.with_name(file): None for file in files}
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ConfigurationError(f"{index} names {missing[0]}, which is not there")
    if all(path.suffix == ".safetensors" for path in paths):
        return _Safetensors(index, paths)
    return _Pickled(*paths)


class _Safetensors:
    """One file of safetensors or several."""

    def __init__(self, path: Path, files: Mapping[Path, None]) -> None:
        self.path = path
        self._file_of: dict[str, Path] = {}
        self.entries: dict[str, Entry] = {}
        for file in files:
            for name, entry in _entries_of(file).items():
                self._file_of[name] = file
                self.entries[name] = entry

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        from safetensors import safe_open

        found = {}
        for file in {self._file_of[name]: None for name in names}:
            with safe_open(file, framework="pt") as opened:
                found.update({name: opened.get_tensor(name) for name in names if self._file_of[name] == file})
        return found


def _entries_of(file: Path) -> dict[str, Entry]:
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {name: Entry(tuple(part.get_shape()), _DTYPES[part.get_dtype()]) for name, part in parts.items()}
    except READ_ERRORS as error:
        raise _damaged(file, error) from error


class _Pickled:
    """Files of `torch.save`, mapped into memory."""

    def __init__(self, *paths: Path) -> None:
        self.path = paths[0]
        self._tensors: dict[str, Tensor] = {}
        for path in paths:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(loaded, Mapping):
                raise ConfigurationError(f"{path} holds a {type(loaded).__name__}, not a state dict")
            nested = {key for key, value in loaded.items() if isinstance(value, Mapping)}
            section = _section(nested, path)
            named = loaded if section is None else loaded[section]
            self._tensors.update({name: value for name, value in named.items() if isinstance(value, Tensor)})
        self.entries = {name: Entry(tuple(value.shape), value.dtype) for name, value in self._tensors.items()}

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        return {name: self._tensors[name] for name in names}
