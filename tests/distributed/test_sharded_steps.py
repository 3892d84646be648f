"""Sharded matrices of every layout step like one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dmuon_hf.core.plan import LinkCosts, MatrixSpec
from tests.distributed.sharded_setup import (
    ALL_FAR,
    ALL_NEAR,
    LAYOUTS,
    RULE,
    SHAPES,
    Steps,
    assert_same_steps,
    reference_steps,
    train_sharded,
)
from tests.harness import run_ranks

SPECS = {
    "wide": MatrixSpec(sections=(20, 13)),
    "square": MatrixSpec(transposed=True),
    "experts": MatrixSpec(sections=(6, 6)),
    "few": MatrixSpec(sections=(8, 12), transposed=True),
}


def check(run: Steps, **tolerance: float) -> list[dict]:
    results = run_ranks(train_sharded, LAYOUTS[run.layout].world, run)
    expected = reference_steps(run)
    for result in results:
        assert_same_steps(run, result, expected, **tolerance)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_steps_like_one_process(layout: str) -> None:
    check(Steps(layout, idle=(1,)))


@pytest.mark.parametrize(
    "change",
    [
        {"links": ALL_FAR},
        {"bucket_numel": 1 << 24},
        {"bucket_numel": 1},
        {"rule": replace(RULE, nesterov=False)},
        {"specs": SPECS},
        {"dtype": torch.float64},
    ],
    ids=["alike", "one_bucket", "bucket_of_one", "no_nesterov", "specs", "fp64"],
)
@pytest.mark.parametrize("layout", ["hsdp", "colwise"])
def test_every_setting_steps_like_one_process(layout: str, change: dict) -> None:
    check(Steps(layout, idle=(0,), steps=3, **change))


NORMUON = replace(RULE, update_rule="normuon", normuon_beta2=0.8)


@pytest.mark.parametrize(
    "layout", ["shard_3", "replicated", "hsdp_columns", "colwise", "rowwise", "expert_mesh", "three"]
)
def test_normuon_steps_like_one_process_in_every_layout(layout: str) -> None:
    # A matrix of one row lies whole on one rank, and its second moments on all.
    shapes = {**SHAPES, "row": (1, 9), "thin": (3, 1, 8)}
    check(Steps(layout, shapes, idle=(1,), steps=3, rule=NORMUON, specs=SPECS), rtol=1e-4)


@pytest.mark.parametrize("change", [{"links": ALL_FAR}, {"bucket_numel": 1}, {"dtype": torch.float64}], ids=str)
def test_normuon_steps_like_one_process_in_every_setting(change: dict) -> None:
    check(Steps("hsdp", idle=(0,), steps=3, rule=NORMUON, **change), rtol=1e-4)


@pytest.mark.parametrize(("layout", "links", "alike"), [("hsdp", ALL_NEAR, False), ("hsdp", ALL_FAR, True)])
def test_copies_share_the_work_where_links_are_cheap(layout: str, links: LinkCosts, alike: bool) -> None:
    results = run_ranks(train_sharded, 4, Steps(layout, {"wide": (33, 64), "square": (32, 32)}, steps=1, links=links))
    assert sum(result["ns_matrices"] for result in results) == (4 if alike else 2)


def test_stack_cut_along_its_members_sends_nothing() -> None:
    shapes = {"experts": (6, 12, 10), "few": (2, 9, 20)}
    for layout in ("shard_4", "hsdp", "expert_mesh", "replicated"):
        for result in run_ranks(train_sharded, 4, Steps(layout, shapes, steps=2, rule=NORMUON)):
            assert result["records"] == [], layout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_sixteen_bits_travel_whatever_the_gradient_measures(dtype: torch.dtype, scale: float) -> None:
    run = Steps(
        "hsdp_columns", {"wide": (33, 64), "square": (32, 32)}, ns={"dtype": dtype}, gradient_scale=scale, steps=2
    )
    results = check(run, rtol=5e-3)
    for result in results:
        assert {record[2] for record in result["records"]} == {dtype}
