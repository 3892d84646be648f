"""Muon under the stock Trainer: one process, FSDP2 and HSDP give the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.harness import run_ranks
from tests.hf.support import arguments, as_launched, finish, fsdp_env, full_weights, losses, make_trainer, tiny_llama


def _train(rank: int, world: int, directory: str, **overrides: Any) -> dict[str, Any]:
    as_launched()
    trainer = make_trainer(tiny_llama(), arguments(directory, **{"max_steps": 4} | overrides))
    trainer.train()
    result = {
        "fsdp2": trainer.accelerator.is_fsdp2,
        "losses": losses(trainer),
        "weights": full_weights(trainer.model),
        "matrices": trainer.optimizer.optimizer.ns_matrices,
    }
    finish()
    return result


def _assert_same_run(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for got, want in zip(actual["losses"], expected["losses"], strict=True):
        torch.testing.assert_close(torch.tensor(got[1:]), torch.tensor(want[1:]), rtol=2e-4, atol=1e-5)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], weight, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_trainer_on_hsdp_and_fsdp_equals_one_process(tmp_path: Path) -> None:
    alone = run_ranks(_train, 1, str(tmp_path / "one"), init=False, per_device_train_batch_size=8, timeout=100)[0]
    for world, replicas in ((4, 2), (2, 1)):
        results = run_ranks(
            _train,
            world,
            str(tmp_path / f"{world}"),
            init=False,
            env=fsdp_env(world, replicas=replicas),
            per_device_train_batch_size=8 // world,
            timeout=100,
        )
        assert all(result["fsdp2"] for result in results)
        assert sum(result["matrices"] for result in results) == alone["matrices"] == 4 * 14
        _assert_same_run(results[0], alone)
