from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dmuon_hf.core.errors import ConfigurationError, DMuonError, LockstepError
from dmuon_hf.core.ns import NewtonSchulz, agreement
from dmuon_hf.core.ns.agreement import Call, RankGroup, autotune_on_first_rank, require_same_on_all_ranks
from dmuon_hf.core.ns.autotune import Choice, tuner
from dmuon_hf.core.optim.update import MAX_BATCH_NUMEL, MuonRule
from dmuon_hf.core.optim.workload import newton_schulz_calls
from tests.unit.muon_fakes import FUSED, FakeMatrix, FakeUnit
from tests.unit.ns_autotune_fakes import Bench
from tests.unit.ns_reference import gaussian

TWO = Choice("cublas", (2,))
CALLS = [Call((64, 96), torch.float32)]


@pytest.fixture
def bench(monkeypatch, tmp_path):
    made = Bench(monkeypatch, tmp_path)
    made.seconds = {TWO: 0.5}
    return made


def on_ranks(world: int, main: Callable[[RankGroup, int], Any]) -> list[Any]:
    """What ``main`` returns or raises on each rank, one thread per rank."""
    barrier = threading.Barrier(world, timeout=600)
    sent: list[torch.Tensor] = [torch.empty(0)] * world
    parcel: list[Any] = [None]
    outcomes: list[Any] = [None] * world

    def rank_main(rank: int) -> None:
        def maximum(values: torch.Tensor) -> torch.Tensor:
            assert values.dtype == torch.float32
            sent[rank] = values
            barrier.wait()
            agreed = torch.stack(sent).amax(0)
            barrier.wait()
            return agreed

        def from_first(value: Any) -> Any:
            if rank == 0:
                parcel[0] = value
            barrier.wait()
            received = parcel[0]
            barrier.wait()
            return received

        try:
            outcomes[rank] = main(RankGroup(maximum, from_first, is_first=rank == 0), rank)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_any_is_true_if_one_rank_says_so():
    assert on_ranks(3, lambda ranks, rank: ranks.any(rank == 2)) == [True] * 3
    assert on_ranks(3, lambda ranks, rank: ranks.any(False)) == [False] * 3


def test_all_ranks_take_the_choices_of_the_first(bench):
    def main(ranks: RankGroup, rank: int) -> dict[Any, Choice]:
        ns = NewtonSchulz(autotune=True)
        autotune_on_first_rank(ns, CALLS if rank == 0 else [], ranks)
        assert ns.tuner is not None
        return dict(ns.tuner.choices)

    first, *others = on_ranks(3, main)
    assert set(first.values()) == {TWO}
    assert others == [first] * 2


def test_what_a_rank_had_tuned_before_is_dropped(bench):
    def main(ranks: RankGroup, rank: int) -> str:
        ns = NewtonSchulz(autotune=True)
        if rank == 1:
            ns(gaussian(48, 64))
        require_same_on_all_ranks(ns, ranks)
        autotune_on_first_rank(ns, CALLS, ranks)
        return ns.fingerprint

    first, second = on_ranks(2, main)
    assert first == second
    assert "48x64" not in second


def test_nothing_is_tuned_after_the_agreement(bench):
    ns = NewtonSchulz(autotune=True)
    autotune_on_first_rank(ns, CALLS, RankGroup(lambda values: values, lambda value: value))
    calls = bench.calls(Choice("cublas", (4,)))
    ns(gaussian(48, 64))
    assert bench.calls(Choice("cublas", (4,))) == calls


def test_failure_on_the_first_rank_is_raised_on_all(bench, monkeypatch):
    def fail(*_: object) -> None:
        raise MemoryError("no room for the operands")

    monkeypatch.setattr(tuner, "fastest", fail)
    first, *others = on_ranks(3, lambda ranks, rank: autotune_on_first_rank(NewtonSchulz(autotune=True), CALLS, ranks))
    assert isinstance(first, MemoryError)
    for error in others:
        assert isinstance(error, DMuonError)
        assert "failed on the first data-parallel rank: MemoryError: no room for the operands" in str(error)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_on_different_machines_are_refused_everywhere(bench, monkeypatch, odd):
    here = threading.local()
    monkeypatch.setattr(agreement, "machine", lambda device: {"device": "A100" if here.rank == odd else "H100"})

    def main(ranks: RankGroup, rank: int) -> None:
        here.rank = rank
        autotune_on_first_rank(NewtonSchulz(autotune=True), CALLS, ranks)

    outcomes = on_ranks(3, main)
    assert all(isinstance(error, ConfigurationError) for error in outcomes)
    assert "autotune needs equal machines" in str(outcomes[odd])
    assert "A100" in str(outcomes[odd])
    assert bench.total == 0


def test_ranks_that_tune_and_ranks_that_do_not_are_refused(bench):
    outcomes = on_ranks(2, lambda ranks, rank: require_same_on_all_ranks(NewtonSchulz(autotune=rank == 0), ranks))
    assert all(isinstance(error, LockstepError) for error in outcomes)
    assert "autotune=True" in str(outcomes[0])


def test_ranks_that_end_up_with_other_choices_are_refused(bench, monkeypatch):
    def forget(ns: NewtonSchulz, choices: Any) -> None:
        ns.tuner.adopt({} if threading.current_thread().name == "odd" else choices)  # type: ignore[union-attr]

    monkeypatch.setattr(NewtonSchulz, "adopt", forget)

    def main(ranks: RankGroup, rank: int) -> None:
        threading.current_thread().name = "odd" if rank == 1 else "even"
        autotune_on_first_rank(NewtonSchulz(autotune=True), CALLS, ranks)

    assert all(isinstance(error, LockstepError) for error in on_ranks(2, main))


def matrix(name: str, shape: tuple[int, int], owner: int, **options: Any) -> FakeMatrix:
    dtype = options.pop("dtype", torch.float32)
    spec = options.pop("spec", None)
    param = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    return FakeMatrix(name, param, spec or type(FUSED)(), owner == 0, (owner, 0))


def calls_of(*matrices: FakeMatrix, ns_steps: int = 5) -> set[Call]:
    rule = MuonRule(0.1, 0.9, nesterov=True, ns_steps=ns_steps, weight_decay=0.0, lr_scale="none")
    units = [FakeUnit("first", list(matrices[:2]), []), FakeUnit("second", list(matrices[2:]), [])]
    return newton_schulz_calls(units, {id(m.param): rule for m in matrices})


def test_calls_are_the_batches_of_every_owner():
    found = calls_of(
        *(matrix(f"a{i}", (20, 12), owner=0) for i in range(3)),
        matrix("b", (20, 12), owner=1),
        matrix("c", (12, 20), owner=1),
        ns_steps=7,
    )
    assert found == {
        Call((3, 20, 12), torch.float32, 7),
        Call((1, 20, 12), torch.float32, 7),
        Call((1, 12, 20), torch.float32, 7),
    }


def test_calls_are_of_logical_matrices_in_the_dtype_of_the_momentum():
    found = calls_of(
        matrix("fused", (18, 20), owner=0, spec=FUSED, dtype=torch.bfloat16),
        matrix("wide", (6, 20), owner=0, dtype=torch.float64),
    )
    assert found == {
        Call((1, 10, 20), torch.float32, 5),
        Call((1, 8, 20), torch.float32, 5),
        Call((1, 6, 20), torch.float64, 5),
    }


def test_batches_are_cut_as_in_a_step():
    found = calls_of(*(matrix(f"a{i}", (MAX_BATCH_NUMEL // 8192, 4096), owner=0) for i in range(5)))
    assert {call.shape[0] for call in found} == {2, 1}
