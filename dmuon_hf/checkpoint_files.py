"""What a checkpoint directory of the Trainer or of accelerate holds, told by its content, and reading it whole.

| Written by                   | Weights                                       | Optimizer state         |
|------------------------------|-----------------------------------------------|-------------------------|
| one process, Trainer         | `model.safetensors` (or several and an index) | `optimizer.pt`          |
| one process, accelerate      | `model.safetensors` or `pytorch_model.bin`    | `optimizer.bin`         |
| FSDP2 with FULL_STATE_DICT   | `pytorch_model_fsdp.bin`                      | `optimizer.bin`         |
| FSDP2 with SHARDED_STATE_DICT| `pytorch_model_fsdp_0/`                       | `optimizer_0/`          |
| any, of adapters (peft)      | `adapter_model.safetensors`, also in a folder | as above                |

The directories are PyTorch's distributed checkpoints (DCP). A directory that was saved into in several modes holds
several forms; the newest is taken. Nothing here communicates, and files are unpickled with `weights_only`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from dmuon_hf.core.checkpoint.reading import into_fresh_tensors
from dmuon_hf.core.errors import ConfigurationError

__all__ = [
    "READ_ERRORS",
    "Stored",
    "cause_of",
    "model_in",
    "optimizer_in",
    "read_alone",
    "read_metadata",
    "read_param_groups",
    "read_whole",
    "unreadable",
]

READ_ERRORS = (Exception, CheckpointException)
"""Whatever a broken file provokes in the readers of torch, safetensors and json."""

_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Stored:
    """One file or directory of a checkpoint. `sharded`: a directory of DCP, which many processes read in parallel."""

    path: Path
    sharded: bool


def model_in(directory: Path, index: int = 0, adapter: str | None = None) -> Stored:
    """The weights of the `index`-th model of a checkpoint.

    Args:
        adapter: name of the adapter that is trained, None without one. A checkpoint then may hold its weights alone, in
            a folder of that name where it is not peft's `default`.

    Raises:
        ConfigurationError: there are none.
    """
    numbered = f"_{index}" if index else ""
    names = [
        f"pytorch_model_fsdp{numbered}.bin",
        f"model{numbered}.safetensors",
        f"model{numbered}.safetensors.index.json",
        f"pytorch_model{numbered}.bin",
        f"pytorch_model{numbered}.bin.index.json",
    ]
    if adapter is not None:
        names += [f"{folder}adapter_model.{kind}" for folder in (f"{adapter}/", "") for kind in ("safetensors", "bin")]
    found = _newest(directory, f"pytorch_model_fsdp_{index}", names)
    if found is None:
        raise ConfigurationError(
            f"{directory} holds no weights of the model in a form known here; it holds {_listing(directory)}. Resume "
            "from a checkpoint that the Trainer or accelerator.save_state() wrote to its end"
        )
    return found


def optimizer_in(directory: Path, index: int = 0) -> Stored:
    """The state of the `index`-th optimizer of a checkpoint.

    Raises:
        ConfigurationError: there is none.
    """
    numbered = f"_{index}" if index else ""
    found = _newest(directory, f"optimizer_{index}", [f"optimizer{numbered}.bin", f"optimizer{numbered}.pt"])
    if found is None:
        raise ConfigurationError(
            f"{directory} holds no optimizer state, so momentum would start from zero; it holds {_listing(directory)}. "
            "Resume from a checkpoint that was saved without save_only_model, or load these weights with "
            "from_pretrained and start a new run"
        )
    return found


def _newest(directory: Path, sharded: str, names: list[str]) -> Stored | None:
    # A directory of DCP is complete once its metadata, which is written last, is there. Of equally old forms, as after
    # a copy, the first is taken.
    times: dict[Stored, float] = {}
    for folder in (directory / sharded, directory):
        if folder.name == sharded and (folder / _METADATA).is_file():
            times[Stored(folder, sharded=True)] = (folder / _METADATA).stat().st_mtime
    for name in names:
        if (directory / name).is_file():
            times[Stored(directory / name, sharded=False)] = (directory / name).stat().st_mtime
    return max(times, key=lambda stored: times[stored], default=None)


def _listing(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    return ", ".join(names) or "nothing"


def read_metadata(stored: Stored) -> Metadata:
    """The table of contents of a DCP directory.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        return FileSystemReader(stored.path).read_metadata()
    except READ_ERRORS as error:
        raise unreadable(stored.path, error) from error


def read_whole(stored: Stored) -> dict[str, Any]:
    """Everything in it, as plain tensors on the CPU.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        if stored.sharded:
            return _read_sharded(stored)
        if stored.path.suffix == ".json":
            files = set(json.loads(stored.path.read_text(encoding="utf-8"))["weight_map"].values())
            return {key: value for file in sorted(files) for key, value in _load(stored.path.with_name(file)).items()}
        return _load(stored.path)
    except READ_ERRORS as error:
        raise unreadable(stored.path, error) from error


def read_param_groups(stored: Stored) -> list[dict[str, Any]]:
    """The groups of an optimizer in a DCP directory, with names of parameters.

    Raises:
        ConfigurationError: they cannot be read, or it is no state of an optimizer.
    """
    try:
        groups: list[dict[str, Any]] = _read_sharded(stored, "optimizer.param_groups.")["param_groups"]
    except READ_ERRORS as error:
        raise unreadable(stored.path, error) from error
    return groups


def _load(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        loaded: dict[str, Any] = load_file(path)
    else:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it holds a {type(loaded).__name__}, not a state dict")
    return loaded


def _read_sharded(stored: Stored, prefix: str = "") -> dict[str, Any]:
    """A DCP directory, or what lies below `prefix`, read by this process alone; without the outermost level."""
    metadata = read_metadata(stored)
    flat: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(prefix)
    }
    read_alone(flat, stored.path)
    nested: dict[Any, Any] = {}
    for key, value in flat.items():
        *parents, last = metadata.planner_data[key][1:]
        level = nested
        for part in parents:
            level = level.setdefault(part, {})
        level[last] = value
    if "param_groups" in nested:
        nested["param_groups"] = [group for _, group in sorted(nested["param_groups"].items())]
    return nested


def read_alone(flat: dict[str, Any], path: Path) -> None:
    """Fill a flat state dict, whose tensors nobody else uses, from a DCP directory, in this process alone."""
    with into_fresh_tensors(), warnings.catch_warnings():
        # That one process reads, which is what is wanted.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(flat, storage_reader=FileSystemReader(path), no_dist=True)


def cause_of(error: BaseException) -> BaseException:
    """What went wrong: DCP collects it for each rank, with tracebacks."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def unreadable(path: Path, error: BaseException) -> ConfigurationError:
    """The error to raise for a file that its reader fails on."""
    if isinstance(error, ConfigurationError):
        return error
    cause = cause_of(error)
    return ConfigurationError(
        f"{path} cannot be read ({type(cause).__name__}: {cause}), most likely because the run ended while it was "
        "saved. Resume from an earlier checkpoint"
    )
