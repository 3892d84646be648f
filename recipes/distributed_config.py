"""Tensor and expert parallelism: a model that transformers shards while it loads it, updated by Muon where it lies.

    torchrun --nproc-per-node 4 recipes/distributed_config.py --fsdp_size 2 --tp_size 2
    torchrun --nproc-per-node 4 recipes/distributed_config.py --fsdp_size 4 --ep_size 4 --experts 8
    torchrun --nproc-per-node 8 recipes/distributed_config.py --fsdp_size 8 --ep_size 8 --model Qwen/Qwen3-30B-A3B

Without `--model` a small random one is written first. `--resume` goes on from a checkpoint, also with other sizes. At
the end `save_pretrained` writes whole weights.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pretrain import ModelArguments, make_model
from recipe_data import load_blocks
from recipe_log import quiet
from recipe_models import byte_tokenizer
from recipe_run import leave, where_next
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.distributed import DistributedConfig

import dmuon_hf


def main() -> int:
    """Command line of the recipe; returns the exit status."""
    options = _options()
    set_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    quiet(rank == 0)
    output = Path(options.output_dir)
    source = options.model or _write_small_model(output / "start", options.experts, rank)
    sizes = {"fsdp_size": options.fsdp_size, "tp_size": options.tp_size}
    if options.ep_size > 1:
        sizes |= {"ep_size": options.ep_size, "ep_implementation": "all_to_all"}
    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(**sizes))
    tokenizer = AutoTokenizer.from_pretrained(source)
    optimizer = dmuon_hf.create_optimizer(model, lr=options.learning_rate, weight_decay=0.1)
    done = _load(model, optimizer, options.resume) if options.resume else 0
    if rank == 0:
        print(dmuon_hf.describe(model, optimizer), flush=True)

    blocks = load_blocks(options.dataset, tokenizer, block_size=options.block_size, max_train=2048, max_held_out=16)
    rows = torch.tensor(blocks.train["input_ids"])
    # The ranks of a tensor-parallel group take the same sequences.
    replica, replicas = rank // options.tp_size, world // options.tp_size
    model.train()
    for step in range(done, options.steps):
        first = (step * replicas + replica) * options.batch_size % (len(rows) - options.batch_size + 1)
        batch = rows[first : first + options.batch_size].to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
        if options.save_every and (step + 1) % options.save_every == 0:
            _save(model, optimizer, step + 1, output / f"checkpoint-{step + 1}")
    model.save_pretrained(output / "final")
    if rank == 0:
        tokenizer.save_pretrained(output / "final")
        print(where_next(output / "final", resume=f"--resume {output}/checkpoint-N (with --save_every)"))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _options() -> argparse.Namespace:
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="a name on the Hub or a directory (default: a small random one)")
    add("--experts", type=int, default=0, help="of the small random model; 0: it is dense")
    add("--fsdp_size", type=int, default=1, help="ranks that shard (default: %(default)s)")
    add("--tp_size", type=int, default=1, help="ranks of tensor parallelism (default: %(default)s)")
    add("--ep_size", type=int, default=1, help="ranks of expert parallelism (default: %(default)s)")
    add("--dataset", default="stdlib", help="`stdlib`, local files, or a dataset on the Hub (default: %(default)s)")
    add("--block_size", type=int, default=128, help="tokens per sequence (default: %(default)s)")
    add("--batch_size", type=int, default=2, help="sequences of one replica and step (default: %(default)s)")
    add("--steps", type=int, default=10, help="optimizer steps (default: %(default)s)")
    add("--learning_rate", type=float, default=2e-3, help="of all weights (default: %(default)s)")
    add("--save_every", type=int, default=0, metavar="N", help="steps between checkpoints; 0: none")
    add("--resume", metavar="DIRECTORY", help="a checkpoint of such a run")
    add("--output_dir", default="outputs/distributed", help="(default: %(default)s)")
    return parser.parse_args()


def _write_small_model(directory: Path, experts: int, rank: int) -> Path:
    if rank == 0:
        tokenizer = byte_tokenizer()
        make_model(ModelArguments(hidden_size=128, layers=2, experts=experts), tokenizer).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    dist.barrier()
    return directory


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, directory: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=directory)


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, directory: str) -> int:
    """Load a checkpoint; returns its step."""
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(saved, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(saved["step"])


if __name__ == "__main__":
    exit_status = main()
    if "LOCAL_RANK" in os.environ:
        leave(exit_status)
    sys.exit(exit_status)
