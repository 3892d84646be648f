"""Models that plain torch has sharded train with Muon like one process on the whole batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import dmuon_hf.core as dmuon
from tests.distributed.sharded_training import MODES, ShardedRun, backward, prepare, train
from tests.distributed.training import HYPER, Run, batch_of, full, is_matrix, make_model
from tests.harness import models, run_ranks
from tests.harness.reference import ReferenceOptimizer


def reference(sharded: ShardedRun) -> dict[str, Any]:
    run = sharded.run
    model = make_model(run.model).to(run.dtype)
    optimizer = ReferenceOptimizer(model, is_matrix, **{**HYPER, **run.reference})
    history: dict[str, Any] = {"grads": [], "weights": [], "momenta": [], "second_moments": [], "norms": []}
    for step in range(run.steps):
        models.loss_of(model, batch_of(run, step)).backward()
        if sharded.max_norm is not None:
            history["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), sharded.max_norm)))
        history["grads"].append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        history["weights"].append({n: p.detach().clone() for n, p in model.named_parameters()})
        history["momenta"].append({n: buffer.clone() for n, buffer in optimizer.buffers.items()})
        if optimizer.normuon_beta2 is not None:
            history["second_moments"].append({n: rows[:, 0].clone() for n, rows in optimizer.second_moments.items()})
    return history


def check(sharded: ShardedRun, *, rtol: float = 2e-4) -> list[dict[str, Any]]:
    results = run_ranks(train, MODES[sharded.mode].world, sharded)
    expected = reference(sharded)
    for result in results:
        assert result["norms"] == pytest.approx(expected["norms"], rel=rtol)
        for kind in ("grads", "weights", "momenta", "second_moments"):
            for step, wanted in enumerate(expected[kind]):
                for name, want in wanted.items():
                    got = result[kind][step][name]
                    if want is None:
                        assert got is None
                        continue
                    error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12)
                    assert error < rtol, f"{sharded.mode} {kind} {name} step {step}: relative error {error:.2e}"
    return results


@pytest.mark.parametrize("model", ["uneven", "llama"])
@pytest.mark.parametrize("mode", MODES)
def test_sharded_model_trains_like_one_process(mode: str, model: str) -> None:
    check(ShardedRun(mode, Run("sharded", model)))


@pytest.mark.parametrize("mode", ["z2", "hsdp", "fsdp_tp"])
def test_accumulated_micro_batches_train_like_one_process(mode: str) -> None:
    check(ShardedRun(mode, Run("sharded", "llama", accumulate=3, steps=3)))


@pytest.mark.parametrize("mode", ["z3", "hsdp"])
def test_gradients_clipped_by_torch_train_like_one_process(mode: str) -> None:
    check(ShardedRun(mode, Run("sharded", "uneven", steps=3), max_norm=0.05))


@pytest.mark.parametrize(
    "muon",
    [{"nesterov": False}, {"ns_steps": 3}, {"weight_decay": 0.0, "momentum": 0.5}],
    ids=["no_nesterov", "ns_steps", "no_decay"],
)
def test_hyperparameters_mean_what_they_mean_for_one_process(muon: dict[str, Any]) -> None:
    check(ShardedRun("fsdp_tp", Run("sharded", "uneven", steps=3, muon=muon, reference=muon)))


def original(out: int, into: int) -> float:
    return math.sqrt(max(1.0, out / into))


def test_learning_rate_rule_is_that_of_the_group() -> None:
    run = Run(
        "sharded",
        "uneven",
        steps=3,
        muon={"lr_scale": "original"},
        reference={"scale": original},
    )
    check(ShardedRun("hsdp", run))


def local_copies(params: Any) -> list[torch.Tensor]:
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in params]


def momenta_of(optimizer: dmuon.Muon) -> list[torch.Tensor]:
    return [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]


def skip_together(rank: int, world: int, mode: str) -> tuple[int, bool, bool]:
    sharded = ShardedRun(mode, Run("sharded", "uneven"))
    model, optimizer = prepare(sharded)
    before = local_copies(model.parameters())
    backward(model, sharded, 0, rank)
    if rank == world - 1:
        next(param.grad for param in model.parameters() if param.grad is not None).to_local().view(-1)[0] = math.nan
    optimizer.step()
    same = all(map(torch.equal, before, local_copies(model.parameters())))
    return optimizer.skipped_steps, same, any(momentum.any() for momentum in local_copies(momenta_of(optimizer)))


@pytest.mark.parametrize("mode", ["hsdp", "fsdp_tp"])
def test_nan_on_one_rank_skips_the_step_on_all(mode: str) -> None:
    assert run_ranks(skip_together, 4, mode) == [(1, True, False)] * 4


def matrix_norm(rank: int, world: int, mode: str) -> tuple[float, int, float]:
    sharded = ShardedRun(mode, Run("sharded", "uneven"))
    model, optimizer = prepare(sharded)
    backward(model, sharded, 0, rank)
    stats = optimizer.clip_grad_norm_(0.01)
    again = optimizer.clip_grad_norm_(None)
    return stats.total_norm, stats.param_count, again.total_norm


@pytest.mark.parametrize("mode", ["z3", "hsdp", "fsdp_tp", "hsdp_tp"])
def test_norm_of_matrices_counts_every_element_once(mode: str) -> None:
    model = make_model("uneven")
    models.loss_of(model, batch_of(Run("sharded", "uneven"), 0)).backward()
    grads = [p.grad for n, p in model.named_parameters() if is_matrix(n, p)]
    grads = [grad for grad in grads if grad is not None]
    expected = torch.nn.utils.get_total_norm(grads).item()
    for total, count, again in run_ranks(matrix_norm, MODES[mode].world, mode):
        assert total == pytest.approx(expected, rel=1e-4)
        assert count == len(grads)
        assert again == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("mode", ["z3", "fsdp_tp"])
def test_bfloat16_weights_keep_momentum_in_float32(mode: str) -> None:
    results = run_ranks(train, 4, ShardedRun(mode, Run("sharded", "mlp", steps=2, dtype=torch.bfloat16)))
    for result in results:
        assert {momentum.dtype for momentum in result["momenta"][-1].values()} == {torch.float32}
        assert all(
            torch.equal(a, b)
            for a, b in zip(result["weights"][-1].values(), results[0]["weights"][-1].values(), strict=True)
        )


def in_one_process(rank: int, world: int) -> dict[str, Any]:
    run = Run("sharded", "uneven", steps=3)
    model = make_model(run.model)
    optimizer = dmuon.Muon(model, predicate=is_matrix, **HYPER)
    weights = []
    for step in range(run.steps):
        models.loss_of(model, batch_of(run, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: full(param) for name, param in model.named_parameters()})
    return {"weights": weights}


def test_plain_model_trains_by_predicate_in_one_process() -> None:
    (result,) = run_ranks(in_one_process, 1, init=False)
    expected = reference(ShardedRun("z3_1", Run("sharded", "uneven", steps=3)))
    for got, wanted in zip(result["weights"], expected["weights"], strict=True):
        for name, want in wanted.items():
            torch.testing.assert_close(got[name], want, rtol=2e-4, atol=2e-5)


def rebound(rank: int, world: int) -> tuple[list[str], dict[str, Any]]:
    sharded = ShardedRun("hsdp", Run("sharded", "mlp", steps=1))
    model = make_model("mlp")
    optimizer = dmuon.Muon(model, predicate=is_matrix, defer_state=True, **HYPER)
    MODES["hsdp"].shard(model)
    optimizer.rebind(model)
    backward(model, sharded, 0, rank)
    optimizer.step()
    kinds = sorted(
        {type(state["momentum_buffer"]).__name__ for state in optimizer.state.values() if "momentum_buffer" in state}
    )
    return kinds, {name: full(param) for name, param in model.named_parameters()}


def test_optimizer_that_was_built_before_sharding_is_bound_again() -> None:
    expected = reference(ShardedRun("hsdp", Run("sharded", "mlp", steps=1)))["weights"][0]
    for kinds, weights in run_ranks(rebound, 4):
        assert kinds == ["DTensor"]
        for name, want in expected.items():
            torch.testing.assert_close(weights[name], want, rtol=2e-4, atol=2e-5)


def refusal(rank: int, world: int, what: str) -> str:
    model = make_model("mlp")
    MODES["z3"].shard(model)

    def without_one(name: str, param: torch.nn.Parameter) -> bool:
        return is_matrix(name, param) and (rank > 0 or "layers.1" not in name)

    arguments: dict[str, Any] = {
        "nothing": {"predicate": lambda name, param: False},
        "spec without predicate": {"matrix_spec_fn": lambda name, param: None},
        "vector": {"predicate": lambda name, param: "ln.weight" in name},
        "other ranks": {
            "predicate": lambda name, param: is_matrix(name, param) and (rank > 0 or "layers.1" not in name)
        },
    }[what]
    try:
        dmuon.Muon(model, **arguments)
    except dmuon.DMuonError as error:
        return f"{type(error).__name__}: {error}"
    return "built"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nothing", "ConfigurationError: Muon's predicate selected no trainable parameter"),
        ("spec without predicate", "ConfigurationError: Muon(matrix_spec_fn=...)"),
        ("vector", "ConfigurationError: layers.0.ln.weight has shape (16,)"),
        ("other ranks", "LockstepError: layers.1.gate_proj.weight is a Muon matrix on ranks [1, 2, 3] but not on [0]"),
    ],
)
def test_selection_that_cannot_train_is_refused_on_every_rank(what: str, message: str) -> None:
    for said in run_ranks(refusal, 4, what):
        assert said.startswith(message), said


class SequenceBlock(torch.nn.Module):
    """A norm and a whole matrix between a column-wise and a row-wise one, all on parts of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up_proj = torch.nn.Linear(16, 24, bias=False)
        self.down_proj = torch.nn.Linear(24, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.up_proj(self.norm(x))))


