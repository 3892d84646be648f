"""A step, and the norm that clips it, are agreed on over all stages of a pipeline where the user asks for it."""

from __future__ import annotations

import math

import pytest
import torch

import dmuon_hf.core as dmuon
from tests.distributed.pipeline_setup import (
    STAGES,
    Run,
    batch_of,
    feed,
    is_matrix,
    loss_fn,
    pipeline_mesh,
    prepare,
    schedule_of,
    stages_of,
    whole,
    whole_model,
    wrap,
)
from tests.harness import run_ranks


def _group(mesh, which):
    return {"pp": mesh["pp"], "pp group": mesh.get_group("pp"), "world": torch.distributed.group.WORLD, "mesh": mesh}[
        which
    ]


@pytest.mark.parametrize(
    ("mode", "which", "skipped"),
    [
        ("z3", None, [0, 0, 1, 1]),
        ("z3", "pp", [1, 1, 1, 1]),
        ("hsdp", "world", [1, 1, 1, 1]),
        ("replicate", "pp group", [1, 1, 1, 1]),
        ("sharded", "mesh", [1, 1, 1, 1]),
    ],
)
def test_infinite_gradient_of_one_stage_skips_the_step_of_those_that_agree(mode, which, skipped):
    results = run_ranks(_one_infinite, 4, mode, which)
    assert [result["skipped"] for result in results] == skipped
    assert [result["moved"] for result in results] == [not count for count in skipped]
    assert all(result["moves_again"] for result in results)


def _one_infinite(rank, world, mode, which):
    mesh = pipeline_mesh()
    group = None if which is None else _group(mesh, which)
    model, optimizer = _stage(mesh, mode, agreement_group=group)
    outcome = {}
    for bad, key in ((rank == 3, "moved"), (False, "moves_again")):
        before = [whole(p) for p in model.parameters()]
        _local_pass(model, bad)
        optimizer.step()
        optimizer.zero_grad()
        outcome[key] = any(not torch.equal(a, whole(b)) for a, b in zip(before, model.parameters(), strict=True))
    return outcome | {"skipped": optimizer.skipped_steps}


def _stage(mesh, mode, **options):
    model = stages_of(whole_model(), STAGES)[mesh.get_local_rank("pp")]
    wrap(model, [model], mesh, mode)
    selected = {"predicate": is_matrix} if mode == "sharded" else {}
    return model, dmuon.Muon(model, **selected, **options)


def _local_pass(model, bad=False):
    """A pass of this stage alone."""
    loss = model(batch_of(0)[0][:2]).square().mean()
    (loss * math.inf if bad else loss).backward()


@pytest.mark.parametrize(
    ("mode", "which", "how"),
    [
        ("z3", "pp", "torch"),
        ("replicate", "mesh", "total"),
        ("hsdp", "mesh", "muon"),
        ("replicate", "world", "muon"),
        ("z2", "pp", "buckets"),
        ("sharded", "world", "muon"),
    ],
)
def test_clipping_takes_the_norm_over_all_stages(mode, which, how):
    model = whole_model()
    inputs, targets = batch_of(0)
    loss_fn(model(inputs), targets).backward()
    clipped = {
        name: param for name, param in model.named_parameters() if how in ("torch", "total") or is_matrix(name, param)
    }
    norm = float(torch.nn.utils.clip_grad_norm_(clipped.values(), 0.01))
    for found, grads in run_ranks(_clipped, 4, mode, which, how):
        assert found == pytest.approx(norm, rel=1e-5)
        for name in grads.keys() & clipped.keys():
            torch.testing.assert_close(grads[name], clipped[name].grad, rtol=1e-3, atol=1e-8)


def _clipped(rank, world, mode, which, how):
    mesh = pipeline_mesh()
    run = Run(mode, muon={"agreement_group": _group(mesh, which)})
    model, wrapped, optimizer = prepare(run, mesh, stages_of(whole_model(), STAGES))
    feed(schedule_of(run, mesh, wrapped), mesh, 0)
    if how == "torch":
        norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
        norm = optimizer.norm_over_stages(norm)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
    elif how == "total":
        norm = dmuon.clip_total_grad_norm_(model.parameters(), 0.01, optimizer=optimizer)
    elif how == "muon":
        norm = dmuon.clip_grad_norm_(optimizer, 0.01).total_norm
    else:
        rest = [param.grad for name, param in model.named_parameters() if not is_matrix(name, param)]
        result = dmuon.try_clip_optimizer_grad_norm_buckets_(
            optimizer, regular_grads=rest, adamw_grads=[], max_norm=0.01
        )
        again = dmuon.clip_grad_norm_buckets_(
            [dmuon.GradClipBucket("muon", list(optimizer.matrix_gradients().values()))],
            None,
            process_group=mesh.get_group("dp"),
            agreement_group=run.muon["agreement_group"],
        )
        assert float(again.total_norm) == pytest.approx(0.01, rel=1e-3)
        norm = result.bucket_stats[1].total_norm
    return float(norm), {name: whole(param.grad) for name, param in model.named_parameters()}


def test_largest_gradient_is_that_of_all_stages():
    found = run_ranks(_largest, 4)
    assert len({norm for norm, _ in found}) == 1
    assert found[0][0] == max(own for _, own in found)


def _largest(rank, world):
    mesh = pipeline_mesh()
    model, optimizer = _stage(mesh, "z3", agreement_group=mesh["pp"])
    _local_pass(model)
    own = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], math.inf).full_tensor())
    return float(optimizer.norm_over_stages(torch.tensor(own), math.inf)), own


def test_loss_scales_that_part_are_refused_on_every_stage():
    assert run_ranks(_scales, 4) == [True] * 4


def _scales(rank, world):
    mesh = pipeline_mesh()
    model, optimizer = _stage(mesh, "z3", agreement_group=mesh)
    _local_pass(model)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0 ** mesh.get_local_rank("pp")), torch.zeros(())
    with pytest.raises(dmuon.ConfigurationError, match=r"1 to 2.*get_backoff_factor"):
        optimizer.step()
    return True


def test_stage_that_refuses_a_step_keeps_the_others_from_theirs():
    assert run_ranks(_refused, 4) == ["another pipeline stage"] * 2 + ["backward passes"] * 2


def _refused(rank, world):
    mesh = pipeline_mesh()
    model, optimizer = _stage(mesh, "z3", agreement_group=mesh["pp"])
    with torch.no_grad():
        before = [whole(p) for p in model.parameters()]
    _local_pass(model)
    if rank == 3:
        optimizer.runtime.backward.synchronised += 1
    with pytest.raises(dmuon.LockstepError) as refused:
        optimizer.step()
    assert all(torch.equal(a, whole(b)) for a, b in zip(before, model.parameters(), strict=True))
    return next(words for words in ("another pipeline stage", "backward passes") if words in str(refused.value))


def test_group_without_this_rank_or_of_another_kind_is_refused():
    assert run_ranks(_wrong, 4) == [True] * 4


def _wrong(rank, world):
    mesh = pipeline_mesh()
    others = [torch.distributed.new_group([member]) for member in range(world)]
    for wrong in (others[(rank + 1) % world], "pp"):
        with pytest.raises(dmuon.ConfigurationError, match="agreement_group"):
            _stage(mesh, "replicate", agreement_group=wrong)
    return True
