"""What `export` and `import` share: the model that the weights belong to, and directories that appear whole or not."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from dmuon_hf.cli.skeleton import skeleton
from dmuon_hf.cli.stored import Entry, StoredWeights
from dmuon_hf.core.errors import ConfigurationError

__all__ = ["appearing", "check_names", "itemsize", "model_beside", "progress", "stored_once"]


def model_beside(checkpoint: Path, named: str | None) -> tuple[nn.Module, str]:
    """The model, on meta, and where its configuration came from: `--model`, the checkpoint or the folder around it.

    Raises:
        ConfigurationError: there is no configuration.
    """
    if named is not None:
        return skeleton(named), named
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    for place in (folder, folder.parent, folder.parent.parent):
        if (place / "config.json").is_file():
            return skeleton(str(place)), str(place)
    raise ConfigurationError(
        f"no config.json lies in or above {checkpoint}, so nothing says which model these weights belong to: pass "
        "--model with a hub name, a directory or a config file"
    )


def stored_once(model: nn.Module) -> dict[str, str]:
    """Every name in the state dict of a model -> the name under which its tensor is stored; others are tied to it."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in model.state_dict(keep_vars=True).items()}


def check_names(weights: StoredWeights, model: nn.Module) -> dict[str, Entry]:
    """The tensors to bring over, by the names under which they are stored once.

    Raises:
        ConfigurationError: weights are missing, unknown to the model, or of another shape.
    """
    once = stored_once(model)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    unknown = sorted(set(weights.entries) - set(once))
    held = {once[name]: name for name in sorted(weights.entries, reverse=True) if name in once}
    missing = sorted(set(once.values()) - set(held))
    wrong = sorted(name for name in held.values() if weights.entries[name].shape != shapes[name])
    for names, what in ((missing, "lacks"), (unknown, "holds, unknown to the model,"), (wrong, "has another shape of")):
        if names:
            raise ConfigurationError(
                f"{weights.path} is no checkpoint of {type(model).__name__}: it {what} {len(names)} tensors, first "
                f"{names[0]!r}. --model says which model it is of"
            )
    return {held[stored]: weights.entries[held[stored]] for stored in once.values() if stored in held}


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A directory to write into, which becomes `target` when the block ends well and is gone when it does not.

    Raises:
        ConfigurationError: `target` is there already and is not an empty directory.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"{target} is there already; name a directory that is not, or empty it")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield partial
        partial.chmod(0o755)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def progress(parts: Mapping[str, int], title: str) -> Iterator[str]:
    """The keys of `parts` one by one, with a bar on stderr that advances by the bytes of each."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=sum(parts.values()))
        for part, size in parts.items():
            yield part
            bar.advance(task, size)


def itemsize(entry: Entry, dtype: torch.dtype | None) -> int:
    """Bytes of a tensor when it is stored in `dtype`; integers and booleans keep theirs."""
    kept = dtype is None or not entry.dtype.is_floating_point
    return entry.numel * (entry.dtype if kept or dtype is None else dtype).itemsize
