"""The scripts printed in the documentation run as they are."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import dmuon_hf.core as dmuon
from tests.harness import run_ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"


def scripts(page: str) -> dict[str, str]:
    """Code blocks of a page that begin with a ``# file: name`` line, by name."""
    blocks = re.findall(r"```python\n# file: (\S+)\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return dict(blocks)


def run_script(rank: int, world: int, folder: str, script: str) -> list[float]:
    sys.path.insert(0, folder)
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile((Path(folder) / script).read_text(), script, "exec"), namespace)  # noqa: S102
    return []


@pytest.mark.parametrize(
    ("script", "world"), [("train_fsdp2.py", 2), ("train_hsdp.py", 4), ("train_ddp.py", 2), ("train_sharded.py", 4)]
)
def test_quick_start_scripts_run(script: str, world: int, tmp_path: Path) -> None:
    found = scripts("quick_start.md")
    assert set(found) == {"model.py", "train_fsdp2.py", "train_hsdp.py", "train_ddp.py", "train_sharded.py"}
    for name, text in found.items():
        (tmp_path / name).write_text(text)
    run_ranks(run_script, world, str(tmp_path), script, init=False)


def run_pipeline(rank: int, world: int, directory: str) -> bool:
    script, keep_scales_alike, save = re.findall(r"```python\n(.*?)```", (DOCS / "pipeline.md").read_text(), re.DOTALL)
    namespace: dict[str, Any] = {"directory": directory, "scaler": torch.amp.GradScaler("cpu", init_scale=4.0)}
    exec(script, namespace)  # noqa: S102
    namespace["scaler"].scale(torch.ones(()))
    for param in namespace["stage"].parameters():
        param.grad = torch.full_like(param, float("inf") if rank == 0 else 1.0)
    exec(keep_scales_alike, namespace)  # noqa: S102
    exec(save, namespace)  # noqa: S102
    torch.distributed.checkpoint.load(namespace["state"], checkpoint_id=directory)
    return bool(namespace["scaler"].get_scale() == 2.0)


def test_pipeline_of_the_docs_trains_skips_together_and_saves(tmp_path: Path) -> None:
    assert run_ranks(run_pipeline, 4, str(tmp_path), init=False) == [True] * 4


def run_policy(rank: int, world: int, block: str) -> list[str]:
    from tests.house.test_reference_code import MyModel

    mesh = init_device_mesh("cpu", (world,))
    namespace: dict[str, Any] = {"dmuon": dmuon, "torch": torch, "model": MyModel(), "mesh": mesh}
    exec(compile(block, "policies.md", "exec"), namespace)  # noqa: S102
    loss = namespace["model"](torch.zeros(2, 3, dtype=torch.long)).loss
    loss.backward()
    namespace["optimizer"].step()
    return sorted({param.route for param in dmuon.get_dedicated_params(namespace["model"])})


@pytest.mark.parametrize(("index", "routes"), [(0, ["adamw", "muon"]), (1, ["adamw", "muon", "sharded_adamw"])])
def test_policies_of_the_docs_train_a_model_whose_every_parameter_is_managed(index: int, routes: list[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "policies.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    assert run_ranks(run_policy, 2, blocks[index]) == [routes] * 2