def sequence_model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(SequenceBlock(), SequenceBlock())


def train_on_sequences(rank: int, world: int) -> dict[str, torch.Tensor]:
    model = sequence_model()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for block in model:
            plan = {
                "norm": SequenceParallel(),
                "up_proj": ColwiseParallel(input_layouts=Shard(1)),
                "down_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
            parallelize_module(block, mesh, plan)
    optimizer = dmuon.Muon(model, predicate=lambda name, param: "proj" in name, **HYPER)
    for step in range(3):
        x = models.dense_batch(step, batch=8, width=16).view(2, 4, 16)
        if world > 1:
            x = distribute_tensor(x, mesh, [Shard(1)])
        full_loss = model(x).square().mean()
        (full_loss.full_tensor() if isinstance(full_loss, DTensor) else full_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(param) for name, param in model.named_parameters()}


def test_partial_gradients_of_sequence_parallelism_are_summed() -> None:
    (expected,) = run_ranks(train_on_sequences, 1, init=False)
    for weights in run_ranks(train_on_sequences, 2):
        for name, want in expected.items():
            torch.testing.assert_close(weights[name], want, rtol=2e-4, atol=2e-5)


def summary(rank: int, world: int) -> dict[str, Any]:
    model, optimizer = prepare(ShardedRun("z2", Run("sharded", "mlp")))
    return dmuon.summarize_param_groups(model, optimizer)


def test_summary_counts_matrices_that_stay_sharded() -> None:
    for counted in run_ranks(summary, 2):
        assert counted["sharded_params"] == 9 and counted["dedicated_params"] == 0
        assert [(group["group_name"], group["sharded_params"]) for group in counted["groups"]] == [
            ("default/muon", 9),
            ("default/adamw", 0),
        ]
