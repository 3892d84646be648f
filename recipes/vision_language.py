"""Fine-tune a vision-language model (LLaVA, Qwen-VL, ...) with distributed Muon, each part at its own rate.

    python recipes/vision_language.py
    accelerate launch --config_file accelerate_configs/dmuon_cpu_hsdp.yaml recipes/vision_language.py --vision_lr 1e-4
    python recipes/vision_language.py --model Qwen/Qwen2.5-VL-3B-Instruct --vision_lr 1e-6 --projector_lr 1e-5 --bf16

Images with captions: without `--dataset` drawn shapes and what they are; else a directory of images with a
metadata.jsonl, or a dataset on the Hub. The loss is that of the caption, which answers `--question`. `--vision_lr 0`
freezes the vision tower. Every TrainingArguments flag works.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from recipe_images import Captioned, load_images, tiny_llava
from recipe_log import announce, quiet, report
from recipe_run import Sample, checkpoint_of, end, leave, parsed
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import dmuon_hf

# What modules of these parts are called in transformers. The projector of some lies inside of their vision tower.
VISION = ("vision_tower", "vision_model", "visual")
PROJECTOR = ("multi_modal_projector", "merger", "deepstack_merger_list", "connector", "aligner", "embed_vision")


@dataclass
class Arguments:
    """Model, data and rates."""

    model: str = field(
        default="tiny", metadata={"help": "a name on the Hub, a directory, or `tiny` (a random LLaVA of two layers)"}
    )
    dataset: str = field(
        default="shapes", metadata={"help": "`shapes` (drawn), a directory with metadata.jsonl, or one on the Hub"}
    )
    image_column: str = field(default="image", metadata={"help": "column with the images"})
    text_column: str = field(default="text", metadata={"help": "column with the captions"})
    question: str = field(default="What is in the picture?", metadata={"help": "what a caption answers"})
    max_rows: int = field(default=512, metadata={"help": "most images; 0 for all of the dataset"})
    max_eval_rows: int = field(default=16, metadata={"help": "most held-out images"})
    vision_lr: float | None = field(
        default=None, metadata={"help": "rate of the vision tower; 0: it is frozen (default: learning_rate)"}
    )
    projector_lr: float | None = field(
        default=None, metadata={"help": "rate of what joins vision and text; 0: it is frozen (default: learning_rate)"}
    )


DEFAULTS: dict[str, Any] = {
    "output_dir": "outputs/vision_language",
    "max_steps": 100,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "cosine",
    "logging_steps": 10,
    "save_strategy": "no",
    "eval_on_start": True,
    "prediction_loss_only": True,
    "remove_unused_columns": False,  # the collator needs the images
    "report_to": "none",
    "dataloader_pin_memory": torch.accelerator.is_available(),
}


def load(name: str) -> tuple[PreTrainedModel, Any]:
    """Model and processor by name; a random model is equal on every rank after `set_seed`."""
    if name == "tiny":
        return tiny_llava()
    model = AutoModelForImageTextToText.from_pretrained(name, dtype=torch.float32)
    return model, AutoProcessor.from_pretrained(name)


def part_of(name: str) -> str | None:
    """The part of the model that a parameter of that name is in."""
    if any(f"{module}." in name for module in PROJECTOR):
        return "projector"
    return "vision" if any(f"{module}." in name for module in VISION) else None


def part_groups(model: PreTrainedModel, rates: dict[str, float | None]) -> list[dict[str, Any]]:
    """Parameter groups for `dmuon_hf.create` of the parts that have a rate; a part of rate 0 is frozen.

    Args:
        model: the model, before it is prepared.
        rates: by part; None for what has the rate of the run.

    Raises:
        SystemExit: no module of the model is known as that part.
    """
    groups = []
    for part, rate in rates.items():
        if rate is None:
            continue
        members = {name: parameter for name, parameter in model.named_parameters() if part_of(name) == part}
        if not members:
            raise SystemExit(f"no module of {type(model).__name__} is known as its {part}: leave --{part}_lr out")
        if rate:
            groups.append({"params": list(members), "lr": rate, "group_name": part})
        else:
            for parameter in members.values():
                parameter.requires_grad = False
    return groups


def main() -> int:
    """Command line of the recipe; returns the exit status."""
    own, args = parsed(__doc__, (Arguments, TrainingArguments), DEFAULTS)
    quiet(args.process_index == 0)
    announce(args, f"fine-tuning the vision-language model {own.model} on {own.dataset}")
    set_seed(args.seed)

    model, processor = load(own.model)
    rows = (own.dataset, own.max_rows or None, own.max_eval_rows, own.image_column, own.text_column)
    train, held_out = load_images(*rows)
    collator = Captioned(processor, own.question)
    groups = part_groups(model, {"vision": own.vision_lr, "projector": own.projector_lr})
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=processor,
        data_collator=collator,
        optimizers=dmuon_hf.create(param_groups=groups) if groups else dmuon_hf.create(),
    )
    report(trainer)
    trainer.train(resume_from_checkpoint=checkpoint_of(args.resume_from_checkpoint))
    inputs = collator([held_out[0]])
    del inputs["labels"]
    sample = Sample(inputs=inputs, prompt=collator.ask([held_out[0]]), opener="AutoModelForImageTextToText")
    return end(trainer, Path(args.output_dir), sample)


if __name__ == "__main__":
    exit_status = main()
    if "LOCAL_RANK" in os.environ:
        leave(exit_status)
    sys.exit(exit_status)
