"""Fine-tune an encoder-decoder (T5, BART, Marian, ...) with distributed Muon, and measure what it generates.

    python recipes/seq2seq.py
    accelerate launch --config_file accelerate_configs/dmuon_cpu_hsdp.yaml recipes/seq2seq.py --max_steps 40
    accelerate launch --config_file accelerate_configs/dmuon_fsdp2.yaml recipes/seq2seq.py --model google-t5/t5-base

Text to text: without `--dataset`, the name of a function from the first line of its docstring. A file or a dataset on
the Hub has a column with the source and one with the target; `--source_prefix` is what T5 calls its task. Held-out rows
are generated at each evaluation and compared with their targets. Every Seq2SeqTrainingArguments flag works.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipe_data import hold_out
from recipe_log import announce, quiet, report
from recipe_models import byte_tokenizer
from recipe_pairs import sources_and_targets
from recipe_run import Sample, checkpoint_of, end, leave, parsed
from torch import Tensor, nn
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

import dmuon_hf


@dataclass
class Arguments:
    """Model and data."""

    model: str = field(
        default="tiny",
        metadata={"help": "a name on the Hub, a directory, or `tiny` (a random two-layer T5 with a byte tokenizer)"},
    )
    dataset: str = field(
        default="stdlib",
        metadata={"help": "`stdlib` (docstrings of Python's standard library), a json file or a dataset on the Hub"},
    )
    source_column: str = field(default="source", metadata={"help": "column with what is read"})
    target_column: str = field(default="target", metadata={"help": "column with what is to be written"})
    source_prefix: str = field(default="", metadata={"help": "text before every source, such as `summarize: `"})
    max_source_length: int = field(default=128, metadata={"help": "most tokens of a source"})
    max_target_length: int = field(default=32, metadata={"help": "most tokens of a target"})
    max_rows: int = field(default=2048, metadata={"help": "most rows made of `stdlib`"})
    max_eval_rows: int = field(default=16, metadata={"help": "most held-out rows"})


DEFAULTS: dict[str, Any] = {
    "output_dir": "outputs/seq2seq",
    "max_steps": 100,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "cosine",
    "logging_steps": 10,
    "save_strategy": "no",
    "eval_on_start": True,
    "predict_with_generate": True,
    "report_to": "none",
    "dataloader_pin_memory": torch.accelerator.is_available(),
}


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer by name; a random model is equal on every rank after `set_seed`."""
    if name != "tiny":
        return AutoModelForSeq2SeqLM.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)
    tokenizer = byte_tokenizer(pad_token="<pad>")
    config = T5Config(
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return T5ForConditionalGeneration(config), tokenizer


def similarity_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[EvalPrediction], dict[str, float]]:
    """How alike generated texts and their targets are, 0 to 1 (difflib's ratio), for `compute_metrics`."""

    def texts(ids: Any) -> list[str]:
        return tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)

    def similarity(prediction: EvalPrediction) -> dict[str, float]:
        pairs = zip(texts(prediction.predictions), texts(prediction.label_ids), strict=True)
        return {"similarity": float(np.mean([SequenceMatcher(None, *pair).ratio() for pair in pairs]))}

    return similarity


def mean_over_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """The loss of a step, for `compute_loss_func`: the mean over the tokens of all its ranks and micro-batches.

    The own loss of T5, BART and their kind is the mean over one micro-batch of one rank, which the Trainer takes for a
    share of the sum over all: it would come out as many times too large, and the gradients with it.
    """
    logits = outputs.logits.flatten(0, -2).float()
    total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def main() -> int:
    """Command line of the recipe; returns the exit status."""
    own, args = parsed(__doc__, (Arguments, Seq2SeqTrainingArguments), DEFAULTS)
    args.generation_max_length = args.generation_max_length or own.max_target_length
    quiet(args.process_index == 0)
    announce(args, f"fine-tuning the encoder-decoder {own.model} on {own.dataset}")
    set_seed(args.seed)

    model, tokenizer = load(own.model)
    rows = sources_and_targets(own.dataset, own.max_rows, own.source_column, own.target_column)

    def tokens(row: dict[str, str]) -> dict[str, list[int]]:
        encoded = tokenizer(own.source_prefix + row["source"], max_length=own.max_source_length, truncation=True)
        target = tokenizer(text_target=row["target"], max_length=own.max_target_length - 1, truncation=True)
        # Tokenizers of encoder-decoders end a text by themselves.
        ended = target["input_ids"] + [tokenizer.eos_token_id] * (target["input_ids"][-1:] != [tokenizer.eos_token_id])
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": ended}

    train, held_out = hold_out(rows.map(tokens, remove_columns=rows.column_names), own.max_eval_rows)
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=collator,
        # Label smoothing has a loss of its own, which knows of the other ranks.
        compute_loss_func=None if args.label_smoothing_factor else mean_over_tokens,
        compute_metrics=similarity_of(tokenizer) if args.predict_with_generate else None,
        optimizers=dmuon_hf.create(),
    )
    report(trainer)
    trainer.train(resume_from_checkpoint=checkpoint_of(args.resume_from_checkpoint))
    inputs = dict(collator([held_out[0]]))
    del inputs["labels"]
    prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    sample = Sample(inputs=inputs, prompt=prompt, opener="AutoModelForSeq2SeqLM")
    measures = ("loss", "similarity") if args.predict_with_generate else ("loss",)
    return end(trainer, Path(args.output_dir), sample, measures=measures)


if __name__ == "__main__":
    exit_status = main()
    if "LOCAL_RANK" in os.environ:
        leave(exit_status)
    sys.exit(exit_status)
