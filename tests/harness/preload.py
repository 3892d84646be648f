"""Imported once by the fork server: every rank is forked from here with these modules in memory.

It must start no thread and run no autograd, since neither survives a fork. The package is among them: to import it
costs a rank more than most tests do with it. What it does on import depends on the environment, so that each rank does
that anew (`child._import_again`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import warnings
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
warnings.simplefilter("ignore")

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "pytest",
    "numpy",
    "numpy.ctypeslib",
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed",
    "torch.distributed._functional_collectives",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.optim.adamw",
    "torch.profiler._cupti_monitor",
    "torch.utils.checkpoint",
    "torch.distributed.pipelining",
    "safetensors.torch",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "accelerate",
    "accelerate.utils.fsdp_utils",
    "dmuon_hf.core",
    "dmuon_hf.core.runtime.owned_dispatch",
    "dmuon_hf.core.runtime.owned_ops",
    *(f"dmuon_hf.{path.stem}" for path in sorted((ROOT / "dmuon_hf").glob("[!_]*.py"))),
    "tests.harness.child",
)

for _name in MODULES:
    # A module that cannot be imported fails again in the rank that needs it, with its traceback.
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

import torch  # noqa: E402

torch.set_num_threads(1)
warnings.resetwarnings()
# A full collection in every rank would walk, and so copy, the whole shared heap.
gc.collect()
gc.freeze()
