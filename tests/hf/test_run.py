"""`python -m dmuon_hf.run train.py`: a script that knows nothing of Muon trains with it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dmuon_hf import ConfigurationError, DMuonOptions
from dmuon_hf.core import MatrixSpec
from dmuon_hf.run import main
from dmuon_hf.script_options import _KINDS, script_options
from tests.harness import run_ranks
from tests.hf.support import finish

ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = """
import argparse, json, os, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import helper_of_the_script

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=128)
    config = LlamaConfig(**sizes)
    data = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 16

    def arguments(**more):
        return TrainingArguments(out, max_steps=1, use_cpu=True, report_to=[], save_strategy="no", **more)

    class MyTrainer(Trainer):
        pass

    class OwnTrainer(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    seen = {}
    def train(name, trainer):
        trainer.train()
        optimizer = trainer.optimizer.optimizer
        seen[name] = [type(optimizer).__name__, sorted({group["lr"] for group in optimizer.param_groups})]

    args = arguments(lr_scheduler_type="constant")
    train("default", MyTrainer(model=LlamaForCausalLM(config), args=args, train_dataset=data))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        model = LlamaForCausalLM(config)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        train("given", Trainer(model=model, args=arguments(), train_dataset=data, optimizers=(own, None)))
        train("by name", Trainer(model=LlamaForCausalLM(config), args=arguments(optim="adafactor"), train_dataset=data))
        train("method", OwnTrainer(model=LlamaForCausalLM(config), args=arguments(), train_dataset=data))
    seen["argv"] = sys.argv
    with open(f"{out}/seen-{os.environ.get('RANK', '0')}.json", "w") as file:
        json.dump(seen, file)
"""


def _script(directory: Path) -> Path:
    (directory / "helper_of_the_script.py").touch()
    path = directory / "train.py"
    path.write_text(_SCRIPT)
    return path


def _run(rank: int, world: int, directory: str, script: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        main([script, "--out", directory])
    finish()
    return said.getvalue()


@pytest.mark.parametrize("world", [1, 2])
def test_script_trains_with_muon_where_it_names_no_optimizer(tmp_path: Path, world: int) -> None:
    script = _script(tmp_path)
    said = run_ranks(_run, world, str(tmp_path), str(script), init=False, env={"DMUON_HF_MUON_LR": "1e-3"})
    for rank in range(world):
        seen = json.loads((tmp_path / f"seen-{rank}.json").read_text())
        assert seen["default"] == ["Muon", [5e-5, 1e-3]]
        assert seen["argv"] == [str(script), "--out", str(tmp_path)]
    assert "MyTrainer trains with Muon; options: muon_lr=0.001 (DMUON_HF_MUON_LR)" in said[0]
    assert "Muon: 7 matrices" in said[0]
    if world == 1:
        assert {name: seen[name][0] for name in ("given", "by name", "method")} == {
            "given": "SGD",
            "by name": "Adafactor",
            "method": "SGD",
        }
        for own in ("optimizers=", "optim='adafactor'", "OwnTrainer.create_optimizer"):
            assert f"keeps its own optimizer ({own})" in said[0]
    else:
        assert "dmuon_hf: " not in said[1]


@pytest.mark.timeout(300)
def test_launch_of_the_docs_trains_a_script_with_muon_under_fsdp2(tmp_path: Path) -> None:
    script = _script(tmp_path)
    page = (ROOT / "docs/trainers.md").read_text()
    (command,) = re.findall(r"^(accelerate launch .* -m dmuon_hf\.run) train\.py", page, re.MULTILINE)
    words = command.replace("dmuon_fsdp2.yaml", "dmuon_cpu_fsdp2.yaml").split()
    (tmp_path / "muon.yaml").write_text("muon_lr: 1e-3\nlora: adamw\n")
    env = os.environ | {"DMUON_HF_CONFIG": str(tmp_path / "muon.yaml"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", port, *words[2:]]
    done = subprocess.run(
        [*words, str(script), "--out", str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2 owners" in done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"seen-{rank}.json").read_text())["default"] == ["Muon", [5e-5, 1e-3]]


def _module(rank: int, world: int, directory: str) -> str:
    os.chdir(directory)
    Path("as_module.py").write_text("import sys\nprint(sys.argv[1:], __name__)\n")
    said, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        main(["-m", "as_module", "--x", "-m"])
    return printed.getvalue() + said.getvalue()


def test_module_runs_and_a_script_without_a_trainer_is_told_so(tmp_path: Path) -> None:
    (text,) = run_ranks(_module, 1, str(tmp_path), init=False)
    assert "['--x', '-m'] __main__" in text
    assert "no Trainer of the script took Muon" in text


def test_script_that_is_not_there_raises() -> None:
    with pytest.raises(ConfigurationError, match=r"no script 'nothing\.py'"):
        main(["nothing.py"])


def test_options_come_from_file_and_environment_which_counts_more(tmp_path: Path) -> None:
    file = tmp_path / "muon.yaml"
    file.write_text(
        "muon_lr: 1e-3\nns_steps: 4\nlayouts:\n  '*.qkv.weight': {sections: [64, 32, 32]}\n"
        "param_groups:\n  '*.layers.0.*': {lr_factor: 5e-1}\n"
    )
    options = script_options(str(file), {"DMUON_HF_NS_STEPS": "6", "DMUON_HF_NESTEROV": "false", "OTHER": "1"})
    assert options.values == {
        "muon_lr": 1e-3,
        "ns_steps": 6,
        "layouts": {"*.qkv.weight": MatrixSpec(sections=(64, 32, 32))},
        "param_groups": {"*.layers.0.*": {"lr_factor": 0.5}},
        "nesterov": False,
    }
    assert options.sources["ns_steps"] == "DMUON_HF_NS_STEPS" and options.sources["muon_lr"] == str(file)
    assert script_options(environment={"DMUON_HF_CONFIG": str(file)}).values["ns_steps"] == 4


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DMUON_HF_MOUN_LR", "1e-3", r"DMUON_HF_MOUN_LR sets 'moun_lr'.*muon_lr"),
        ("DMUON_HF_PREDICATE", "print", "'predicate', which is no option here"),
        ("DMUON_HF_MUON_LR", "fast", "DMUON_HF_MUON_LR sets muon_lr to 'fast', which is not a number"),
        ("DMUON_HF_NS_STEPS", "2.5", "not a whole number"),
        ("DMUON_HF_NESTEROV", "maybe", "not true or false"),
        ("DMUON_HF_ROUTES", "muon", "not a mapping"),
        ("DMUON_HF_ROUTES", "{a: ", "no YAML"),
        ("DMUON_HF_CONFIG", "/nowhere/muon.yaml", "cannot be read"),
    ],
)
def test_option_that_is_misspelt_or_of_another_kind_raises(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        script_options(environment={variable: value})


def test_every_option_that_text_can_say_is_known() -> None:
    assert set(DMuonOptions.__dataclass_fields__) - set(_KINDS) == {"predicate"}
