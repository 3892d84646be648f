"""The code of docs/checkpoints.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import dmuon_hf.core as dmuon
from tests.distributed.checkpoint_models import assert_close, build, train
from tests.harness import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def runs_the_page(rank: int, world: int, directory: str) -> None:
    save_sharded, load_sharded, save_whole, load_whole = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    model, optimizer = build("tied", "fsdp", world, seed=1)
    train("tied", model, optimizer, rank, world, range(2))
    trained = {"model": model, "optimizer": optimizer, "rank": rank}
    trained |= {"directory": f"{directory}/sharded", "file": f"{directory}/whole.pt"}
    expected = dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)
    for save, load in ((save_sharded, load_sharded), (save_whole, load_whole)):
        exec(save, dict(trained))  # noqa: S102
        torch.distributed.barrier()
        other, fresh = build("tied", "fsdp", world, seed=7, lr=0.5)
        names = trained | {"model": other, "optimizer": fresh}
        imports = "\n".join(line for line in save.splitlines() if line.startswith(("import ", "from ")))
        exec(imports + "\n" + load, names)  # noqa: S102
        loaded = dmuon.get_model_state_dict(other), dmuon.get_optimizer_state_dict(other, fresh)
        assert_close(loaded, expected, atol=0.0)


def test_saving_and_loading_as_the_page_says_restores_everything(tmp_path: Path) -> None:
    run_ranks(runs_the_page, 2, str(tmp_path))
