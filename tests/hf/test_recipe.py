"""The recipe and the accelerate configs, as a user runs them."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.harness import run_ranks
from tests.hf.support import fsdp_env

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
CHECK_MODE = """
import os
import dmuon_hf
from accelerate import Accelerator

accelerator = Accelerator()
line = (f"rank {accelerator.process_index} fsdp2 {accelerator.is_fsdp2} {accelerator.distributed_type.value} "
        f"{accelerator.device.type} {accelerator.torch_device_mesh.shape}")
# One write, so that the lines of two ranks cannot run into each other.
os.write(1, (line + chr(10)).encode())
accelerator.end_training()
"""


def _run(*command: str, cwd: Path) -> tuple[str, str]:
    """What a command that must succeed wrote on stdout and on stderr, in the environment of a plain shell."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout, done.stderr


def _launch(config: str, script: Path, *arguments: str, cwd: Path) -> tuple[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    file = str(ROOT / "accelerate_configs" / config)
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, "--main_process_port", port)
    return _run(*launcher, str(script), *arguments, cwd=cwd)


def test_launched_recipe_trains_saves_and_reopens(tmp_path: Path) -> None:
    recipe = RECIPES / "finetune_causal_lm.py"
    flags = ("--model", "tiny", "--max_steps", "8", "--block_size", "64", "--learning_rate", "2e-3")
    output, errors = _launch("dmuon_cpu_hsdp.yaml", recipe, *flags, "--output_dir", "out", cwd=tmp_path)

    assert "owners on 2 shards x 2 replicas" in output
    assert re.search(r"model\.layers\.\*\.mlp\.up_proj\.weight +96x64 +muon +decay/muon", output)
    found = re.search(r"held-out loss: ([\d.]+) at step 0, ([\d.]+) at step 8", output)
    assert found is not None, output[-2000:]
    assert float(found[2]) < float(found[1]) - 0.05
    assert "largest difference of a logit 0.00e+00 (equal)" in output
    assert "generated:" in output
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert re.search(r"^step 3 of 8: loss [\d.]+, gradient norm ", output, re.MULTILINE)
    # No bars and no warnings: one line of one rank.
    assert re.fullmatch(r"Muon: 14 matrices, .*; 4 owners, .*\n", errors), errors


def test_cpu_launch_with_the_import_is_fsdp2(tmp_path: Path) -> None:
    script = tmp_path / "mode.py"
    script.write_text(CHECK_MODE)
    output, _ = _launch("dmuon_cpu_fsdp2.yaml", script, cwd=tmp_path)
    assert sorted(output.splitlines()) == [f"rank {rank} fsdp2 True FSDP cpu (2,)" for rank in range(2)]


def _recipe_output(rank: int, world: int, flags: tuple[str, ...]) -> str:
    """What the recipe prints until it leaves by SystemExit."""
    sys.argv = ["finetune_causal_lm.py", *flags]
    sys.path.insert(0, str(RECIPES))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_path(str(RECIPES / "finetune_causal_lm.py"), run_name="__main__")
    return printed.getvalue()


def test_recipe_help_lists_every_group_of_flags() -> None:
    output = run_ranks(_recipe_output, 1, ("--help",), init=False)[0]
    assert re.match(r"usage: \S+ \[flags\]\n", output)
    assert output.index("--model ") < output.index("--output_dir ")
    for flag in ("--model", "--dataset", "--ns_steps", "--learning_rate", "--gradient_accumulation_steps"):
        assert flag in output


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The recipe's modules for data and for models."""
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("recipe_data"), importlib.import_module("recipe_models")


def test_byte_tokenizer_of_the_tiny_model_gives_text_back(tools: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tools[1].load_model("tiny", tmp_path, torch.float32)
    text = "def f(x):\n    return 'Grüße'\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.eos_token_id < model.config.vocab_size


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_blocks_of_local_files_are_full_and_held_out_apart(tools: tuple[Any, Any], tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"data.{suffix}"
    lines = [f"line {number} of a text to train on" for number in range(4000)]
    file.write_text("\n".join(json.dumps({"text": line}) if suffix == "jsonl" else line for line in lines))
    tokenizer = tools[1].load_model("tiny", tmp_path, torch.float32)[1]
    blocks = tools[0].load_blocks(str(file), tokenizer, block_size=64, max_train=100, max_held_out=10)
    assert (len(blocks.train), len(blocks.held_out)) == (100, 10)
    assert all(len(row["input_ids"]) == 64 and row["labels"] == row["input_ids"] for row in blocks.train)
    seen = {tuple(row["input_ids"]) for row in blocks.train}
    assert not any(tuple(row["input_ids"]) in seen for row in blocks.held_out)


def test_too_little_text_says_so(tools: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("hello")
    tokenizer = tools[1].load_model("tiny", tmp_path, torch.float32)[1]
    with pytest.raises(SystemExit, match="too little text"):
        tools[0].load_blocks(str(tmp_path / "short.txt"), tokenizer, block_size=64, max_train=1, max_held_out=1)


def test_missing_text_column_lists_the_columns(tools: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"body": "hello"}))
    tokenizer = tools[1].load_model("tiny", tmp_path, torch.float32)[1]
    with pytest.raises(SystemExit, match=r"--text_column.*body"):
        tools[0].load_blocks(str(tmp_path / "data.jsonl"), tokenizer, block_size=4, max_train=1, max_held_out=1)


def test_messages_go_through_the_chat_template(tools: tuple[Any, Any], tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"number {i}?"}]} for i in range(200)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = tools[1].load_model("tiny", tmp_path, torch.float32)[1]
    load = {"block_size": 64, "max_train": 4, "max_held_out": 1}
    with pytest.raises(SystemExit, match="no chat template"):
        tools[0].load_blocks(str(tmp_path / "chat.jsonl"), tokenizer, **load)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    blocks = tools[0].load_blocks(str(tmp_path / "chat.jsonl"), tokenizer, **load)
    assert tokenizer.decode(blocks.train[0]["input_ids"]).startswith("<user>number 1?<|endoftext|><user>number 2?")


