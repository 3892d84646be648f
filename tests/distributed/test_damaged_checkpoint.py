"""Distributed checkpoints that are cut off, altered or of something else: one error on every rank, nothing changed."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict

import dmuon_hf.core as dmuon
from tests.distributed.checkpoint_modes import build, train
from tests.harness import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

UP = "layers.0.up.weight"
MOMENTUM = f"optimizer.state.{UP}.momentum_buffer"
Damage = Callable[[Path], None]


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.distcp"))


def holding(directory: Path, key: str) -> tuple[Path, int, int]:
    """The file that the first part of a key is in, and where."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
    return directory / info.relative_path, info.offset, info.length


def cut_off(directory: Path) -> None:
    for file in data_files(directory):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])


def removed(directory: Path) -> None:
    holding(directory, MOMENTUM)[0].unlink()


def scribbled(directory: Path) -> None:
    file, offset, length = holding(directory, MOMENTUM)
    content = bytearray(file.read_bytes())
    content[offset : offset + length] = bytes(length)
    file.write_bytes(bytes(content))


def without_contents(directory: Path) -> None:
    (directory / ".metadata").write_bytes(b"not a pickle")


def with_metadata(change: Callable[[Any], None]) -> Damage:
    def damage(directory: Path) -> None:
        path = directory / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return damage


def shifted(metadata: Any) -> None:
    """As torch's planner writes parts with gaps: as one box from their first index."""
    entry: TensorStorageMetadata = metadata.state_dict_metadata[MOMENTUM]
    entry.chunks[0].offsets, entry.chunks[0].sizes = torch.Size((0, 0)), torch.Size((8, 12))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "cut off": (cut_off, r"cut off cannot be read, nothing was loaded: \S+ in __\d_0.distcp"),
    "removed": (removed, r"removed cannot be read, nothing was loaded: \S+ in __\d_0.distcp: FileNotFoundError"),
    "scribbled": (scribbled, rf"scribbled cannot be read, nothing was loaded: {MOMENTUM} in __\d_0.distcp"),
    "without contents": (without_contents, "without contents cannot be read, nothing was loaded"),
    "overlapping": (with_metadata(shifted), f"{MOMENTUM} is in parts that overlap or leave gaps"),
}


def rewrite(change: Callable[[dict[str, Any]], None]) -> Damage:
    """Read the checkpoint in one process, change the state dict, save it again."""

    def damage(directory: Path) -> None:
        model, optimizer = build("one_owned", 1, seed=1)
        weights, state = get_state_dict(model, optimizer)
        change(found := {"model": weights, "optimizer": state})
        shutil.rmtree(directory)
        dcp.save(found, checkpoint_id=directory, no_dist=True)

    return damage


def plain_adamw(found: dict[str, Any]) -> None:
    for entry in found["optimizer"]["state"].values():
        if (momentum := entry.pop("momentum_buffer", None)) is not None:
            entry |= {"step": torch.tensor(1.0), "exp_avg": momentum, "exp_avg_sq": momentum.clone()}


REWRITES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a wrong shape": (
        lambda f: f["model"].update({UP: torch.zeros(12, 9)}),
        rf"model.{UP} has shape \(12, 9\), but \(9, 12\)",
    ),
    "a missing weight": (lambda f: f["model"].pop("layers.1.norm.bias"), "model.layers.1.norm.bias is missing"),
    "a missing momentum": (lambda f: f["optimizer"]["state"][UP].pop("momentum_buffer"), f"{MOMENTUM} is missing"),
    "state of more": (
        lambda f: f["optimizer"]["state"].update(ghost={"momentum_buffer": torch.zeros(2, 2)}),
        "optimizer.state.ghost.momentum_buffer is unexpected",
    ),
    "integers": (
        lambda f: f["model"].update({UP: torch.zeros(9, 12, dtype=torch.int8)}),
        f"model.{UP} has dtype torch.int8, which does not load into torch.float32",
    ),
    "no tensor": (lambda f: f["model"].update({UP: "weights"}), f"model.{UP} is no tensor there"),
    "AdamW": (plain_adamw, rf"{MOMENTUM} is missing \(it was saved with AdamW"),
}
CASES: dict[str, tuple[Damage, str]] = {
    **DAMAGES,
    **{name: (rewrite(c), words) for name, (c, words) in REWRITES.items()},
}


def everything(model: nn.Module, optimizer: dmuon.Muon) -> list[torch.Tensor]:
    values = [*model.state_dict().values(), *(v for entry in optimizer.state.values() for v in entry.values())]
    return [(v.to_local() if hasattr(v, "to_local") else v).detach().clone() for v in values]


def load_damaged(rank: int, world: int, mode: str, root: str) -> None:
    model, optimizer = build(mode, world, seed=7)
    train(mode, model, optimizer, rank, world, range(1))
    before = everything(model, optimizer)
    for name, (_, words) in CASES.items():
        weights, state = get_state_dict(model, optimizer)
        with pytest.raises(dmuon.ConfigurationError, match=words):
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=Path(root) / name)
        if world > 1:
            dist.barrier()
        assert all(map(torch.equal, before, everything(model, optimizer))), name


def save_good(rank: int, world: int, mode: str, root: str) -> None:
    model, optimizer = build(mode, world, seed=1)
    train(mode, model, optimizer, rank, world, range(1))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=Path(root) / "good")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damaged")
    run_ranks(save_good, 2, "sharded", str(root))
    for name, (damage, _) in CASES.items():
        shutil.copytree(root / "good", root / name)
        damage(root / name)
    return root


@pytest.mark.parametrize(("mode", "world"), [("z3", 2), ("sharded", 2), ("ddp", 2), ("one_plain", 1)])
def test_damaged_or_foreign_checkpoint_is_one_error_and_changes_nothing(mode: str, world: int, damaged: Path) -> None:
    run_ranks(load_damaged, world, mode, str(damaged), init=world > 1)
