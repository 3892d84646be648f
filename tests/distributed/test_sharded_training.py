"""Models that plain torch has sharded train with Muon like one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.sharded_training import MODES, ShardedRun, train
from tests.distributed.training import HYPER, Run, batch_of, is_matrix, make_model
from tests.harness import models, run_ranks
from tests.harness.reference import ReferenceOptimizer


def reference(sharded: ShardedRun) -> dict[str, Any]:
    run = sharded.run
    model = make_model(run.model).to(run.dtype)
    optimizer = ReferenceOptimizer(model, is_matrix, **{**HYPER, **run.reference})
    history: dict[str, Any] = {"grads": [], "weights": [], "momenta": [], "norms": []}
    for step in range(run.steps):
        models.loss_of(model, batch_of(run, step)).backward()
        if sharded.max_norm is not None:
            history["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), sharded.max_norm)))
        history["grads"].append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        history["weights"].append({n: p.detach().clone() for n, p in model.named_parameters()})
        history["momenta"].append({n: buffer.clone() for n, buffer in optimizer.buffers.items()})
    return history


def check(sharded: ShardedRun, *, rtol: float = 2e-4) -> list[dict[str, Any]]:
    results = run_ranks(train, MODES[sharded.mode].world, sharded)
    expected = reference(sharded)
    for result in results:
        assert result["norms"] == pytest.approx(expected["norms"], rel=rtol)
        for kind in ("grads", "weights", "momenta"):
            for step, wanted in enumerate(expected[kind]):
                for name, want in wanted.items():
                    got = result[kind][step][name]
                    if want is None:
                        assert got is None
                        continue
                    error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12)
                    assert error < rtol, f"{sharded.mode} {kind} {name} step {step}: relative error {error:.2e}"
    return results


@pytest.mark.parametrize("model", ["uneven", "llama"])
@pytest.mark.parametrize("mode", MODES)
def test_sharded_model_trains_like_one_process(mode: str, model: str) -> None:
    check(ShardedRun(mode, Run("sharded", model)))
