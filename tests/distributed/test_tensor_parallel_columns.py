"""Tensor-parallel matrices that are orthogonalised where their parts lie: Gram matrices travel instead of updates."""

from __future__ import annotations

from typing import Any

import pytest

import dmuon_hf.core as dmuon
from tests.distributed.test_tensor_parallel import check
from tests.distributed.tp_training import TpRun, backward, prepare, prepare_model
from tests.distributed.training import HYPER, Run
from tests.harness import run_ranks
from tests.harness.comm import CollectiveCounter

ALWAYS = {"tp_distributed_gram": True, "tp_distributed_gram_policy": "always"}


@pytest.mark.parametrize("mode", ["tp_3", "shard_tp", "hsdp_tp"])
def test_matrices_in_parts_train_like_one_process(mode: str) -> None:
    check(TpRun(mode, Run("tp", "uneven", steps=3, muon=ALWAYS), everything=True, max_norm=0.05))


def traffic(rank: int, world: int, muon: dict[str, Any]) -> dict[str, int]:
    """Payload on the tensor-parallel axis in one step, without the agreement, by kind."""
    tp = TpRun("tp", Run("tp", "mlp", muon=muon))
    model, optimizer = prepare(tp)
    backward(model, tp, 0, rank)
    sent = {"all_to_all": 0, "all_reduce": 0}
    optimizer.step()
    with CollectiveCounter() as counter:
        optimizer.step()
    for record in counter.select(tag="dmuon_tensor"):
        if record.kind in sent and record.payload >= 4 * 16 * 16:
            sent[record.kind] += record.payload
    return sent


# Nine (32, 16) or (16, 32) matrices, all cut along the side of 32; two Gram matrices of (16, 16), one for each segment,
# have as many elements as an update.
GRAMS = 9 * 2 * 16 * 16 * 4


@pytest.mark.parametrize(
    ("muon", "grams"),
    [
        ({}, 0),
        ({"tp_distributed_gram_policy": "always"}, 0),
        ({"tp_distributed_gram": True}, 0),
        ({"tp_distributed_gram": True, "tp_distributed_gram_max_factor_to_scatter_ratio": 1.0}, GRAMS),
        ({"tp_distributed_gram": True, "ns_steps": 1}, GRAMS // 2),
        (ALWAYS, GRAMS),
    ],
)
def test_policy_and_ratio_decide_which_matrices_stay_in_parts(muon: dict[str, Any], grams: int) -> None:
    for sent in run_ranks(traffic, 2, muon):
        assert sent["all_reduce"] == grams
        assert (sent["all_to_all"] > 0) == (grams == 0)


def refusals(rank: int, world: int) -> list[str]:
    messages = []
    model = prepare_model(TpRun("tp", Run("tp", "mlp")))
    for options in (
        {"tp_distributed_gram": True, "ns_backend": "direct"},
        {"tp_distributed_gram_policy": "sometimes"},
        {"tp_distributed_gram_max_factor_to_scatter_ratio": 0.0},
    ):
        with pytest.raises(dmuon.ConfigurationError) as error:
            dmuon.Muon(model, **{**HYPER, **options})
        messages.append(str(error.value))
    return messages


def test_arguments_that_cannot_be_followed_are_refused_by_name() -> None:
    for messages in run_ranks(refusals, 2):
        assert "leave ns_backend at 'gram'" in messages[0]
        assert "tp_distributed_gram_policy must be one of" in messages[1]
        assert "max_factor_to_scatter_ratio must be above 0" in messages[2]
