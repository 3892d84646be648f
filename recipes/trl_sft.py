"""Supervised fine-tuning with TRL: full, or adapters with `--lora_r`, updated by distributed Muon.

    python recipes/trl_sft.py --lora_r 8
    accelerate launch --config_file accelerate_configs/dmuon_cpu_fsdp2.yaml recipes/trl_sft.py --model smollm2
    accelerate launch --config_file accelerate_configs/dmuon_fsdp2.yaml recipes/trl_sft.py --model Qwen/Qwen3-0.6B

The data are conversations (`messages`); without `--dataset` they are made of the docstrings of the standard library.
Every flag of SFTConfig works (`--packing`, `--bf16`, ...). Adapters are saved alone.
"""

from __future__ import annotations

import os
import sys

from recipe_pairs import conversations
from recipe_run import leave
from recipe_trl import run
from trl import SFTConfig, SFTTrainer

if __name__ == "__main__":
    exit_status = run(SFTTrainer, SFTConfig, conversations, description=__doc__ or "", output_dir="outputs/sft")
    if "LOCAL_RANK" in os.environ:
        leave(exit_status)
    sys.exit(exit_status)
