"""Prepares any class of the zoo for FSDP2 over two ranks, without memory and without the other rank."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any
from unittest import mock

import accelerate.optimizer
import torch.distributed as dist
from accelerate import Accelerator
from torch.testing._internal.distributed.fake_pg import FakeStore

import dmuon_hf
from dmuon_hf import hooks
from tests.hf.support import fsdp_env
from tests.hf.zoo.build import NotBuildableError, build

__all__ = ["refusals"]


def refusals(classes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """By class what keeps `accelerator.prepare` from taking it, empty for those that it takes.

    Classes that cannot be built are absent. In a process without a process group; it keeps a fake one of two ranks.

    Args:
        classes: `(model type, class name)`.
    """
    hooks.install()
    env = fsdp_env(2, mesh=False) | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with mock.patch.dict(os.environ, env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        accelerator = Accelerator(cpu=True)
    assert accelerator.is_fsdp2
    found = {}
    # accelerate moves the state of an optimizer to its device, which tensors without memory cannot follow.
    with mock.patch.object(accelerate.optimizer, "move_to_device", lambda state, device: state):
        for model_type, class_name in classes:
            try:
                model: Any = build(model_type, class_name).train()
            except NotBuildableError:
                continue
            found[class_name] = _refusal(accelerator, model)
    return found


def _refusal(accelerator: Accelerator, model: Any) -> str:
    try:
        accelerator.prepare(model, dmuon_hf.create_optimizer(model, lr=1e-3))
    except Exception as error:  # whatever a model of anyone's raises is to be counted
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        accelerator.free_memory()
    return ""
