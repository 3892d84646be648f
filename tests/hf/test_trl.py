"""TRL's trainers with Muon: every launch gives the run of one process, from a tokenizer and a model made here."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

import dmuon_hf
from tests.harness import run_ranks
from tests.hf.support import as_launched, finish, fsdp_env, full_weights

pytestmark = pytest.mark.timeout(600)

_LAUNCHES: dict[str, tuple[int, dict[str, str]]] = {
    "one process": (1, {}),
    "ddp": (2, {}),
    "fsdp2": (2, fsdp_env(2)),
    "hsdp": (4, fsdp_env(4, replicas=2)),
    "fsdp2, tensor parallel": (4, fsdp_env(2) | {"PARALLELISM_CONFIG_TP_SIZE": "2"}),
}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_SPECIAL = ("<pad>", "<eos>", "<unk>", "<bos>")
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}<eos>{% endgeneration %}{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> tf.PreTrainedTokenizerFast:
    """One token for each printable character."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    characters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *characters])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    pad, eos, unk, bos = _SPECIAL
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token=pad, eos_token=eos, unk_token=unk, bos_token=bos)
    fast.chat_template = _TEMPLATE
    return fast


def _config() -> tf.LlamaConfig:
    return tf.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, pad_token_id=0, eos_token_id=1, bos_token_id=3,
    )  # fmt: skip


def _rows(kind: str) -> Any:
    from datasets import Dataset

    rows: dict[str, Any] = {
        "text": lambda i: {"text": f"number {i} follows {i - 1}"},
        "completion": lambda i: {"prompt": f"after {i} comes ", "completion": f"{i + 1}"},
        "chat": lambda i: {
            "messages": [{"role": "user", "content": f"after {i}?"}, {"role": "assistant", "content": f"{i + 1}"}]
        },
        "preference": lambda i: {"prompt": f"after {i} comes ", "chosen": f"{i + 1}", "rejected": f"{i}"},
        "prompt": lambda i: {"prompt": f"after {i} comes "},
    }
    return Dataset.from_list([rows[kind](index) for index in range(16)])


def _variety(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def _trainers(model: str, directory: str, world: int) -> dict[str, Any]:
    """Makers of the trainers, by name."""
    import peft
    import trl

    settings: dict[str, Any] = {
        "output_dir": directory, "max_steps": 2, "per_device_train_batch_size": 4 // world, "use_cpu": True,
        "report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "bf16": False,
        "gradient_checkpointing": False, "learning_rate": 5e-3, "adam_epsilon": 1e-3, "log_level": "error",
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")

    def causal() -> nn.Module:
        return tf.AutoModelForCausalLM.from_pretrained(model)

    def reward() -> nn.Module:
        torch.manual_seed(0)
        return tf.AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)

    def sft(rows: str, **config: Any) -> Any:
        args = trl.SFTConfig(max_length=32, **settings | config)
        return lambda **more: trl.SFTTrainer(model=causal(), args=args, train_dataset=_rows(rows), **more)

    def documented(**given: Any) -> Any:
        page = (Path(__file__).resolve().parents[2] / "docs/trainers.md").read_text()
        (block,) = re.findall(r"## TRL\n\n```python\n(.*?)trainer\.train\(\)", page, re.DOTALL)
        args = trl.DPOConfig(max_length=32, **settings)
        namespace: dict[str, Any] = {"model": causal(), "args": args, "data": _rows("preference"), "dmuon_hf": dmuon_hf}
        namespace["tokenizer"] = given["processing_class"]
        exec(compile(block, "trainers.md", "exec"), namespace)  # noqa: S102
        return namespace["trainer"]

    def dpo(*, reference: bool, **more: Any) -> Any:
        args = trl.DPOConfig(max_length=32, **settings)
        made = {"ref_model": causal()} if reference else {}
        return lambda **given: trl.DPOTrainer(
            model=causal(), args=args, train_dataset=_rows("preference"), **made, **{**given, **more}
        )

    grpo = trl.GRPOConfig(num_generations=2, max_completion_length=6, **settings)
    return {
        "sft, packing": sft("text", packing=True),
        "sft, completion only": sft("completion", completion_only_loss=True),
        "sft, chat": sft("chat", assistant_only_loss=True),
        "dpo": dpo(reference=True),
        "dpo without reference": documented,
        "dpo of an adapter": dpo(reference=False, peft_config=adapter, optimizers=dmuon_hf.create(lora="muon_b")),
        "reward": lambda **more: trl.RewardTrainer(
            model=reward(),
            args=trl.RewardConfig(max_length=32, **settings),
            train_dataset=_rows("preference"),
            **more,
        ),
        "grpo": lambda **more: trl.GRPOTrainer(
            model=causal(), args=grpo, train_dataset=_rows("prompt"), reward_funcs=_variety, **more
        ),
    }


_NAMES = (
    "sft, packing", "sft, completion only", "sft, chat", "dpo", "dpo without reference", "dpo of an adapter", "reward",
    "grpo",
)  # fmt: skip


_ON_FOUR = {
    "hsdp": ("sft, packing", "dpo", "reward", "grpo"),
    # The ranks of one tensor-parallel group would draw other completions each.
    "fsdp2, tensor parallel": ("sft, packing", "dpo", "reward"),
}
"""What is tried in launches of four processes."""


def _train(rank: int, world: int, model: str, directory: str, names: tuple[str, ...]) -> dict[str, Any]:
    if os.environ.get("ACCELERATE_USE_FSDP"):
        as_launched()
    parts = world // int(os.environ.get("PARALLELISM_CONFIG_TP_SIZE", "1"))
    result = {}
    for name, make in _trainers(model, directory, parts).items():
        if name not in names:
            continue
        trainer = make(processing_class=tokenizer(), optimizers=dmuon_hf.create())
        trainer.train()
        assert trainer.accelerator.is_fsdp2 is bool(os.environ.get("ACCELERATE_USE_FSDP"))
        result[name] = {
            "weights": full_weights(trainer.model),
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "matrices": trainer.optimizer.optimizer.ns_matrices,
        }
    finish()
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    pytest.importorskip("trl")
    directory = tmp_path_factory.mktemp("trl")
    torch.manual_seed(0)
    tf.LlamaForCausalLM(_config()).save_pretrained(directory / "model")
    return {
        name: run_ranks(
            _train,
            world,
            str(directory / "model"),
            str(directory / "out"),
            _ON_FOUR.get(name, _NAMES),
            init=False,
            env=env | _OFFLINE,
            timeout=300,
        )
        for name, (world, env) in _LAUNCHES.items()
    }


@pytest.mark.parametrize(
    ("launch", "trainer"),
    [(launch, name) for launch in _LAUNCHES for name in _ON_FOUR.get(launch, _NAMES)],
)
def test_trainer_of_trl_trains_with_muon_like_one_process(
    runs: dict[str, list[dict[str, Any]]], launch: str, trainer: str
) -> None:
    results = [result[trainer] for result in runs[launch]]
    (alone,) = runs["one process"]
    matrices = 2 if "adapter" in trainer else 7
    assert sum(result["matrices"] for result in results) == 2 * matrices
    for result in results:
        for name, weight in alone[trainer]["weights"].items():
            assert torch.equal(result["weights"][name], results[0]["weights"][name]), name
            # What GRPO generates is drawn at random on each rank.
            if trainer != "grpo":
                torch.testing.assert_close(result["weights"][name], weight, rtol=1e-3, atol=1e-4, msg=name)
