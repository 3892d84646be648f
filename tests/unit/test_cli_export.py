"""`dmuon-hf export` and `import`: any checkpoint becomes safetensors that reopen bit by bit, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from dmuon_hf.cli import main
from dmuon_hf.cli.stored import open_weights

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
State = dict[str, Tensor]


def llama(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied))


def _dcp(state: Any, folder: Path) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def _pickled(state: Any, path: Path) -> Path:
    torch.save(state, path)
    return path


WRITTEN: dict[str, Callable[[State, Path], Path]] = {
    "sharded by accelerate": lambda state, at: _dcp({"model": state}, at / "pytorch_model_fsdp_0").parent,
    "its inner directory": lambda state, at: _dcp({"model": state}, at / "pytorch_model_fsdp_0"),
    "dcp of a loop": lambda state, at: _dcp({"model": state, "optimizer": {"step": torch.zeros(1)}}, at / "step-3"),
    "flat dcp": lambda state, at: _dcp(state, at / "step-3"),
    "full by accelerate": lambda state, at: _pickled(state, at / "pytorch_model_fsdp.bin").parent,
    "torch.save of a loop": lambda state, at: _pickled({"model": state, "optimizer": {}}, at / "step-3.pt"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("form", list(WRITTEN))
def test_export_reopens_with_the_same_weights(tmp_path: Path, form: str, tied: bool) -> None:
    model = llama(tied)
    model.config.save_pretrained(tmp_path)
    checkpoint = WRITTEN[form](model.state_dict(), tmp_path)
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    reopened, report = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    for name, value in model.state_dict().items():
        assert torch.equal(reopened.state_dict()[name], value)


def test_export_writes_files_of_the_asked_size_and_reads_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    checkpoint = WRITTEN["dcp of a loop"](model.state_dict(), tmp_path)
    kind = type(open_weights(checkpoint))
    read, sizes = kind.read, []

    def measured(self: Any, names: Any) -> State:
        found: State = read(self, names)
        sizes.append(sum(tensor.nbytes for tensor in found.values()))
        return found

    monkeypatch.setattr(kind, "read", measured)
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--max-shard-size", "4KB"]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) == len(sizes) > 2
    assert max(sizes) <= 4000
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(sizes)
    reopened = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(reopened.state_dict()[name], value) for name, value in model.state_dict().items())


def test_export_casts_floating_point_weights_and_says_so_in_the_config(tmp_path: Path) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    checkpoint = WRITTEN["full by accelerate"](model.state_dict(), tmp_path)
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    reopened = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert reopened.dtype is torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(reopened.state_dict()[name], value.bfloat16())


def test_tokenizer_and_generation_config_come_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (tmp_path / name).write_text(name)
    checkpoint = WRITTEN["sharded by accelerate"](model.state_dict(), tmp_path / "checkpoint-3")
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert "tokenizer.json" in capsys.readouterr().out


@pytest.mark.parametrize("shards", ["1GB", "4KB"])
def test_import_and_export_are_inverse_to_the_bit(tmp_path: Path, shards: str) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "hub", max_shard_size=shards)
    assert main(["import", str(tmp_path / "hub"), str(tmp_path / "dcp")]) == 0
    assert main(["export", str(tmp_path / "dcp"), str(tmp_path / "out"), "--max-shard-size", shards]) == 0
    before, after = (
        {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
        for folder in (tmp_path / "hub", tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_imported_checkpoint_loads_with_every_name_of_the_model(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "hub")
    assert main(["import", str(tmp_path / "hub"), str(tmp_path / "dcp")]) == 0
    other = llama()
    state = {"model": {name: torch.zeros_like(value) for name, value in other.state_dict().items()}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(state["model"][name], value) for name, value in model.state_dict().items())


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _truncated_data(folder: Path) -> Path:
    _truncate(max((folder / "step-3").glob("*.distcp"), key=lambda path: path.stat().st_size))
    return folder / "step-3"


def _foreign(folder: Path) -> Path:
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16))
    return _pickled(gpt2.state_dict(), folder / "gpt2.bin")


def _misshapen(folder: Path) -> Path:
    state = llama().state_dict()
    state["model.norm.weight"] = torch.ones(3)
    return _pickled(state, folder / "odd.bin")


def _cut_short(folder: Path) -> Path:
    save_file({"model.norm.weight": torch.ones(16)}, folder / "model.safetensors")
    _truncate(folder / "model.safetensors")
    return folder / "model.safetensors"


def _no_weights(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncated_data, "step-3"),
        (_cut_short, "model.safetensors cannot be read"),
        (_foreign, "gpt2.bin is no checkpoint of LlamaForCausalLM"),
        (_misshapen, "another shape of 1 tensors, first 'model.norm.weight'"),
        (_no_weights, "holds no weights"),
        (lambda folder: folder / "nowhere", "does not exist"),
    ],
)
def test_file_that_cannot_be_exported_is_named_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], Path], message: str
) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    WRITTEN["dcp of a loop"](model.state_dict(), tmp_path)
    checkpoint = damage(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_directory_that_is_there_is_not_written_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "hub")
    assert main(["export", str(tmp_path / "hub"), str(tmp_path / "hub")]) == 2
    assert "is there already" in capsys.readouterr().err


def test_checkpoint_without_a_configuration_asks_for_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama()
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    checkpoint = _pickled(model.state_dict(), tmp_path / "a" / "b" / "c" / "weights.bin")
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "pass --model" in capsys.readouterr().err
    model.config.save_pretrained(tmp_path / "config")
    arguments = ["export", str(checkpoint), str(tmp_path / "out"), "--model", str(tmp_path / "config")]
    assert main(arguments) == 0
