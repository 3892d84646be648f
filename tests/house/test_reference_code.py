"""The code blocks of the reference run as printed, with import, device and backend changed, and smaller numbers."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.harness import run_ranks

PAGE = Path(__file__).parent / "data" / "reference-code.txt"

# Blocks that no text puts into a whole program.
ALONE = ["type-split routing", "tensor parallelism"]

CHANGES = [
    (r"import dmuon\b", "import dmuon_hf.core as dmuon"),
    (r'"cuda"', '"cpu"'),
    (r'"nccl"', '"gloo"'),
    (r"\.cuda\(\)", ""),
    (r"\n *torch\.cuda\.set_device\(.*\)", ""),
    (r"torch\.cuda\.device_count\(\)", "dist.get_world_size()"),
    (r"\b512\b", "32"),
    (r"\b2048\b", "64"),
]


def blocks() -> dict[str, str]:
    """The blocks by name, changed."""
    parts = re.split(r"^=== (.*)\n", PAGE.read_text(), flags=re.MULTILINE)[1:]
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    for pattern, replacement in CHANGES:
        found = {name: re.sub(pattern, replacement, text) for name, text in found.items()}
    found["model.py"] = with_a_forward(found["model.py"])
    return found


def with_a_forward(text: str) -> str:
    """torch refuses `fully_shard` on a module without a forward, as the quick start's bare `ModuleDict` is."""
    body = re.search(r"        for layer in self.layers:\n(?P<body>(?: {12}.*\n)+)", text)
    assert body is not None
    own = body["body"].replace('layer["', 'self["').replace(" " * 12, " " * 8)
    layer = f"class Layer(nn.ModuleDict):\n    def forward(self, x):\n{own}        return x\n\n\n"
    text = text.replace(body["body"], " " * 12 + "x = layer(x)\n").replace("nn.ModuleDict({", "Layer({")
    return text.replace("class TinyMLP", layer + "class TinyMLP")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q_proj = nn.Linear(width, width)
        self.action_transformer = nn.ModuleDict({"down_proj": nn.Linear(width, width, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.action_transformer["down_proj"](torch.tanh(self.q_proj(self.norm(x))))


class MyModel(nn.Module):
    """What the training guide calls `MyModel`: layers, an embedding, a head, and a loss in its output."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed_tokens = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.lm_head = nn.Linear(width, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), tokens.flatten()))


def names(rank: int, world: int) -> dict[str, Any]:
    """What the texts leave to the reader."""
    generator = torch.Generator().manual_seed(rank)
    dataloader = [torch.randint(0, 11, (2, 3), generator=generator) for _ in range(2)]
    return {
        "MyModel": MyModel,
        "nn": nn,
        "dataloader": dataloader,
        "accum_steps": 2,
        "nullcontext": nullcontext,
        "world_size": world,
        "replicate_size": 2,
        "shard_size": world // 2,
    }


def run(chosen: list[str], namespace: dict[str, Any]) -> dict[str, Any]:
    code = blocks()
    for name in chosen:
        exec(compile(code[name], name, "exec"), namespace)  # noqa: S102
    return namespace


FSDP2 = [
    "fast path", "model preparation", "logging", "dedicate", "owned", "fully_shard", "optimizer", "training loop",
    "clipping", "backend", "counts", "summary", "no_sync", "kernels", "coefficients", "param groups", "training loop",
]  # fmt: skip
PREDICATES = ["predicate", "predicate of a transformer", "predicate without embeddings"]
SCRIPTS = ["train_fsdp2.py", "train_hsdp.py"]


def follow_the_guide(rank: int, world: int) -> dict[str, Any]:
    namespace = names(rank, world)
    for name in FSDP2:
        run([name], namespace)
        if name == "optimizer":
            namespace["adamw_params"] = namespace["optimizer"].param_groups[1]["params"]
    groups = [group["group_name"] for group in namespace["optimizer"].param_groups]
    return {"loss": float(namespace["loss"]), "groups": groups, "skipped": namespace["optimizer"].skipped_steps}


def test_training_guide_runs_from_its_first_block_to_its_last() -> None:
    for result in run_ranks(follow_the_guide, 2, init=False):
        assert torch.tensor(result["loss"]).isfinite()
        assert result["groups"] == ["base/muon", "base/adamw", "action/muon"]
        assert result["skipped"] == 0


def follow_the_guide_on_hsdp(rank: int, world: int) -> float:
    chosen = ["model preparation", "fast path", "hsdp", "optimizer", "training loop"]
    namespace = names(rank, world)
    run(chosen[:2], namespace)
    namespace["fully_shard"] = fully_shard
    return float(run(chosen[2:], namespace)["loss"])


def test_training_guide_runs_on_an_hsdp_mesh() -> None:
    assert all(torch.tensor(loss).isfinite() for loss in run_ranks(follow_the_guide_on_hsdp, 4, init=False))


def follow_the_guide_on_ddp(rank: int, world: int) -> float:
    return float(run(["model preparation", "fast path", "ddp", "training loop"], names(rank, world))["loss"])


def test_training_guide_runs_with_whole_weights_on_every_rank() -> None:
    assert all(torch.tensor(loss).isfinite() for loss in run_ranks(follow_the_guide_on_ddp, 2, init=False))


@pytest.mark.parametrize("name", [*PREDICATES, "predicate without small matrices"])
def test_predicates_of_the_training_guide_choose_what_they_say(name: str) -> None:
    predicate = run([name], {"nn": nn})["predicate"]
    answers = {n: bool(predicate(n, p)) for n, p in MyModel().named_parameters()}
    chosen = {n for n, answer in answers.items() if answer}
    matrices = {f"layers.{i}.{n}.weight" for i in range(2) for n in ("q_proj", "action_transformer.down_proj")}
    expected = {"predicate": set(answers), "predicate without small matrices": set()}
    assert chosen == expected.get(name, matrices)


def run_script(rank: int, world: int, name: str) -> None:
    code = blocks()
    model: dict[str, Any] = {}
    exec(compile(code["model.py"], "model.py", "exec"), model)  # noqa: S102
    text = code[name].replace("from model import TinyMLP", "")
    exec(compile(text, name, "exec"), {"__name__": "__main__", "TinyMLP": model["TinyMLP"]})  # noqa: S102


@pytest.mark.parametrize(("name", "world"), [("train_fsdp2.py", 2), ("train_hsdp.py", 4)])
def test_quick_start_scripts_of_the_reference_run(name: str, world: int) -> None:
    run_ranks(run_script, world, name, init=False)


def follow_ddp(rank: int, world: int) -> list[float]:
    namespace = run(["model preparation", "fast path", "ddp", "training loop"], names(rank, world))
    namespace["dmuon"].wait_all_post_step_broadcasts(namespace["model"])
    return [float(weight.sum()) for weight in namespace["model"].parameters()]


def test_block_of_replicated_data_parallelism_keeps_the_ranks_alike() -> None:
    first, second = run_ranks(follow_ddp, 2, init=False)
    assert first == second


def test_every_block_of_the_reference_is_run() -> None:
    tested = {*FSDP2, "hsdp", "ddp", *PREDICATES, "predicate without small matrices", "model.py", *SCRIPTS}
    assert blocks().keys() == tested.union(ALONE)


def run_alone(rank: int, world: int, name: str) -> int:
    columns = {f"layers.{i}.q_proj": ColwiseParallel() for i in range(2)}
    namespace = names(rank, world) | {"R": 1, "G": 1, "T": world, "plan": columns}
    namespace |= {"fully_shard": fully_shard, "parallelize_module": parallelize_module}
    run(["model preparation", "fast path"], namespace)
    for layer in namespace["model"].layers:
        layer.q_proj.register_parameter("bias", None)  # its name says "muon" to the policy, and it is no matrix
    run([name], namespace)
    return len(namespace["dmuon"].get_dedicated_params(namespace["model"]))


@pytest.mark.parametrize("name", ALONE)
def test_block_of_a_further_mode_dedicates_a_model(name: str) -> None:
    assert all(count > 0 for count in run_ranks(run_alone, 2, name, init=False))
