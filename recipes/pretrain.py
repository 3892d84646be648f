"""Pretrain a small language model from scratch with distributed Muon.

    python recipes/pretrain.py --max_steps 50
    accelerate launch --config_file accelerate_configs/dmuon_cpu_fsdp2.yaml recipes/pretrain.py --experts 8
    accelerate launch --config_file accelerate_configs/dmuon_hsdp.yaml recipes/pretrain.py --hidden_size 1024 --bf16

A Llama, or with `--experts` a mixture of experts (Qwen3-MoE), whose stacks of experts Muon updates expert by expert.
The text becomes bytes unless `--vocabulary` names a tokenizer. Weights are equal on all ranks from the first step; the
run measures the loss on held-out text, saves safetensors, and lets a fresh process reopen and check them. Every
TrainingArguments flag works; the defaults suit a demonstration on two CPU cores.
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
from recipe_models import byte_tokenizer
from recipe_run import checkpoint_of, end, leave, parsed, text_sample
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import dmuon_hf


@dataclass
class ModelArguments:
    """Size of the model and of its text."""

    hidden_size: int = field(default=192, metadata={"help": "width; heads have 64 elements"})
    layers: int = field(default=6, metadata={"help": "transformer blocks"})
    experts: int = field(default=0, metadata={"help": "experts of each layer, two for each token; 0: a dense model"})
    vocabulary: str | None = field(
        default=None, metadata={"help": "tokenizer: a name on the Hub or a directory (default: bytes)"}
    )
    dataset: str = field(
        default="stdlib",
        metadata={"help": "`stdlib` (the source of Python's standard library), local files, or a dataset on the Hub"},
    )
    block_size: int = field(default=256, metadata={"help": "tokens per sequence"})
    max_train_blocks: int = field(default=4096, metadata={"help": "most sequences to train on; 0 for all of the text"})
    max_eval_blocks: int = field(default=16, metadata={"help": "most held-out sequences"})
    optimizer: str = field(
        default="muon",
        metadata={"help": "adamw: all weights with the AdamW of Trainer, to compare", "choices": ["muon", "adamw"]},
    )
    update_rule: str = field(
        default="muon",
        metadata={"help": "of Muon; normuon: rows brought to one size", "choices": ["muon", "normuon"]},
    )
    qk_clip: float | None = field(
        default=None,
        metadata={"help": "largest attention logit to allow, such as 100 (QK-clip, for dense models; default: off)"},
    )

    def __post_init__(self) -> None:
        if self.optimizer == "adamw" and (self.update_rule != "muon" or self.qk_clip is not None):
            raise SystemExit("--update_rule and --qk_clip have no effect with --optimizer adamw: leave one of them out")


DEFAULTS: dict[str, Any] = {
    "output_dir": "outputs/pretrain",
    "max_steps": 100,
    "per_device_train_batch_size": 8,
    # The best one for Muon in docs/results.md; AdamW takes about an eighth of it.
    "learning_rate": 8e-3,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
    "logging_steps": 10,
    "save_strategy": "no",
    "eval_on_start": True,
    "report_to": "none",
    "dataloader_pin_memory": torch.accelerator.is_available(),
}


def make_model(sizes: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A model of random weights, the same on every rank after `set_seed`."""
    heads = max(1, sizes.hidden_size // 64)
    shared: dict[str, Any] = {
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": sizes.hidden_size // heads,
        # Divisible by usual numbers of ranks, which a tied embedding needs under FSDP2 with tensor parallelism.
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "max_position_embeddings": max(1024, sizes.block_size),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    if not sizes.experts:
        return LlamaForCausalLM(LlamaConfig(intermediate_size=3 * sizes.hidden_size, **shared))
    expert = {"num_experts": sizes.experts, "num_experts_per_tok": 2, "moe_intermediate_size": sizes.hidden_size}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**expert, output_router_logits=True, **shared))


def main() -> int:
    """Command line of the recipe; returns the exit status."""
    sizes, args = parsed(__doc__, (ModelArguments, TrainingArguments), DEFAULTS)
    quiet(args.process_index == 0)
    set_seed(args.seed)

    tokenizer = byte_tokenizer() if sizes.vocabulary is None else AutoTokenizer.from_pretrained(sizes.vocabulary)
    model = make_model(sizes, tokenizer)
    what = f"pretraining {model.num_parameters() / 1e6:.1f} M parameters on {sizes.dataset}"
    announce(args, what, sizes.block_size)
    blocks = load_blocks(
        sizes.dataset,
        tokenizer,
        block_size=sizes.block_size,
        max_train=sizes.max_train_blocks or None,
        max_held_out=sizes.max_eval_blocks,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=blocks.train,
        eval_dataset=blocks.held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        optimizers=dmuon_hf.create(update_rule=sizes.update_rule, qk_clip=sizes.qk_clip)
        if sizes.optimizer == "muon"
        else (None, None),
    )
    report(trainer)
    trainer.train(resume_from_checkpoint=checkpoint_of(args.resume_from_checkpoint))
    return end(trainer, Path(args.output_dir), text_sample(blocks.held_out[0]["input_ids"][:64], tokenizer))


if __name__ == "__main__":
    exit_status = main()
    if "LOCAL_RANK" in os.environ:
        leave(exit_status)
    sys.exit(exit_status)