def _ended_recipe(rank: int, world: int, script: str, flags: tuple[str, ...], reopens: bool = True) -> str:
    """What a recipe prints in a process of a launch; it leaves with status 0."""
    sys.argv = [script, *flags]
    sys.path.insert(0, str(RECIPES))
    run = importlib.import_module("recipe_run")
    run.leave = sys.exit  # in place of the end of a process that goes on here
    if not reopens:
        run.check_export = lambda *_: 0
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPES / script), run_name="__main__")
    assert ended.value.code == 0
    return printed.getvalue()


SMALL = ("--max_steps", "4", "--hidden_size", "64", "--layers", "2", "--block_size", "64", "--max_train_blocks", "64")


@pytest.mark.parametrize(("experts", "rule"), [("0", "muon"), ("4", "normuon")], ids=["dense", "experts"])
def test_pretraining_lowers_the_loss_and_reopens(tmp_path: Path, experts: str, rule: str) -> None:
    flags = (*SMALL, "--experts", experts, "--update_rule", rule, "--output_dir", str(tmp_path / "out"))
    output = run_ranks(_ended_recipe, 2, "pretrain.py", flags, init=False, env=fsdp_env(2))[0]
    found = re.search(r"held-out loss: ([\d.]+) at step 0, ([\d.]+) at step 4", output)
    assert found is not None, output[-2000:]
    assert float(found[2]) < float(found[1])
    assert re.match(r"pretraining 0\.[12] M parameters on stdlib: 4 steps of 16 x 64 tokens on 2 process", output)
    assert re.search(r"a step takes [\d.]+ s: about [\d.]+ min to go", output)
    assert f"open it with from_pretrained('{tmp_path / 'out'}')" in output
    assert (tmp_path / "out" / "loss.png").is_file()


@pytest.mark.parametrize(("recipe", "lora"), [("trl_sft.py", "0"), ("trl_sft.py", "4"), ("trl_dpo.py", "4")])
def test_recipes_with_trl_train_and_save(tmp_path: Path, recipe: str, lora: str) -> None:
    small = ("--max_steps", "3", "--max_rows", "24", "--max_length", "64", "--per_device_train_batch_size", "2")
    flags = (*small, "--lora_r", lora, "--output_dir", str(tmp_path / "out"))
    output = run_ranks(_ended_recipe, 2, recipe, flags, init=False, env=fsdp_env(2))[0]
    assert re.search(r"loss: [\d.]+ at first, [\d.]+ at last", output)
    saved = "adapter_model.safetensors" if lora != "0" else "model.safetensors"
    assert (tmp_path / "out" / saved).is_file()


def test_accelerate_loop_goes_on_where_it_was_saved_on_other_ranks(tmp_path: Path) -> None:
    flags = ("--steps", "4", "--accumulate", "2", "--batch_size", "2", "--block_size", "64")
    whole = (*flags, "--save_every", "2", "--output_dir", str(tmp_path / "whole"))
    first = run_ranks(_ended_recipe, 2, "accelerate_loop.py", whole, init=False, env=fsdp_env(2))[0]
    rest = (*flags, "--resume", str(tmp_path / "whole" / "checkpoint-2"), "--output_dir", str(tmp_path / "rest"))
    second = run_ranks(_ended_recipe, 2, "accelerate_loop.py", rest, init=False, env=fsdp_env(2))[0]
    losses = [re.findall(r"step (\d): loss ([\d.]+)", output) for output in (first, second)]
    assert [step for step, _ in losses[0]] == ["1", "2", "3", "4"]
    assert losses[1] == losses[0][2:]
    assert (tmp_path / "rest" / "model.safetensors").is_file()


_TEXT_TO_TEXT = ("--max_source_length", "48", "--max_target_length", "12")
_PARTS = ("--vision_lr", "0", "--projector_lr", "1e-3")


