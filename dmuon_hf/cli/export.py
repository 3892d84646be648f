"""`dmuon-hf export`: any checkpoint -> safetensors that `from_pretrained` opens. `import`: the other way, to DCP.

Both stream: `export` holds one file of the result at a time, `import` maps what it reads.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmuon_hf.cli.files import appearing, check_names, itemsize, model_beside, progress, stored_once
from dmuon_hf.cli.stored import Entry, StoredWeights, open_weights
from dmuon_hf.cli.tables import size

__all__ = ["run_export", "run_import"]

_BESIDE = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "chat_template*",
    "*processor_config.json",
    "preprocessor_config.json",
    "generation_config.json",
)
"""Files that belong to a model beside its weights and its configuration."""


def run_export(options: argparse.Namespace) -> int:
    """Write the directory."""
    checkpoint, target = Path(options.checkpoint), Path(options.out)
    weights = open_weights(checkpoint)
    model, source = model_beside(checkpoint, options.model)
    entries = check_names(weights, model)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    with appearing(target) as folder:
        total = _write_shards(weights, entries, model, folder, dtype, options.max_shard_size)
        _write_config(model, entries, dtype, folder)
        copied = _copy_beside(Path(source), checkpoint, folder)
    beside = f", with {', '.join(copied)}" if copied else "; no tokenizer lay beside it"
    sys.stdout.write(f"{len(entries)} tensors, {size(total)}, in {target}{beside}\n")
    sys.stdout.write(f"open it with {type(model).__name__}.from_pretrained({str(target)!r})\n")
    return 0


def _write_shards(
    weights: StoredWeights,
    entries: dict[str, Entry],
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype | None,
    limit: str,
) -> int:
    """Write the tensors, file by file, and the index of several files; returns all bytes."""
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save_file

    once = stored_once(model)
    sizes = {name: itemsize(entry, dtype) for name, entry in entries.items()}
    split: Any = split_state_dict_into_shards_factory(
        entries,
        get_storage_size=lambda entry: itemsize(entry, dtype),
        get_storage_id=lambda _: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    files = split.filename_to_tensors
    bytes_of = {file: sum(sizes[name] for name in names) for file, names in files.items()}
    for file in progress(bytes_of, "export"):
        read = weights.read(files[file])
        tensors = {once[name]: _as_stored(read.pop(name), dtype) for name in files[file]}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {once[name]: file for name, file in sorted(split.tensor_to_filename.items())},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return sum(sizes.values())


def _as_stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    # A view would drag the memory of what it is a view of into the file.
    return tensor.contiguous() if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write_config(model: nn.Module, entries: dict[str, Entry], dtype: torch.dtype | None, folder: Path) -> None:
    config: Any = model.config
    config.architectures = [type(model).__name__]
    floating = {entry.dtype for entry in entries.values() if entry.dtype.is_floating_point}
    config.dtype = dtype or (floating.pop() if len(floating) == 1 else torch.float32)
    config.save_pretrained(folder)


def _copy_beside(source: Path, checkpoint: Path, folder: Path) -> list[str]:
    """Copy tokenizer and processor files from the first of these places that has them."""
    for place in (checkpoint, checkpoint.parent, source):
        if not place.is_dir():
            continue
        found = sorted({path for pattern in _BESIDE for path in place.glob(pattern) if path.is_file()})
        if found:
            for path in found:
                shutil.copyfile(path, folder / path.name)
            return [path.name for path in found]
    return []


def run_import(options: argparse.Namespace) -> int:
    """Write a distributed checkpoint `{"model": ...}` with every name of the model, tied ones as well."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    source, target = Path(options.source), Path(options.out)
    weights = open_weights(source)
    model, _ = model_beside(source, options.model)
    entries = check_names(weights, model)
    read = weights.read(list(entries))
    once = stored_once(model)
    held = {once[name]: tensor for name, tensor in read.items()}
    state = {name: held[stored] for name, stored in once.items()}
    with appearing(target) as folder, warnings.catch_warnings():
        # That one process writes, which is what is wanted.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        for _ in progress({"all": sum(tensor.nbytes for tensor in read.values())}, "import"):
            save({"model": state}, storage_writer=FileSystemWriter(folder), no_dist=True)
        model.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
    sys.stdout.write(f"{len(state)} tensors in {target}: load it with dcp.load into {{'model': ...}}\n")
    return 0
