"""What a step on sharded matrices sends, when, and in how many calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmuon_hf.core.ns import NewtonSchulz
from dmuon_hf.core.sharded.exchange import Exchange, Shipment
from tests.distributed.sharded_setup import (
    ALL_FAR,
    ALL_NEAR,
    LAYOUTS,
    Steps,
    fresh_states,
    make_source,
    sharded_params,
    step_once,
    train_sharded,
)
from tests.harness import run_ranks

EVEN = {"a": (32, 64), "b": (64, 32), "c": (32, 32), "d": (32, 32)}
NUMEL = sum(rows * columns for rows, columns in EVEN.values())


@pytest.mark.parametrize("bucket_numel", [2048, 1 << 24])
@pytest.mark.parametrize(
    ("layout", "links", "elements"),
    [
        # A direction comes from all other ranks of a copy, the update goes to all other ranks.
        ("shard_4", ALL_NEAR, 2 * 3 / 4),
        ("columns", ALL_NEAR, 2 * 3 / 4),
        ("colwise", ALL_NEAR, 2 * 3 / 4),
        ("hsdp", ALL_NEAR, 1 / 2 + 3 / 2),
        ("hsdp", ALL_FAR, 2 * (1 / 2 + 1 / 2)),
        ("replicated", ALL_NEAR, 0),
        ("one_rank", ALL_NEAR, 0),
    ],
)
def test_bytes_equal_the_formula(layout: str, links: Any, elements: float, bucket_numel: int) -> None:
    run = Steps(layout, dict(EVEN), steps=1, links=links, bucket_numel=bucket_numel, ns={"dtype": torch.bfloat16})
    results = run_ranks(train_sharded, LAYOUTS[layout].world, run)
    sent = sum(record[1] for result in results for record in result["records"] if record[0] == "all_to_all")
    assert sent == 2 * elements * NUMEL


def events_of_a_step(rank: int, world: int, run: Steps) -> tuple[list[str], int]:
    events: list[str] = []
    waiting = most = 0
    issue, wait = Exchange.issue, Shipment.wait

    def issued(self: Exchange, *args: Any) -> Any:
        nonlocal waiting, most
        events.append("send")
        waiting += 1
        most = max(most, waiting)
        return issue(self, *args)

    def waited(self: Shipment) -> Any:
        nonlocal waiting
        events.append("wait")
        waiting -= 1
        return wait(self)

    ns = NewtonSchulz("direct")

    def orthogonalize(matrices: torch.Tensor, *, steps: int | None = None) -> torch.Tensor:
        events.append(f"ns {len(matrices)}x{tuple(matrices.shape[1:])}")
        return ns(matrices, steps=steps)

    params = sharded_params(run)
    state = fresh_states(run, params)
    source = make_source(run, params)
    Exchange.issue, Shipment.wait = issued, waited  # type: ignore[method-assign]
    step_once(run, source, params, state, 0, orthogonalize)
    return events, most


def test_next_bucket_travels_while_one_is_orthogonalised_and_less_than_two_are_on_their_way() -> None:
    shapes = {f"m{index}": (32, 32) for index in range(6)}
    for events, most in run_ranks(events_of_a_step, 2, Steps("shard_2", shapes, bucket_numel=1024)):
        # Three matrices a rank, each a bucket: directions out, then for each bucket the next one's out, its own in.
        assert events == [
            *("send", "send", "wait", "ns 1x(32, 32)", "send"),
            *("send", "wait", "ns 1x(32, 32)", "wait", "send"),
            *("wait", "ns 1x(32, 32)", "wait", "send", "wait"),
        ]
        # Two shipments are a bucket: directions out, updates home.
        assert most == 3


def test_matrices_of_one_shape_in_a_bucket_are_one_call() -> None:
    shapes = {f"m{index}": (32, 32) for index in range(6)} | {"wide": (8, 64), "flat": (8, 64)}
    for events, _ in run_ranks(events_of_a_step, 2, Steps("shard_2", shapes, bucket_numel=1 << 24)):
        calls = [event for event in events if event.startswith("ns")]
        assert sorted(calls) == ["ns 1x(8, 64)", "ns 3x(32, 32)"]