@pytest.mark.parametrize(
    ("recipe", "flags"), [("seq2seq.py", _TEXT_TO_TEXT), ("vision_language.py", _PARTS)], ids=["text", "vision"]
)
def test_other_kinds_of_models_train_reopen_and_go_on_in_another_launch(
    tmp_path: Path, recipe: str, flags: tuple[str, ...]
) -> None:
    flags = (*flags, "--max_rows", "48", "--max_eval_rows", "2", "--max_steps", "4", "--logging_steps", "1")
    whole = ("--per_device_train_batch_size", "2", "--save_strategy", "steps", "--save_steps", "2")
    start = (*flags, *whole, "--output_dir", str(tmp_path / "whole"))
    first = run_ranks(_ended_recipe, 2, recipe, start, init=False, env=fsdp_env(2))[0]
    found = re.search(r"held-out loss: ([\d.]+) at step 0, ([\d.]+) at step 4", first)
    assert found is not None, first[-2000:]
    assert float(found[2]) < float(found[1])
    assert ("held-out similarity: " in first) is (recipe == "seq2seq.py")
    resumed = ("--per_device_train_batch_size", "4", "--resume_from_checkpoint", str(tmp_path / "whole/checkpoint-2"))
    rest = (*flags, *resumed, "--output_dir", str(tmp_path / "rest"))
    second = run_ranks(_ended_recipe, 1, recipe, rest, False, init=False)[0]
    steps = [re.findall(r"step (\d) of 4: loss ([\d.]+)", output) for output in (first, second)]
    assert [step for step, _ in steps[1]] == ["3", "4"]
    for (_, ours), (_, theirs) in zip(steps[0][2:], steps[1], strict=True):
        assert float(ours) == pytest.approx(float(theirs), abs=2e-3)


def test_loss_of_captioned_images_is_that_of_the_captions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    images = importlib.import_module("recipe_images")
    processor = images.tiny_llava()[1]
    rows, _ = images.load_images("shapes", 21, 1, "image", "text")
    rows[0] |= {"text": "short"}
    batch = images.Captioned(processor, "What?")(rows[:3])
    assert batch["pixel_values"].shape == (3, 3, 32, 32)
    labels = [processor.decode(row[row >= 0]) for row in batch["labels"]]
    assert labels == [f"{row['text']}<|endoftext|>" for row in rows[:3]]


def test_rates_of_parts_reach_the_projector_that_is_inside_of_a_vision_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    recipe = importlib.import_module("vision_language")
    model = torch.nn.Module()
    model.visual, model.language_model = torch.nn.Module(), torch.nn.Linear(4, 4)
    model.visual.blocks, model.visual.merger = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    groups = recipe.part_groups(model, {"vision": 0.0, "projector": 1e-3})
    members = ["visual.merger.weight", "visual.merger.bias"]
    assert groups == [{"params": members, "lr": 1e-3, "group_name": "projector"}]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["visual.blocks.weight", "visual.blocks.bias"]
    with pytest.raises(SystemExit, match="leave --vision_lr out"):
        recipe.part_groups(model.language_model, {"vision": 1e-3})


def test_model_sharded_while_loading_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    flags = ("--experts", "4", "--fsdp_size", "2", "--ep_size", "2", "--steps", "3", "--block_size", "32")
    start = ("--save_every", "2", "--output_dir", str(tmp_path / "out"))
    first = run_ranks(_ended_recipe, 2, "distributed_config.py", (*flags, *start), init=False)[0]
    more = ("--model", str(tmp_path / "out" / "start"), "--output_dir", str(tmp_path / "more"))
    resumed = (*flags, *more, "--resume", str(tmp_path / "out" / "checkpoint-2"))
    second = run_ranks(_ended_recipe, 2, "distributed_config.py", resumed, init=False)[0]
    losses = [re.findall(r"step (\d): loss ([\d.]+)", output) for output in (first, second)]
    assert [step for step, _ in losses[0]] == ["1", "2", "3"]
    assert losses[1] == losses[0][2:]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_asks_for_fsdp2_on_a_mesh_of_all_processes(config: Path) -> None:
    settings = yaml.safe_load(config.read_text())
    mesh = settings["parallelism_config"]
    sizes = (mesh[f"parallelism_config_{dimension}_size"] for dimension in ("dp_replicate", "dp_shard", "tp", "cp"))
    assert settings["distributed_type"] == "FSDP"
    assert settings["fsdp_config"]["fsdp_version"] == 2
    assert settings["num_processes"] == math.prod(sizes)
    assert settings["use_cpu"] is ("cpu" in config.stem)


def test_every_config_is_shipped_for_gpus_and_for_cpus() -> None:
    modes = ("fsdp2", "fsdp2_tp", "hsdp", "hsdp_tp")
    assert [config.stem for config in CONFIGS] == [
        *(f"dmuon_cpu_{mode}" for mode in modes),
        *(f"dmuon_{mode}" for mode in modes),
    ]


@pytest.mark.parametrize(
    ("flag", "expected"), [(None, None), ("True", True), ("false", False), ("out/checkpoint-3", "out/checkpoint-3")]
)
def test_resume_flag_takes_a_directory_or_a_truth_value(
    tools: tuple[Any, Any], flag: str | None, expected: str | bool | None
) -> None:
    assert importlib.import_module("finetune_causal_lm").checkpoint_of(flag) is expected
