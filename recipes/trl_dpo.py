"""Direct preference optimisation (DPO) with TRL: full, or adapters with `--lora_r`, updated by distributed Muon.

    python recipes/trl_dpo.py --lora_r 8
    accelerate launch --config_file accelerate_configs/dmuon_cpu_fsdp2.yaml recipes/trl_dpo.py --model smollm2
    accelerate launch --config_file accelerate_configs/dmuon_fsdp2.yaml recipes/trl_dpo.py --model Qwen/Qwen3-0.6B

The data are `prompt`, `chosen` and `rejected`; without `--dataset` they are made of the docstrings of the standard
library. Every flag of DPOConfig works (`--beta`, `--bf16`, ...). With adapters the base is the reference model.
"""

from __future__ import annotations

import os
import sys

from recipe_pairs import preferences
from recipe_run import leave
from recipe_trl import run
from trl import DPOConfig, DPOTrainer

if __name__ == "__main__":
    exit_status = run(DPOTrainer, DPOConfig, preferences, description=__doc__ or "", output_dir="outputs/dpo")
    if "LOCAL_RANK" in os.environ:
        leave(exit_status)
    sys.exit(exit_status)
