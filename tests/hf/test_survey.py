"""One survey decides what a block is, for routes, checks, dedication and wrapping alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

import dmuon_hf
from dmuon_hf import small_rests
from dmuon_hf.survey import survey
from tests.harness import run_ranks
from tests.hf.support import as_launched, finish, fsdp_env, tiny_llama


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Layer(), _Layer()])
        self.downsample = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.downsample(x)


class _Mixture(nn.Module):
    """Attention-like layers beside a list of like experts: one block, not a row of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))
        self.ffn = nn.ModuleList([_Layer(), _Layer(), _Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn[0](self.o(self.v(self.k(self.q(x)))))


class _Halves(nn.Module):
    """One block whose parts are held by a list: attention, then feed-forward, of unlike classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([_Layer(), _Mixture()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer[1](self.layer[0](x))


def _model(container: nn.Module) -> nn.Module:
    model = nn.Module()
    model.rows = container
    return model


@pytest.mark.parametrize(
    ("container", "blocks"),
    [
        (lambda: nn.ModuleList([_Layer(), _Layer()]), ["rows.0", "rows.1"]),
        (lambda: nn.Sequential(_Layer(), _Layer()), ["rows.0", "rows.1"]),
        (lambda: nn.ModuleDict({"a": _Layer(), "b": _Layer()}), ["rows.a", "rows.b"]),
        (lambda: nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU())]), ["rows.0"]),
        (lambda: nn.ModuleList([_Stage()]), ["rows.0.blocks.0", "rows.0.blocks.1"]),
        (lambda: nn.ModuleList([nn.ModuleList([_Layer(), _Layer()])]), ["rows.0.0", "rows.0.1"]),
        (lambda: nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 8)})]), ["rows.0.up"]),
        (lambda: nn.ModuleList([_Mixture()]), ["rows.0"]),
        (lambda: nn.ModuleList([_Halves()]), ["rows.0"]),
        (lambda: nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4)]), []),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), []),
        (lambda: nn.ModuleList([nn.Conv2d(3, 3, 1)]), []),
    ],
    ids=[
        "list", "sequential", "dict", "sequential items", "stages", "list of lists", "list of dicts", "experts",
        "halves", "plain layers", "mlp", "convolutions",
    ],
)  # fmt: skip
def test_blocks_are_the_called_items_of_repeated_containers(container: Any, blocks: list[str]) -> None:
    assert list(survey(_model(container())).boundaries.blocks) == blocks


def test_every_block_is_called_and_none_is_inside_another() -> None:
    model = tf.FunnelForMaskedLM(tf.FunnelConfig(block_sizes=[1, 1], d_model=32, n_head=2, d_head=16, d_inner=48))
    blocks = survey(model).boundaries.blocks
    assert {type(block).__name__ for block in blocks.values()} == {"FunnelLayer"}


def test_classes_that_the_user_names_decide_for_routes_and_stay_decided() -> None:
    model = tiny_llama()
    found = survey(model, ["LlamaMLP"])
    table = dmuon_hf.routes(model, found=found)
    muon = {name for name, route in table.items() if route.route == "muon"}
    assert muon and all(".mlp." in name for name in muon)
    assert table["model.layers.0.self_attn.q_proj.weight"].reason == "outside the transformer blocks"
    assert dmuon_hf.routes(model) == table


def _prepared(rank: int, world: int, which: str) -> dict[str, Any]:
    as_launched()
    torch.manual_seed(0)
    model: nn.Module
    if which == "roberta":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = tf.RobertaPreLayerNormForSequenceClassification(tf.RobertaPreLayerNormConfig(**sizes, vocab_size=64))
    else:
        model = tiny_llama()
    blocks = list(survey(model).boundaries.blocks)
    accelerator = Accelerator()
    named = accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap
    optimizer = dmuon_hf.create_optimizer(model, lr=1e-3)
    small_rests.SMALL_REST = -1
    model, _ = accelerator.prepare(model, optimizer)
    # Beside these, accelerate wraps embeddings and head.
    wrapped = [name for name, module in model.named_modules() if ".layer" in name and isinstance(module, FSDPModule)]
    muon = [name for name, route in dmuon_hf.routes(model).items() if route.route == "muon"]
    finish()
    return {
        "blocks": blocks,
        "wrapped": wrapped,
        "muon": muon,
        "kept": accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap == named,
    }


def test_accelerate_wraps_the_blocks_that_were_found_where_the_model_lists_none() -> None:
    for result in run_ranks(_prepared, 2, "roberta", init=False, env=fsdp_env(2)):
        assert result["wrapped"] == result["blocks"]
        assert len(result["blocks"]) == 2 and result["kept"]
        assert len(result["muon"]) == 2 * 6


def test_accelerate_wraps_what_the_user_names_and_muon_takes_what_is_inside() -> None:
    env = fsdp_env(2, FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaMLP")
    for result in run_ranks(_prepared, 2, "llama", init=False, env=env):
        assert result["wrapped"] == [f"model.layers.{layer}.mlp" for layer in range(2)]
        assert result["muon"] and all(".mlp." in name for name in result["muon"])
