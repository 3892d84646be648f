"""A training loop of one's own on accelerate, with distributed Muon.

    python recipes/accelerate_loop.py
    accelerate launch --config_file accelerate_configs/dmuon_cpu_hsdp.yaml recipes/accelerate_loop.py --steps 40
    accelerate launch --config_file accelerate_configs/dmuon_hsdp.yaml recipes/accelerate_loop.py --dataset text.jsonl

Accumulation, clipping, a schedule, checkpoints every `--save_every` steps and `--resume`. The order matters: the
Accelerator, then `create_optimizer`, then `prepare`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from recipe_data import load_blocks
from recipe_log import quiet
from recipe_models import load_model
from recipe_run import leave, where_next
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_scheduler

import dmuon_hf


def main() -> int:
    """Command line of the recipe; returns the exit status."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", help="a name on the Hub, a directory, `tiny` or `smollm2` (default: %(default)s)")
    add("--dataset", default="stdlib", help="`stdlib`, local files, or a dataset on the Hub (default: %(default)s)")
    add("--block_size", type=int, default=128, help="tokens per sequence (default: %(default)s)")
    add("--batch_size", type=int, default=4, help="sequences of one rank and backward (default: %(default)s)")
    add("--accumulate", type=int, default=2, help="backward passes per step (default: %(default)s)")
    add("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    add("--learning_rate", type=float, default=2e-3, help="of all weights (default: %(default)s)")
    add("--weight_decay", type=float, default=0.1, help="of matrices and embeddings (default: %(default)s)")
    add("--max_norm", type=float, default=1.0, help="of the whole gradient (default: %(default)s)")
    add("--save_every", type=int, default=0, metavar="N", help="steps between checkpoints; 0: none")
    add("--resume", metavar="DIRECTORY", help="a checkpoint of such a run, on any number of ranks")
    add("--output_dir", default="outputs/loop", help="(default: %(default)s)")
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    quiet(accelerator.is_main_process)
    output = Path(options.output_dir)
    with accelerator.main_process_first():
        model, tokenizer = load_model(options.model, output, torch.float32)
    blocks = load_blocks(options.dataset, tokenizer, block_size=options.block_size, max_train=2048, max_held_out=16)
    optimizer = dmuon_hf.create_optimizer(model, lr=options.learning_rate, weight_decay=options.weight_decay)
    loader = DataLoader(
        blocks.train, batch_size=options.batch_size, shuffle=True, collate_fn=default_data_collator, drop_last=True
    )
    # A prepared scheduler advances once per process and step.
    total = options.steps * accelerator.num_processes
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=total // 10, num_training_steps=total)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    done = 0
    if options.resume:
        accelerator.load_state(options.resume)
        done = int(Path(options.resume).name.rpartition("-")[2])
    accelerator.print(f"{options.steps - done} steps of {total // options.steps} x {options.batch_size} sequences")

    model.train()
    while done < options.steps:
        batches = skip_first_batches(loader, done * options.accumulate % len(loader))
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), options.max_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            accelerator.print(f"step {done}: loss {loss.item():.4f}, gradient norm {float(norm):.3f}")
            if options.save_every and done % options.save_every == 0:
                accelerator.save_state(str(output / f"checkpoint-{done}"))
            if done >= options.steps:
                break

    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(output, state_dict=state)
        tokenizer.save_pretrained(output)
    accelerator.wait_for_everyone()
    accelerator.print(where_next(output, resume=f"--resume {output}/checkpoint-N (with --save_every)"))
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    exit_status = main()
    if "LOCAL_RANK" in os.environ:
        leave(exit_status)
    sys.exit(exit_status)
