from __future__ import annotations

import threading

import pytest
import torch

from dmuon_hf.core.errors import LockstepError
from dmuon_hf.core.ns import YOU_COEFFICIENTS, NewtonSchulz
from dmuon_hf.core.ns.agreement import RankGroup, require_same_on_all_ranks
from dmuon_hf.core.ns.support import CANDIDATES
from dmuon_hf.core.ns.syrk_kernel import SyrkKernel


def on_ranks(objects: list[NewtonSchulz]) -> list[Exception | None]:
    """What each of these ranks raises, one thread per rank."""
    barrier = threading.Barrier(len(objects), timeout=600)
    sent: list[torch.Tensor] = [torch.empty(0)] * len(objects)
    raised: list[Exception | None] = [None] * len(objects)

    def rank_main(rank: int) -> None:
        def agree(values: torch.Tensor) -> torch.Tensor:
            assert values.dtype == torch.float32
            sent[rank] = values
            barrier.wait()
            return torch.stack(sent).amax(0)

        try:
            require_same_on_all_ranks(objects[rank], RankGroup(agree, lambda value: value))
        except LockstepError as error:
            raised[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(objects))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def with_kernel(index: int) -> NewtonSchulz:
    ns = NewtonSchulz()
    object.__setattr__(ns, "_kernel", SyrkKernel(CANDIDATES[index]))
    return ns


def test_equal_objects_pass():
    assert on_ranks([NewtonSchulz(), NewtonSchulz(), NewtonSchulz()]) == [None] * 3


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_rank_with_another_kernel_stops_all(odd):
    objects = [with_kernel(1) if rank == odd else with_kernel(2) for rank in range(3)]
    raised = on_ranks(objects)
    assert all(isinstance(error, LockstepError) for error in raised)
    assert "kernel='quack'" in str(raised[odd])


@pytest.mark.parametrize("options", [{"backend": "direct"}, {"coefficients": YOU_COEFFICIENTS}], ids=str)
def test_one_rank_with_other_settings_stops_all(options):
    assert all(on_ranks([NewtonSchulz(), NewtonSchulz(**options)]))


def test_one_process_agrees_with_itself():
    require_same_on_all_ranks(NewtonSchulz(), RankGroup(lambda values: values, lambda value: value))
