"""Trains every tiny family for three steps under one launch and compares it with one process: `make launches`."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import transformers as tf
from accelerate import Accelerator
from torch import Tensor, nn

import dmuon_hf
from dmuon_hf.core import MatrixSpec
from tests.harness.reference import ReferenceOptimizer
from tests.hf.support import full_weights
from tests.hf.zoo.tiny import BATCH, FAMILIES, Family

__all__ = ["differences"]

STEPS = 3
LR, DECAY, EPS = 5e-3, 0.1, 1e-3
"""An epsilon that keeps the sign of gradients which are zero but for rounding out of AdamW's first steps."""


def differences(names: Iterable[str], accelerator: Accelerator) -> dict[str, str]:
    """Families whose weights after three steps on all ranks are not those of one process, and where. Collective."""
    found = {}
    for name in names:
        got = _train(FAMILIES[name], accelerator)
        want = _train_alone(FAMILIES[name])
        wrong = [key for key in want if not _close(got.get(key), want[key])]
        if wrong or got.keys() != want.keys():
            found[name] = ", ".join(wrong[:4]) or "names differ"
    return found


def _close(got: Tensor | None, want: Tensor) -> bool:
    return got is not None and bool((got - want).norm() <= 1e-3 * want.norm() + 1e-6)


def _train(family: Family, accelerator: Accelerator) -> dict[str, Tensor]:
    """Whole weights after the steps under the launch of this process. Collective."""
    model: Any = family.build()
    optimizer: Any = dmuon_hf.create_optimizer(model, lr=LR, weight_decay=DECAY, eps=EPS)
    model, optimizer = accelerator.prepare(model, optimizer)
    # The ranks of one tensor-parallel group get the same part of a batch.
    axis = _parts(accelerator)
    rank, rows = accelerator.process_index // axis, BATCH * axis // accelerator.num_processes
    for step in range(STEPS):
        batch = {key: value[rank * rows : (rank + 1) * rows] for key, value in family.batch(step).items()}
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = full_weights(accelerator.unwrap_model(model))
    accelerator.free_memory()
    return weights


def _parts(accelerator: Accelerator) -> int:
    return accelerator.parallelism_config.tp_size if accelerator.parallelism_config else 1


def _train_alone(family: Family) -> dict[str, Tensor]:
    """The same by a Muon in this process that shares no code with the package; routes and layouts are its own."""
    model = family.build()
    routes = dmuon_hf.routes(model)
    decayed = set(tf.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    optimizers = []
    for inside, decay in ((True, DECAY), (False, 0.0)):
        part = {key for key, _ in model.named_parameters() if (key in decayed) is inside}
        optimizers.append(_reference(model, part, routes, decay))
    for step in range(STEPS):
        model(**family.batch(step)).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return {key: parameter.detach() for key, parameter in model.named_parameters()}


def _reference(model: nn.Module, part: set[str], routes: dict[str, dmuon_hf.Route], decay: float) -> ReferenceOptimizer:
    """The optimizer of the parameters in `part`."""
    trainable = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    for key, parameter in trainable.items():
        parameter.requires_grad_(key in part)
    specs = {key: routes[key].spec for key in part}
    split = {key: functools.partial(_matrices, spec) for key, spec in specs.items() if spec is not None}
    optimizer = ReferenceOptimizer(
        model, split, lr=LR, weight_decay=decay, adamw_lr=LR, adamw_eps=EPS, adamw_weight_decay=decay, split=split
    )
    for parameter in trainable.values():
        parameter.requires_grad_(True)
    return optimizer


def _matrices(spec: MatrixSpec, stored: Tensor) -> list[Tensor]:
    """Views of the logical matrices of a weight or stack, `(groups, rows, in)` each."""
    views = []
    if spec.folded:
        stored = stored.flatten(1)
    for member in stored if stored.ndim == 3 else [stored]:
        rows = (member.T if spec.transposed else member).unflatten(0, (spec.groups, -1))
        views += rows.split(spec.sections or (rows.shape[1],), dim=1)
    # Turned or not, a matrix has the same update, but for learning-rate scales that these runs do not use.
    return views


def main() -> int:
    """Train all families under the launch that called this, and print which differ from one process."""
    warnings.filterwarnings("ignore")
    tf.logging.set_verbosity_error()
    logging.getLogger("dmuon_hf").setLevel(logging.ERROR)
    accelerator = Accelerator()
    chosen = [name for name in FAMILIES if _parts(accelerator) == 1 or FAMILIES[name].build().supports_tp_plan]
    found = differences(chosen, accelerator)
    if accelerator.is_main_process:
        launch = f"{accelerator.distributed_type.value} on {accelerator.num_processes} processes"
        sys.stdout.write(f"{launch}: {len(chosen) - len(found)} of {len(chosen)} families train as one process\n")
        for name, where in found.items():
            sys.stdout.write(f"{name}: {where}\n")
    accelerator.end_training()
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
