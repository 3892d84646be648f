"""What the lockstep monitor makes of hosts that run ahead of a device."""

from __future__ import annotations

import threading

import pytest

from dmuon_hf.core.lockstep.positions import UNNAMED, Position, find_divergence
from dmuon_hf.core.lockstep.watch import _sample

SHARD, CHECKPOINT = "on channel shard", "on group gloo"


def waiting(rank: int, what: str, *, issued: int = 3, own: bool = False) -> Position:
    return Position(rank, "waits", what, step=1, seconds=60.0, own=own, issued={SHARD: issued})


@pytest.mark.parametrize("others", ["get_model_state_dict", "torch.distributed.barrier"])
def test_rank_that_stands_in_some_call_is_not_taken_to_be_in_another_collective(others: str) -> None:
    """What looks like any other call may be one that is no collective at all, such as the writing of a file."""
    positions = [waiting(0, UNNAMED), waiting(1, others, own=True), waiting(2, others, own=True)]
    assert find_divergence(positions, limit=10.0) is None


def test_ranks_in_different_known_collectives_with_equal_counts_have_diverged() -> None:
    positions = [waiting(0, "torch.distributed.barrier"), waiting(1, "torch.distributed.all_reduce")]
    verdict = find_divergence(positions, limit=10.0)
    assert verdict is not None
    assert "rank 0 waits in torch.distributed.barrier" in verdict


def test_hosts_that_stand_in_some_call_have_diverged_when_each_has_issued_what_the_other_has_not() -> None:
    first = Position(0, "waits", UNNAMED, step=1, issued={SHARD: 2, "of FSDP2 on group b": 1})
    second = Position(1, "waits", UNNAMED, step=1, issued={SHARD: 1, "of FSDP2 on group b": 2})
    assert find_divergence([first, second], limit=10.0) is not None


def test_checkpoint_that_another_thread_writes_is_no_divergence() -> None:
    """Rank 1 waits for data and its checkpoint is written; rank 0 waits for the step and still writes."""
    ahead = Position(0, "waits", "optimizer agreement", step=1, own=True, issued={SHARD: 2, CHECKPOINT: 1})
    behind = Position(1, "waits", UNNAMED, step=1, issued={SHARD: 1, CHECKPOINT: 2})
    assert find_divergence([ahead, behind], limit=10.0) is None


def test_save_on_one_rank_that_stands_in_it_by_name_is_a_divergence() -> None:
    saving = Position(
        0,
        "waits",
        "torch.distributed.gather_object",
        step=1,
        issued={SHARD: 1, CHECKPOINT: 2},
        stands_on=(CHECKPOINT,),
    )
    training = Position(1, "waits", UNNAMED, step=1, issued={SHARD: 2, CHECKPOINT: 1})
    verdict = find_divergence([saving, training], limit=10.0)
    assert verdict is not None
    assert "1 collective on group gloo" in verdict


def test_main_thread_is_looked_at_while_the_thread_of_autograd_runs_no_python() -> None:
    """``loss.item()`` after a backward pass whose hooks issued last."""
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert ended.ident is not None
    sample = _sample(ended.ident)
    assert sample is not None
    assert any("test_main_thread_is_looked_at" in place for place in sample.trail)
