"""On an accelerator the streams of the runtime are in order: no race, no memory given back while it is in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import stream_scenarios as scenarios
from tests.distributed.stream_scenarios import Judged
from tests.distributed.tp_training import TpRun
from tests.distributed.training import Run, shards_of_rows
from tests.harness import run_ranks

ROWS: dict[str, Any] = {"param_policy_fn": shards_of_rows}
LAYOUTS: dict[str, tuple[Run | TpRun, int]] = {
    "even shards": (Run("z3", "mlp", dedicate={"muon_forward_unshard": "all_gather"}), 2),
    "even shards under HSDP": (Run("hsdp", "mlp", dedicate={"muon_forward_unshard": "all_gather"}), 4),
    "rows": (Run("z3", "mlp", pure=True, dedicate=ROWS, muon={"post_step_prefetch_sharded_adamw": True}), 2),
    "rows under HSDP": (Run("hsdp", "mlp", pure=True, dedicate=ROWS), 4),
    "replicas": (Run("replicate", "mlp"), 2),
    "tensor-parallel parts": (TpRun("shard_tp", Run("tp", "mlp")), 4),
    "parts in kept buffers": (TpRun("tp", Run("tp", "mlp", dedicate={"tp_buffer_reuse": True})), 2),
    "replicas of tensor-parallel parts": (TpRun("ddp_tp", Run("tp", "mlp")), 4),
}
WORLDS = {"z2": 2, "z3": 2, "hsdp": 4, "hsdp_sync": 4}
# Looks without a thread of the lockstep monitor: it uses no stream.
QUIET = {"DMUON_HANG_SECONDS": "0"}


def judged(run: Run | TpRun, program: str, *args: object, world: int | None = None, nccl: bool = True) -> list[Judged]:
    world = world or WORLDS[run.mode]
    results: list[Judged] = run_ranks(scenarios.judge, world, program, run, *args, nccl=nccl, env=QUIET)
    for _, accesses in results:
        assert accesses["NCCL's stream of dmuon_shard"] > 0, "the path for accelerators was not taken"
    return results


def assert_in_order(results: list[Judged]) -> None:
    assert [problems for problems, _ in results] == [[]] * len(results)


@pytest.mark.parametrize("mode", ["z3", "hsdp"])
@pytest.mark.parametrize("program", [name for name in scenarios.PROGRAMS if name != "save_and_load_sharded"])
def test_streams_are_in_order(mode: str, program: str) -> None:
    assert_in_order(judged(Run(mode, "mlp"), program))


@pytest.mark.parametrize("mode", ["z2", "hsdp_sync"])
@pytest.mark.parametrize("program", ["train", "evaluate_between_backward_and_step", "step_twice"])
def test_streams_are_in_order_with_weights_kept_and_with_a_publish_in_the_step(mode: str, program: str) -> None:
    assert_in_order(judged(Run(mode, "mlp"), program))


@pytest.mark.parametrize("mode", ["z3", "hsdp"])
def test_streams_are_in_order_around_sharded_checkpoints(mode: str, tmp_path: Path) -> None:
    assert_in_order(judged(Run(mode, "mlp"), "save_and_load_sharded", tmp_path / "checkpoint"))


@pytest.mark.parametrize("mode", ["z2", "hsdp"])
@pytest.mark.parametrize("checkpointing", ["reentrant", "nonreentrant"])
def test_streams_are_in_order_with_activation_checkpointing_and_accumulation(mode: str, checkpointing: str) -> None:
    assert_in_order(judged(Run(mode, "llama_tied", accumulate=2, checkpointing=checkpointing), "train"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", ["evaluate", "save_and_load", "step_twice"])
def test_streams_are_in_order_in_every_layout(layout: str, program: str) -> None:
    run, world = LAYOUTS[layout]
    assert_in_order(judged(run, program, world=world))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_waits_are_found_in_every_layout(layout: str) -> None:
    run, world = LAYOUTS[layout]
    for problems, _ in run_ranks(scenarios.judge_with_a_fault, world, "uses without waiting", "train", run, env=QUIET):
        assert any("race" in problem for problem in problems), problems


@pytest.mark.parametrize("separate", [False, True])
def test_gathers_of_rows_have_a_side_stream_of_their_own_if_asked(separate: bool) -> None:
    run = Run("z3", "mlp", pure=True, dedicate=ROWS, muon={"sharded_adamw_unshard_separate_stream": separate})
    for rows, others in run_ranks(scenarios.streams_of_gathers, 2, run, env=QUIET):
        assert len(rows - others) == separate and rows and others


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("mode", ["z3", "hsdp"])
def test_streams_are_in_order_at_any_prefetch_depth(mode: str, depth: int) -> None:
    assert_in_order(judged(Run(mode, "mlp", muon={"forward_prefetch_depth": depth}), "evaluate"))


def test_streams_are_in_order_when_the_second_stage_is_waited_for_at_once() -> None:
    assert_in_order(judged(Run("hsdp", "uneven", dedicate={"delay_stage2_to_optimizer": False}), "train"))


@pytest.mark.parametrize("mode", ["z3", "hsdp"])
def test_streams_are_in_order_on_an_accelerator_without_nccl(mode: str) -> None:
    assert_in_order(judged(Run(mode, "uneven"), "train", nccl=False))


@pytest.mark.parametrize(("mode", "world", "seed"), [("z2", 2, 2), ("z3", 3, 3), ("hsdp", 4, 204)])
def test_streams_are_in_order_and_results_right_after_any_order_of_operations(mode: str, world: int, seed: int) -> None:
    results = run_ranks(scenarios.judge_interleaving, world, mode, seed, 40, timeout=120, env=QUIET)
    assert_in_order(results)


@pytest.mark.parametrize(
    ("fault", "mode", "program", "words"),
    [
        ("issues without waiting", "z3", "train", "race on the weights"),
        ("uses without waiting", "z3", "train", "race on the weights"),
        ("drops in flight", "hsdp", "drop_the_model_after_step", "early free"),
        ("copies masters on the side", "z3", "load_weights_after_a_gather_ahead", "race"),
        ("gathers without the publish", "hsdp", "train", "race"),
        ("publishes over a copy that is read", "hsdp", "publish_after_a_gather_ahead", "race"),
    ],
)
def test_a_fault_seeded_into_the_runtime_is_found(fault: str, mode: str, program: str, words: str) -> None:
    results = run_ranks(scenarios.judge_with_a_fault, WORLDS[mode], fault, program, Run(mode, "mlp"), env=QUIET)
    for problems, _ in results:
        assert any(words in problem for problem in problems), problems


def test_side_stream_waits_for_the_publish_and_computation_only_for_the_weights() -> None:
    assert run_ranks(scenarios.compute_behind_a_publish, 4, Run("hsdp", "mlp"), env=QUIET) == [(False, True)] * 4


def test_buffer_that_another_stream_waits_for_is_kept_until_that_one_is_done() -> None:
    assert run_ranks(scenarios.wait_on_another_stream, 1, told=True, init=False) == [[]]
    problems = run_ranks(scenarios.wait_on_another_stream, 1, told=False, init=False)[0]
    assert problems
    assert all("early free" in problem for problem in problems)


@pytest.mark.parametrize("mode", ["z3", "hsdp"])
def test_nothing_uninitialised_is_sent(mode: str) -> None:
    """A communicator that looks for NaN would stop the run."""
    assert run_ranks(scenarios.poisoned, WORLDS[mode], Run(mode, "uneven"), env=QUIET) == [[]] * WORLDS[mode]


def test_dropped_model_is_freed() -> None:
    assert run_ranks(scenarios.survivors, 2, Run("z3", "mlp")) == [[], []]
