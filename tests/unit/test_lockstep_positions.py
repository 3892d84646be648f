"""What positions of ranks prove, and what they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dmuon_hf.core.lockstep.positions import MIXED_PATIENCE, Position, find_divergence

LIMIT = 10.0


def waits(rank: int, what: str = "gather of unit layers.3", **fields: object) -> Position:
    base = Position(rank=rank, state="waits", what=what, step=5, seconds=LIMIT + 1, own=True)
    return replace(base, **fields)


def busy(rank: int, **fields: object) -> Position:
    return replace(Position(rank=rank, state="busy", what="training", step=5), **fields)


def test_nobody_waiting_proves_nothing() -> None:
    assert find_divergence([busy(0, issued={"g": 1}), busy(1, issued={"g": 7})], limit=LIMIT) is None


def test_rank_that_waits_for_a_busy_one_proves_nothing() -> None:
    ranks = [waits(0, issued={"g": 9, "h": 3}, seconds=3600.0), busy(1, issued={"g": 4, "h": 2})]
    assert find_divergence(ranks, limit=LIMIT) is None


def test_rank_far_behind_in_a_collective_of_its_own_proves_nothing() -> None:
    ranks = [waits(0, issued={"g": 9, "h": 3}), waits(1, "all-gather", own=False, issued={"g": 4, "h": 3})]
    assert find_divergence(ranks, limit=LIMIT) is None


def test_crossed_counts_of_waiting_ranks_name_both_places() -> None:
    a = waits(0, "gather of unit layers.3", issued={"on channel x": 4, "on channel y": 7})
    b = waits(1, "optimizer agreement", issued={"on channel x": 5, "on channel y": 5})
    text = find_divergence([a, b], limit=LIMIT)
    assert text is not None
    assert "rank 0 waits in gather of unit layers.3 (step 5)" in text
    assert "rank 1 waits in optimizer agreement (step 5)" in text
    assert "2 collectives on channel y that rank 1 has not" in text
    assert "1 collective on channel x that rank 0 has not" in text


def test_records_of_a_group_without_rank_0_are_compared() -> None:
    first = waits(0, record={"replica 0": (1, ("gather of unit a",))})
    second = busy(1, record={"replica 1": (1, ("gather of unit a",))})
    third = busy(2, record={"replica 1": (1, ("gather of unit b",))})
    text = find_divergence([first, second, third], limit=LIMIT)
    assert text is not None
    assert "collective number 1 on channel replica 1: rank 1 issued the gather of unit a, rank 2 the" in text


def test_crossed_counts_with_a_busy_rank_prove_nothing() -> None:
    a = waits(0, issued={"x": 4, "y": 7})
    assert find_divergence([a, busy(1, issued={"x": 5, "y": 5})], limit=LIMIT) is None


def test_counts_of_groups_that_ranks_do_not_share_prove_nothing() -> None:
    ranks = [waits(0, issued={"column 0": 4, "all": 2}), waits(1, issued={"column 1": 9, "all": 2})]
    assert find_divergence(ranks, limit=LIMIT) is None


def test_different_records_name_the_first_difference() -> None:
    a = waits(0, record={"shard": (7, ("gather of unit a", "gather of unit b"))})
    b = busy(1, record={"shard": (9, ("gather of unit a", "gather of unit c", "gather of unit d", "gather of unit e"))})
    text = find_divergence([a, b], limit=LIMIT)
    assert text is not None
    assert "number 7 on channel shard" in text
    assert "rank 0 issued the gather of unit b, rank 1 the gather of unit c" in text


def test_record_that_is_a_beginning_of_the_other_proves_nothing() -> None:
    a = waits(0, record={"shard": (2, ("a", "b"))})
    assert find_divergence([a, waits(1, record={"shard": (3, ("a", "b", "c"))})], limit=LIMIT) is None


def test_records_whose_kept_ends_do_not_overlap_prove_nothing() -> None:
    a = waits(0, record={"shard": (2, ("a", "b"))})
    assert find_divergence([a, waits(1, record={"shard": (90, ("x", "y"))})], limit=LIMIT) is None


def test_rank_that_raised_is_named_with_its_error() -> None:
    gone = Position(rank=1, state="ended", what="ended with ValueError: boom", step=4, raised=True)
    text = find_divergence([waits(0), gone], limit=LIMIT)
    assert text is not None
    assert "rank 1 ended with ValueError: boom (step 4)" in text
    assert "traceback of rank 1" in text


@pytest.mark.parametrize(("issued", "proven"), [(6, True), (5, False)])
def test_rank_that_left_matters_to_those_that_have_issued_more(issued: int, proven: bool) -> None:
    gone = Position(rank=1, state="ended", what="has ended", step=4, issued={"g": 5})
    assert (find_divergence([waits(0, issued={"g": issued}), gone], limit=LIMIT) is not None) is proven


@pytest.mark.parametrize(("seconds", "proven"), [(MIXED_PATIENCE * LIMIT + 1, True), (LIMIT + 1, False)])
def test_different_operations_at_equal_counts_need_patience(seconds: float, proven: bool) -> None:
    a = waits(0, "FSDP2 all-gather of layers.0", own=False, issued={"g": 5}, seconds=seconds)
    b = waits(1, "torch.distributed.broadcast", own=False, issued={"g": 5}, seconds=seconds)
    assert (find_divergence([a, b], limit=LIMIT) is not None) is proven


def test_same_operation_at_equal_counts_is_a_slow_network() -> None:
    a = waits(0, "FSDP2 all-gather of layers.0", own=False, issued={"g": 5}, seconds=900.0)
    b = waits(1, "FSDP2 all-gather of layers.1", own=False, issued={"g": 5}, seconds=900.0)
    assert find_divergence([a, b], limit=LIMIT) is None


def test_rank_that_may_wait_for_another_stage_is_not_mixed_up_with_its_own() -> None:
    patient = MIXED_PATIENCE * LIMIT + 1
    ranks = [waits(2, "recv", own=False, beyond=True, seconds=patient), waits(3, "send", own=False, seconds=patient)]
    assert find_divergence(ranks, limit=LIMIT) is None


def test_many_ranks_at_one_place_are_one_clause() -> None:
    ranks = [waits(rank, "optimizer agreement", issued={"x": 1, "y": 2}) for rank in (0, 1, 2, 4)]
    ranks.insert(3, waits(3, issued={"x": 2, "y": 1}))
    text = find_divergence(ranks, limit=LIMIT)
    assert text is not None
    assert "each of ranks 0-2, 4 waits in optimizer agreement (step 5)" in text


def test_position_survives_the_store() -> None:
    position = waits(3, record={"shard": (7, ("a", "b"))}, issued={"g": 2}, trail=("f.py:3 in f",))
    assert Position.from_json(position.to_json()) == position
