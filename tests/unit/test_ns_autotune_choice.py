from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dmuon_hf.core.errors import DMuonError
from dmuon_hf.core.ns.autotune.candidates import Choice
from dmuon_hf.core.ns.autotune.measure import Finding, Operands, clock_of, fastest
from dmuon_hf.core.ns.library import LibraryKernel
from tests.unit.ns_autotune_fakes import CPU, TimedKernel, VirtualTime, product

DEFAULT, OTHER, THIRD = Choice("cublas"), Choice("cublas", (2,)), Choice("cublas", (4,))

PRODUCTS = [
    product(),
    product(rows=70, depth=600),
    product(row_major=False),
    product(batch=3),
    product(gram=False, depth=64),
    product(gram=False, depth=64, fused=True),
    product(gram=False, depth=64, fused=True, batch=2),
]


@pytest.fixture
def time():
    return VirtualTime()


def choose(time: VirtualTime, operands: Operands | None = None, **kernels: TimedKernel) -> Finding:
    """``fastest`` of kernels under the names ``default``, ``other`` and ``third``."""
    names = {"default": DEFAULT, "other": OTHER, "third": THIRD}
    operands = operands or Operands.of(product(), CPU)
    return fastest(operands, {names[name]: kernel for name, kernel in kernels.items()}, time.clock)


def test_fastest_sound_candidate_is_chosen(time):
    finding = choose(time, default=TimedKernel(time, 3.0), other=TimedKernel(time, 2.0), third=TimedKernel(time, 1.6))
    assert finding.choice == THIRD
    assert finding.speeds == pytest.approx({DEFAULT: 1.0, OTHER: 1.5, THIRD: 1.875})
    assert finding.refused == {}


@pytest.mark.parametrize(("seconds", "choice"), [(0.98, DEFAULT), (0.96, OTHER), (1.0, DEFAULT), (1.5, DEFAULT)])
def test_only_a_clear_margin_moves_the_choice_from_the_default(time, seconds, choice):
    assert choose(time, default=TimedKernel(time, 1.0), other=TimedKernel(time, seconds)).choice == choice


def test_one_slow_round_of_the_default_does_not_move_the_choice(time):
    assert choose(time, default=TimedKernel(time, [1.0] * 5 + [9.0, 1.0]), other=TimedKernel(time)).choice == DEFAULT


@pytest.mark.parametrize(("slow_rounds", "choice"), [(1, OTHER), (2, DEFAULT)])
def test_candidate_that_is_often_slower_is_not_taken(time, slow_rounds, choice):
    mixed = TimedKernel(time, [0.8] * (1 + 7 - slow_rounds) + [1.1] * slow_rounds)
    assert choose(time, default=TimedKernel(time), other=mixed).choice == choice


def test_candidate_whose_best_time_is_no_better_is_not_taken(time):
    default = TimedKernel(time, [1.0, *[1.1] * 3, 1.0, *[1.1] * 3])
    assert choose(time, default=default, other=TimedKernel(time, 0.99)).choice == DEFAULT


def one_element(result: Tensor) -> Tensor:
    result[..., 40, 3] = result[..., 40, 41]
    return result


def swapped_tiles(result: Tensor) -> Tensor:
    result = result.clone()
    result[..., 16:32, 0:16], result[..., 48:64, 0:16] = (
        result[..., 48:64, 0:16].clone(),
        result[..., 16:32, 0:16].clone(),
    )
    return result


