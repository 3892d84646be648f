"""The route ``"sharded_adamw"``: parameters without an owner, of which every rank keeps and updates some rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime.states import WeightState
from tests.distributed.training import (
    HYPER,
    Run,
    assert_same_training,
    backward,
    is_matrix,
    make_model,
    prepare,
    reference,
    shards_of_rows,
    snapshot,
    train,
)
from tests.harness import models, run_ranks
from tests.harness.comm import CollectiveCounter
from tests.harness.reference import ReferenceOptimizer, train_reference

ROWS: dict[str, Any] = {"param_policy_fn": shards_of_rows}
MESHES = [("local", 1), ("z2", 2), ("z3", 3), ("z3", 4), ("hsdp", 4)]


def pure(mode: str, model: str = "uneven", **options: Any) -> Run:
    return Run(mode, model, pure=True, dedicate=ROWS, **options)


@pytest.mark.parametrize("model", ["uneven", "llama"])
@pytest.mark.parametrize(("mode", "world"), MESHES)
def test_parameters_in_rows_train_like_one_process(mode: str, world: int, model: str) -> None:
    run = pure(mode, model, steps=3, accumulate=2 if world != 3 else 1)
    expected = reference(run)
    for result in run_ranks(train, world, run, init=mode != "local"):
        assert_same_training(run, result, expected, rtol=1e-3)


def is_matrix_or_head(name: str, param: nn.Parameter) -> bool:
    return is_matrix(name, param) or (param.ndim == 2 and "layers." not in name)


@pytest.mark.parametrize(("mode", "world"), [("z3", 2), ("hsdp", 4)])
def test_rows_beside_fsdp2_train_like_one_process(mode: str, world: int) -> None:
    run = Run(mode, "llama", steps=3, dedicate={**ROWS, "predicate": is_matrix_or_head})
    expected = reference(run)
    for result in run_ranks(train, world, run):
        assert_same_training(run, result, expected, rtol=1e-3)


def memory(rank: int, world: int, mode: str) -> dict[str, tuple[int, ...]]:
    model, optimizer = prepare(pure(mode, "llama"), world)
    held: dict[str, tuple[int, ...]] = {}
    for param in dmuon.get_dedicated_params(model):
        if param.is_sharded:
            state = [value for key, value in optimizer.state[param.param].items() if key != "step"]
            held[param.name] = tuple(len(tensor.to_local()) for tensor in (param.param, *state))
    return held


@pytest.mark.parametrize(("mode", "world"), [("z3", 2), ("hsdp", 4)])
def test_each_rank_keeps_its_rows_of_weight_and_moments_alone(mode: str, world: int) -> None:
    rows = {name: len(param) for name, param in make_model("llama").named_parameters()}
    for held in run_ranks(memory, world, mode):
        assert {"model.embed_tokens.weight", "lm_head.weight"} <= held.keys()
        assert all(kept == (rows[name] // 2,) * 3 for name, kept in held.items())


def clipped(rank: int, world: int, mode: str) -> tuple[list[float], dict[str, Tensor]]:
    run = pure(mode)
    model, optimizer = prepare(run, world)
    norms = []
    for step in range(3):
        backward(model, run, step, rank, world)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).full_tensor()))
        optimizer.step()
        optimizer.zero_grad()
    return norms, snapshot(model)


@pytest.mark.parametrize(("mode", "world"), [("z3", 3), ("hsdp", 4)])
def test_clip_grad_norm_of_torch_counts_every_row_once(mode: str, world: int) -> None:
    model = make_model("uneven")
    batches = [models.dense_batch(step, batch=48, width=64) for step in range(3)]
    norms: list[float] = []
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    for batch in batches:
        models.loss_of(model, batch).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    for found, weights in run_ranks(clipped, world, mode):
        assert found == pytest.approx(norms, rel=1e-4)
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-3, atol=1e-5, msg=name)


def traffic(rank: int, world: int, mode: str) -> dict[str, Any]:
    run = pure(mode, "llama")
    model, optimizer = prepare(run, world)
    with CollectiveCounter() as counter:
        backward(model, run, 0, rank, world)
        optimizer.step()
    kinds = {record.kind for record in counter.select(tag="dmuon_shard")}
    units = [unit for unit in optimizer.runtime.units if unit.params[0].is_sharded]
    gathers = [record for record in counter.select(tag="dmuon_shard") if "all_gather" in record.kind]
    plan = dmuon.summarize_comm_plan(model)
    owners = {param["name"]: param["owner"] for group in plan["groups"] for param in group["params"]}
    return {"kinds": kinds, "units": len(units), "gathers": len(gathers), "owners": owners}


@pytest.mark.parametrize(("mode", "gathers"), [("z2", 1), ("z3", 2)])
def test_every_parameter_in_rows_is_one_all_gather_where_it_is_needed(mode: str, gathers: int) -> None:
    for found in run_ranks(traffic, 2, mode):
        assert found["gathers"] == gathers * found["units"] > 0
        assert found["owners"]["lm_head.weight"] is None
        assert found["owners"]["model.layers.0.mlp.up_proj.weight"] is not None


def prefetched(rank: int, world: int, early: bool) -> tuple[list[str], list[str]]:
    run = pure("z3", "llama", muon={"post_step_prefetch_sharded_adamw": early})
    model, optimizer = prepare(run, world)
    backward(model, run, 0, rank, world)
    optimizer.step()
    optimizer.zero_grad()
    units = optimizer.runtime.units
    ahead = [unit.name for unit in units if unit.weights.state is not WeightState.SHARDED]
    sharded = [unit.name for unit in units if unit.params[0].is_sharded]
    with CollectiveCounter() as counter, torch.no_grad():
        models.loss_of(model, models.token_batch(1))
    gathers = sum("all_gather" in record.kind for record in counter.select(tag="dmuon_shard"))
    assert gathers == (0 if early else len(sharded))
    return ahead, sharded


def test_gathers_of_rows_are_issued_by_the_step_if_asked() -> None:
    for ahead, sharded in run_ranks(prefetched, 2, True):
        assert ahead == sharded and sharded
    for ahead, _ in run_ranks(prefetched, 2, False):
        assert ahead == []


def refuse(rank: int, world: int, case: str) -> str:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = make_model("mlp")
    try:
        if case == "whole":
            dmuon.dedicate_params_ddp(model, mesh, lambda n, p: True, param_policy_fn=shards_of_rows)
        dmuon.dedicate_params(model, mesh, lambda n, p: True, param_policy_fn=shards_of_rows)
        route = "muon" if case == "muon" else "sharded_adamw"
        head = [param for name, param in model.named_parameters() if name == "head.weight"]
        rest = [param for name, param in model.named_parameters() if name != "head.weight"]
        forced = head if case == "muon" else rest
        groups = [{"params": forced, "dmuon_route": route}, {"params": rest if case == "muon" else head}]
        dmuon.Muon(model, param_groups=groups)
    except dmuon.ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("whole", "head.weight is on the route 'sharded_adamw', which cuts weights into rows"),
        ("muon", "head.weight is on the route 'sharded_adamw', in rows on all ranks"),
        ("owned", "has an owner, and its group asks for 'sharded_adamw'"),
    ],
)
def test_route_that_contradicts_where_a_parameter_lies_is_refused_on_all_ranks(case: str, message: str) -> None:
    for found in run_ranks(refuse, 2, case):
        assert message in found


def leg(rank: int, world: int, run: Run, states: Any, steps: range) -> Any:
    model, optimizer = prepare(run, world)
    if states is not None:
        dmuon.set_model_state_dict(model, states[0])
        dmuon.set_optimizer_state_dict(model, optimizer, states[1])
    for step in steps:
        backward(model, run, step, rank, world)
        optimizer.step()
        optimizer.zero_grad()
    return dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)


def test_whole_state_dicts_carry_training_between_rows_and_other_layouts() -> None:
    states = None
    legs = [(pure("z3"), 3), (Run("z3", "uneven"), 2), (pure("hsdp"), 4), (pure("local"), 1), (pure("z2"), 2)]
    for step, (run, world) in enumerate(legs):
        states = run_ranks(leg, world, run, states, range(step, step + 1), init=run.mode != "local")[0]
    model = make_model("uneven")
    batches = [models.dense_batch(step, batch=48, width=64) for step in range(len(legs))]
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    expected = train_reference(model, optimizer, batches, models.loss_of)[-1]
    assert states is not None
    for name, value in states[0].items():
        torch.testing.assert_close(value, expected[name], rtol=2e-3, atol=1e-5, msg=name)


def save(rank: int, world: int, run: Run, path: str) -> Any:
    model, optimizer = prepare(run, world)
    for step in range(2):
        backward(model, run, step, rank, world)
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    backward(model, run, 2, rank, world)
    optimizer.step()
    return snapshot(model)


def load(rank: int, world: int, run: Run, path: str, full: bool) -> Any:
    model, optimizer = prepare(run, world)
    weights, state = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=path)
    options = StateDictOptions(full_state_dict=full)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    if full:
        # Once more through whole tensors.
        weights, state = get_state_dict(model, optimizer, options=options)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    backward(model, run, 2, rank, world)
    optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((pure("z3"), 3), (pure("hsdp"), 4)), ((pure("hsdp"), 4), (Run("z3", "uneven"), 2))],
    ids=["rows to HSDP", "HSDP to FSDP2"],
)
def test_checkpoints_of_torch_carry_training_between_rows_and_other_layouts(
    saved: tuple[Run, int], loaded: tuple[Run, int], tmp_path: Path
) -> None:
    expected = run_ranks(save, saved[1], saved[0], str(tmp_path))[0]
    for weights in run_ranks(load, loaded[1], loaded[0], str(tmp_path), saved[0].mode == "z3"):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=2e-3, atol=1e-5, msg=name)


def stale(rank: int, world: int, mode: str) -> float:
    """Weights that change while whole ones are at hand: by a load in place, and by hand."""
    model, optimizer = prepare(pure(mode, "llama", muon={"post_step_prefetch_sharded_adamw": True}), world)
    run = pure(mode, "llama")
    backward(model, run, 0, rank, world)
    optimizer.step()
    batch = models.rank_part(models.token_batch(1), rank, world)
    with torch.no_grad():
        models.loss_of(model, batch)
        dict(model.named_parameters())["lm_head.weight"].zero_()
        return float(models.loss_of(model, batch))


@pytest.mark.parametrize("mode", ["z2", "z3"])
def test_rows_that_change_beside_whole_weights_are_gathered_again(mode: str) -> None:
    vocabulary = make_model("llama").lm_head.weight.shape[0]  # type: ignore[union-attr,index]
    for loss in run_ranks(stale, 2, mode):
        assert loss == pytest.approx(float(torch.log(torch.tensor(float(vocabulary)))), rel=1e-4)


def penalise(rank: int, world: int, how: str) -> dict[str, Any]:
    model, _ = prepare(pure("z3"), world)
    head = dict(model.named_parameters())["head.weight"]
    penalty = head.square().sum() if how == "statistic" else head.full_tensor().square().sum()
    penalty.backward()
    assert torch.equal(head, head.detach().clone()) and float(head.max()) >= float(head.mean())
    return {
        "penalty": float(penalty.detach()),
        "grad": head.grad.full_tensor(),
        "norm": float(head.norm().full_tensor()),
    }


@pytest.mark.parametrize("how", ["statistic", "full_tensor"])
def test_penalty_on_a_parameter_in_rows_reaches_the_gradient_of_all_rows(how: str) -> None:
    weight = make_model("uneven").head.weight.detach()  # type: ignore[union-attr]
    for found in run_ranks(penalise, 3, how):
        assert found["penalty"] == pytest.approx(float(weight.square().sum()), rel=1e-5)
        assert found["norm"] == pytest.approx(float(weight.norm()), rel=1e-5)
        torch.testing.assert_close(found["grad"], 2 * weight)


def in_bfloat16(rank: int, world: int) -> tuple[Any, ...]:
    options = {**ROWS, "compute_dtype": torch.bfloat16}
    run = Run("z3", "mlp", pure=True, dedicate=options)
    model, optimizer = prepare(run, world)
    seen: list[torch.dtype] = []
    model.head.register_forward_pre_hook(lambda module, *_: seen.append(module.weight.dtype))  # type: ignore[union-attr]
    part = models.rank_part(models.dense_batch(0, batch=8), rank, world).bfloat16()
    model(part).float().square().mean().backward()
    optimizer.step()
    head = dict(model.named_parameters())["head.weight"]
    return seen[0], head.dtype, head.grad.dtype, bool(head.isfinite().all())


def test_rows_are_kept_in_full_and_gathered_in_the_compute_dtype() -> None:
    assert run_ranks(in_bfloat16, 2) == [(torch.bfloat16, torch.float32, torch.float32, True)] * 2


def from_source(rank: int, world: int, how: str) -> bool:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    with torch.device("meta" if how == "meta" or rank != 1 else "cpu"):
        model = make_model("uneven")
    source = None if how == "meta" else 1
    dmuon.dedicate_params(model, mesh, lambda n, p: True, param_policy_fn=shards_of_rows, source_rank=source)
    if how == "meta":
        model.to_empty(device="cpu")
        dmuon.set_model_state_dict(model, make_model("uneven").state_dict())
    expected = dict(make_model("uneven").named_parameters())
    return all(torch.equal(param.full_tensor(), expected[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("how", ["meta", "source"])
def test_rows_of_a_model_without_values_come_from_a_checkpoint_or_from_one_rank(how: str) -> None:
    assert run_ranks(from_source, 3, how) == [True] * 3
