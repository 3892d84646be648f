"""What the recipes with TRL share: arguments, adapters, training, saving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from recipe_log import announce, quiet, report
from recipe_models import load_model
from recipe_pairs import give_chat_template
from recipe_run import checkpoint_of, parsed, where_next
from transformers import set_seed

import dmuon_hf

__all__ = ["run"]


@dataclass
class Arguments:
    """Model, data and adapters."""

    model: str = field(default="tiny", metadata={"help": "a name on the Hub, a directory, `tiny` or `smollm2`"})
    dataset: str = field(default="stdlib", metadata={"help": "`stdlib`, a json file or a name on the Hub"})
    max_rows: int = field(default=256, metadata={"help": "most rows made of `stdlib`"})
    lora_r: int = field(default=0, metadata={"help": "rank of LoRA on all linear layers; 0: all weights train"})
    lora: str = field(
        default="adamw", metadata={"help": "who trains the factors of LoRA", "choices": ["adamw", "muon_b", "muon"]}
    )


_DEFAULTS: dict[str, Any] = {
    "max_steps": 10,
    "per_device_train_batch_size": 4,
    "learning_rate": 2e-4,
    "max_length": 256,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": torch.accelerator.is_available(),
}


def run(
    trainer_class: type[Any],
    config_class: type[Any],
    rows: Callable[[str, int], Dataset],
    *,
    description: str,
    output_dir: str,
) -> int:
    """Command line of a recipe: `Arguments` and every flag of `config_class`. Returns the exit status.

    Args:
        trainer_class: a trainer of TRL.
        config_class: its arguments.
        rows: `(name, most rows) -> dataset`.
        description: of the recipe, whose first paragraph `--help` prints.
        output_dir: default of that flag.
    """
    own, args = parsed(description, (Arguments, config_class), _DEFAULTS | {"output_dir": output_dir})
    quiet(args.process_index == 0)
    announce(args, f"{trainer_class.__name__} of {own.model} on {own.dataset}")
    set_seed(args.seed)
    output = Path(args.output_dir)
    with args.main_process_first(desc="unpacking the model"):
        model, tokenizer = load_model(own.model, output, torch.float32)
    give_chat_template(tokenizer)
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=rows(own.dataset, own.max_rows),
        processing_class=tokenizer,
        peft_config=_adapters(own.lora_r),
        optimizers=dmuon_hf.create(lora=own.lora) if own.lora_r else dmuon_hf.create(),
    )
    report(trainer)
    trainer.train(resume_from_checkpoint=checkpoint_of(args.resume_from_checkpoint))
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(output))
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.4f} at last", flush=True)
        if own.lora_r:
            print(f"adapters saved in {output}: open them with PeftModel.from_pretrained(base, {str(output)!r})")
        else:
            print(where_next(output), flush=True)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    return 0


def _adapters(rank: int) -> Any:
    """LoRA of that rank on all linear layers, or None."""
    if not rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
