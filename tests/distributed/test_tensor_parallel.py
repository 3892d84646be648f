"""Matrices that tensor parallelism has cut are owned part by part and train like one process on the whole batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import dmuon_hf.core as dmuon
from dmuon_hf.core.ns import NewtonSchulz
from dmuon_hf.core.ns.agreement import Call
from dmuon_hf.core.optim.step import muon_rules
from tests.distributed.test_sharded_training import reference
from tests.distributed.tp_training import TpRun, backward, prepare, prepare_model, snapshot, train, world_of
from tests.distributed.training import HYPER, Run, batch_of, is_matrix, make_model
from tests.harness import models, run_ranks
from tests.harness.comm import CollectiveCounter


def check(tp: TpRun, *, rtol: float = 2e-4) -> list[dict[str, Any]]:
    results = run_ranks(train, tp.world, tp)
    expected = reference(tp)  # type: ignore[arg-type]
    for result in results:
        assert result["norms"] == pytest.approx(expected["norms"], rel=rtol)
        for kind in ("grads", "weights", "momenta", "second_moments"):
            for step, wanted in enumerate(expected[kind]):
                for name, want in wanted.items():
                    error = (result[kind][step][name].double() - want.double()).norm() / want.double().norm()
                    assert error < rtol, f"{tp.mode} {kind} {name} step {step}: relative error {error:.2e}"
    return results


@pytest.mark.parametrize("model", ["uneven", "llama"])
@pytest.mark.parametrize("mode", ["tp", "shard_tp", "hsdp_tp", "ddp_tp"])
def test_column_and_row_wise_matrices_train_like_one_process(mode: str, model: str) -> None:
    check(TpRun(mode, Run("tp", model)))


@pytest.mark.parametrize("mode", ["tp", "tp_3", "shard_tp", "hsdp_tp", "ddp_tp"])
def test_replicated_and_cut_matrices_clipped_by_torch_train_like_one_process(mode: str) -> None:
    check(TpRun(mode, Run("tp", "uneven"), everything=True, max_norm=0.05))


@pytest.mark.parametrize(("mode", "reshard"), [("shard_tp", True), ("shard_tp", False), ("ddp_tp", False)])
def test_accumulated_micro_batches_train_like_one_process(mode: str, reshard: bool) -> None:
    check(TpRun(mode, Run("tp", "uneven", accumulate=3, steps=3), everything=True, reshard=reshard))


def skip_together(rank: int, world: int, mode: str) -> tuple[int, bool, bool]:
    tp = TpRun(mode, Run("tp", "uneven"))
    model, optimizer = prepare(tp)
    before = snapshot(model, optimizer, "weights")
    backward(model, tp, 0, rank)
    if rank == world - 1:
        # A part of one weight: the other tensor-parallel rank holds no element of it.
        grads = [param.grad for name, param in model.named_parameters() if "norm" in name or "wide" in name]
        parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        next(part for part in parts if part.numel())[0] = math.nan
    optimizer.step()
    after = snapshot(model, optimizer, "weights")
    same = all(torch.equal(before[name], after[name]) for name in before)
    return (
        optimizer.skipped_steps,
        same,
        any(momentum.any() for momentum in snapshot(model, optimizer, "momenta").values()),
    )


@pytest.mark.parametrize("mode", ["tp", "shard_tp", "ddp_tp"])
def test_nan_on_one_tensor_parallel_rank_skips_the_step_on_all(mode: str) -> None:
    assert run_ranks(skip_together, world_of(mode), mode) == [(1, True, False)] * world_of(mode)


def matrix_norm(rank: int, world: int, mode: str, everything: bool) -> list[float]:
    tp = TpRun(mode, Run("tp", "uneven"), everything=everything)
    model, optimizer = prepare(tp)
    backward(model, tp, 0, rank)
    stats = optimizer.clip_grad_norm_(0.01)
    again = optimizer.clip_grad_norm_(None)
    segments = dmuon.try_clip_optimizer_grad_norm_buckets_(optimizer, regular_grads=[], adamw_grads=[], max_norm=0.002)
    assert segments is not None
    return [stats.total_norm, stats.param_count, again.total_norm, segments.bucket_stats[1].total_norm]


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("mode", ["tp", "hsdp_tp", "ddp_tp"])
def test_norm_of_matrices_counts_every_element_once(mode: str, everything: bool) -> None:
    model = make_model("uneven")
    models.loss_of(model, batch_of(Run("tp", "uneven"), 0)).backward()
    grads = [param.grad for name, param in model.named_parameters() if is_matrix(name, param)]
    expected = torch.nn.utils.get_total_norm(grads).item()
    for total, count, again, segment in run_ranks(matrix_norm, world_of(mode), mode, everything):
        assert total == pytest.approx(expected, rel=1e-4) and count == len(grads)
        assert again == pytest.approx(0.01, rel=1e-3) and segment == pytest.approx(0.01, rel=1e-3)


def shares(rank: int, world: int) -> tuple[int, set[int], set[int]]:
    """How much each rank computes, and the batches that it was expected to and did compute."""
    tp = TpRun("shard_tp", Run("tp", "mlp"))
    model, _ = prepare(tp)
    seen: set[Any] = set()
    ns = NewtonSchulz("gram")

    def recording(matrices: torch.Tensor, *, steps: int | None = None) -> torch.Tensor:
        seen.add(Call(tuple(matrices.shape), matrices.dtype, steps))
        return ns(matrices, steps=steps)

    optimizer = dmuon.Muon(model, ns_backend=recording, **HYPER)  # type: ignore[arg-type]
    rules = muon_rules(optimizer.param_groups)
    (source,) = optimizer.sources
    expected = source.newton_schulz_calls(rules, recording)
    backward(model, tp, 0, rank)
    optimizer.step()
    return optimizer.ns_matrices, expected, seen


def test_every_rank_orthogonalises_its_part_and_all_calls_are_known_before() -> None:
    results = run_ranks(shares, 4)
    matrices = 9
    counts = [count for count, _, _ in results]
    assert sum(counts) == matrices and max(counts) - min(counts) <= 2
    assert all(expected == results[0][1] for _, expected, _ in results)
    assert set().union(*(seen for _, _, seen in results)) == results[0][1]


def traffic(rank: int, world: int) -> dict[str, float]:
    tp = TpRun("shard_tp", Run("tp", "uneven"), everything=True)
    model, optimizer = prepare(tp)
    backward(model, tp, 0, rank)
    with CollectiveCounter() as counter:
        optimizer.step()
    sent: dict[str, float] = {}
    for record in counter.records:
        sent[f"{record.kind} {record.tag}"] = sent.get(f"{record.kind} {record.tag}", 0.0) + record.ring_bytes
    return sent


def test_a_step_exchanges_parts_on_the_axis_and_nothing_else_but_the_agreement() -> None:
    results = run_ranks(traffic, 4)
    for sent in results:
        assert {kind for kind in sent if not kind.startswith("all_reduce")} == {"all_to_all dmuon_tensor"}
        assert {kind for kind in sent if kind.startswith("all_reduce")} == {
            "all_reduce dmuon_shard",
            "all_reduce dmuon_tensor",
        }
    # There and back, in four bytes, the half that the worker of each matrix lacks, of two matrices in two blocks; one
    # half of 33 has 17 rows (of 64) or columns (of 32), the other 16.
    elements = sum(sent["all_to_all dmuon_tensor"] for sent in results) / (2 * 4)
    assert abs(elements - 2 * (33 * 64 + 32 * 33) / 2) <= 64 + 32


def dedicate_differently(rank: int, world: int) -> str:
    try:
        prepare_model(TpRun("shard_tp", Run("tp", "mlp")), max_owners_per_group=1 if rank == 1 else None)
    except dmuon.LockstepError as error:
        return str(error)
    return ""


def test_plans_that_differ_between_tensor_parallel_ranks_are_refused_on_all() -> None:
    for message in run_ranks(dedicate_differently, 4):
        assert "made different plans" in message


def backward_once_more(rank: int, world: int) -> str:
    tp = TpRun("tp", Run("tp", "mlp"))
    model, optimizer = prepare(tp)
    backward(model, tp, 0, rank)
    optimizer.runtime.backward.synchronised += rank  # type: ignore[attr-defined]
    try:
        optimizer.step()
    except dmuon.LockstepError as error:
        return str(error)
    return ""


def test_steps_are_agreed_between_tensor_parallel_ranks() -> None:
    for message in run_ranks(backward_once_more, 2):
        assert "between 1 and 2 backward passes" in message