SPOILT = {
    "one element": one_element,
    "swapped tiles": swapped_tiles,
    "upper half missing": lambda result: result.tril(),
    "diagonal missing": lambda result: result - torch.diag_embed(result.diagonal(dim1=-2, dim2=-1)),
    "not a number": lambda result: torch.full_like(result, float("nan")),
    "a little too much": lambda result: result * 1.06,
    "wrong shape": lambda result: result[..., 1:, :],
    "wrong dtype": lambda result: result.double(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("gram", [True, False])
def test_wrong_candidate_is_refused_however_fast(time, spoilt, dtype, gram):
    case = product(dtype=dtype, gram=gram, depth=640 if gram else 64, fused=not gram)
    wrong = TimedKernel(time, 0.01, SPOILT[spoilt])
    finding = choose(time, Operands.of(case, CPU), default=TimedKernel(time), other=wrong)
    assert finding.choice == DEFAULT
    assert list(finding.refused) == [OTHER]
    assert wrong.calls == 1


def test_candidate_without_its_third_matrix_is_refused(time):
    class Forgetful(TimedKernel):
        def symmetric(self, A, B, C=None, **scalars):
            return super().symmetric(A, B, None, **scalars)

    operands = Operands.of(product(gram=False, depth=64, fused=True), CPU)
    assert choose(time, operands, default=TimedKernel(time), other=Forgetful(time, 0.01)).choice == DEFAULT


def test_candidate_that_multiplies_the_first_matrix_by_itself_is_refused(time):
    class Confused(TimedKernel):
        def symmetric(self, A, B, C=None, **scalars):
            return super().symmetric(A, A, C, **scalars)

    operands = Operands.of(product(gram=False, depth=64), CPU)
    assert choose(time, operands, default=TimedKernel(time), other=Confused(time, 0.01)).choice == DEFAULT


def test_refusal_says_how_far_off_the_result_is(time):
    finding = choose(time, default=TimedKernel(time), other=TimedKernel(time, spoil=lambda result: 2.0 * result))
    assert "off by" in finding.refused[OTHER]


def test_raising_candidate_is_refused_with_its_error(time):
    def explode(result: Tensor) -> Tensor:
        raise RuntimeError("ptxas fatal")

    finding = choose(time, default=TimedKernel(time), other=TimedKernel(time, 0.01, explode))
    assert finding.choice == DEFAULT
    assert finding.refused == {OTHER: "RuntimeError: ptxas fatal"}


def test_candidate_that_fails_while_it_is_timed_is_refused(time):
    def explode_later(result: Tensor) -> Tensor:
        if flaky.calls > 3:
            raise RuntimeError("illegal memory access")
        return result

    flaky = TimedKernel(time, 0.9, explode_later)
    finding = choose(time, default=TimedKernel(time), other=flaky)
    assert finding.choice == DEFAULT
    assert "illegal memory access" in finding.refused[OTHER]


def test_unsound_default_is_left_without_a_margin(time):
    wrong = TimedKernel(time, spoil=lambda result: 2.0 * result)
    finding = choose(time, default=wrong, other=TimedKernel(time, 5.0), third=TimedKernel(time, 4.9))
    assert finding.choice == OTHER
    assert list(finding.speeds) == [OTHER, THIRD]


def test_no_sound_candidate_is_an_error_that_names_all(time):
    def wrong(result: Tensor) -> Tensor:
        return 2.0 * result

    with pytest.raises(DMuonError, match=r"gram 64x96 float32 .*cublas: .*cublas\(2\): .*Leave autotune out"):
        choose(time, default=TimedKernel(time, spoil=wrong), other=TimedKernel(time, spoil=wrong))


def test_candidates_take_turns_from_another_start_each_round(time):
    order: list[str] = []
    kernels = {
        name: TimedKernel(time, spoil=lambda result, name=name: order.append(name) or result)  # type: ignore[func-returns-value]
        for name in ("default", "other", "third")
    }
    choose(time, **kernels)
    checks, rounds = order[:3], order[3:]
    assert checks == ["default", "other", "third"]
    assert rounds[:3] == ["default", "other", "third"]
    assert rounds[3:9] == ["other", "third", "default", "third", "default", "other"]
    assert len(rounds) == 3 * 7


def test_hopeless_candidate_is_timed_in_two_rounds_only(time):
    slow = TimedKernel(time, 10.0)
    assert OTHER not in choose(time, default=TimedKernel(time), other=slow).speeds
    assert slow.calls == 1 + 2


def test_short_products_are_repeated_until_the_sample_is_long(time):
    kernel = TimedKernel(time, 1e-4)
    choose(time, default=kernel, other=TimedKernel(time, 1e-4))
    assert kernel.calls == 1 + 1 + 7 * 20


def test_long_products_are_timed_in_three_rounds(time):
    kernel = TimedKernel(time, 20.0)
    choose(time, default=kernel, other=TimedKernel(time, 20.0))
    assert kernel.calls == 1 + 3


def test_one_candidate_alone_is_checked_and_not_timed(time):
    kernel = TimedKernel(time)
    assert choose(time, default=kernel).choice == DEFAULT
    assert kernel.calls == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
@pytest.mark.parametrize("blocks", [1, 4])
def test_library_product_is_sound(case, dtype, blocks):
    assert Operands.of(case._replace(dtype=dtype), CPU).problem(LibraryKernel(blocks)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_deep_library_product_is_sound(dtype):
    assert Operands.of(product(rows=48, depth=30_000, dtype=dtype), CPU).problem(LibraryKernel()) is None


@pytest.mark.parametrize(("precision", "sound"), [("highest", False), ("medium", True)])
def test_float32_product_may_be_as_rough_as_the_user_allows(time, monkeypatch, precision, sound):
    class Rough(TimedKernel):
        def gram(self, X):
            return super().gram(X.bfloat16().float())

    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: precision)
    assert (Operands.of(product(), CPU).problem(Rough(time)) is None) is sound


class StandInEvent:
    """Of a device whose clock shows the number of calls so far, in milliseconds."""

    calls = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at: int | None = None
        self.is_known = False

    def record(self) -> None:
        self.at = StandInEvent.calls

    def synchronize(self) -> None:
        self.is_known = True

    def elapsed_time(self, stop: StandInEvent) -> float:
        assert self.at is not None and stop.at is not None and stop.is_known
        return float(stop.at - self.at)


def test_accelerator_is_timed_by_its_events(monkeypatch):
    def run() -> None:
        StandInEvent.calls += 2

    monkeypatch.setattr("torch.get_device_module", lambda device: SimpleNamespace(Event=StandInEvent))
    monkeypatch.setattr("torch.accelerator.device_index", lambda index: nullcontext())
    assert clock_of(torch.device("cuda", 1))(run, 5) == pytest.approx(2e-3)
    assert StandInEvent.calls == 10


def test_cpu_is_timed_by_processor_time(monkeypatch):
    monkeypatch.setattr("time.process_time", iter([1.0, 4.0]).__next__)
    assert clock_of(CPU)(lambda: None, 3) == 1.0
