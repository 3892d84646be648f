"""`Muon.step` in one process: parity, what it must not touch, and what it agrees on."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from dmuon_hf.core.errors import ConfigurationError, LockstepError
from dmuon_hf.core.optim import Muon
from tests.harness.reference import ReferenceOptimizer
from tests.unit.muon_fakes import MATRICES, FakeRuntime, Net, backward, build, use, weights


def reference(model: nn.Module, **arguments: object) -> ReferenceOptimizer:
    return ReferenceOptimizer(
        model,
        MATRICES,
        split={"fused_proj.weight": lambda stored: list(stored.split((10, 8)))},
        **arguments,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.3, "ns_steps": 3},
        {"nesterov": False, "adamw_lr": 0.01, "adamw_betas": (0.8, 0.9), "adamw_weight_decay": 0.2},
        {"adamw_eps": 1e-3, "ns_steps": 7},
    ],
)
def test_steps_equal_the_reference(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object]) -> None:
    setup = build(monkeypatch, **arguments)
    model = Net()
    other = reference(model, **arguments)
    for seed in range(6):
        for net, optimizer in ((setup.model, setup.optimizer), (model, other)):
            optimizer.zero_grad()
            backward(net, seed)
            optimizer.step()
        for name, param in model.named_parameters():
            torch.testing.assert_close(setup.model.get_parameter(name), param, rtol=1e-4, atol=1e-5, msg=name)
    assert setup.optimizer.ns_matrices == other.ns_calls == 6 * 5


def test_adamw_route_equals_torch_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch, adamw_lr=0.01, adamw_weight_decay=0.1)
    copies = {
        name: nn.Parameter(param.detach().clone())
        for name, param in setup.model.named_parameters()
        if param.requires_grad and name not in MATRICES
    }
    adamw = torch.optim.AdamW(copies.values(), lr=0.01, weight_decay=0.1)
    for seed in range(4):
        setup.optimizer.zero_grad()
        backward(setup.model, seed)
        for name, copy in copies.items():
            copy.grad = setup.model.get_parameter(name).grad
        setup.optimizer.step()
        adamw.step()
        for name, copy in copies.items():
            assert torch.equal(setup.model.get_parameter(name), copy), name


def test_every_hyperparameter_is_read_from_the_groups_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "default/muon": {
            "lr": 0.5,
            "momentum": 0.1,
            "nesterov": False,
            "ns_steps": 2,
            "weight_decay": 0.9,
            "lr_scale": "none",
        },
        "default/adamw": {"lr": 0.5, "betas": (0.1, 0.1), "eps": 0.5, "weight_decay": 0.9},
    }
    for group_name, options in changes.items():
        for key, value in options.items():
            plain, changed = build(monkeypatch), build(monkeypatch)
            for setup in (plain, changed):
                for seed in range(2):
                    use(monkeypatch, setup.runtime)
                    setup.optimizer.zero_grad()
                    backward(setup.model, seed)
                    if setup is changed and seed == 1:
                        (group,) = [g for g in setup.optimizer.param_groups if g["group_name"] == group_name]
                        group[key] = value
                    setup.optimizer.step()
            same = {n for n, w in weights(plain.model).items() if torch.equal(w, weights(changed.model)[n])}
            trained = {n for n, p in plain.model.named_parameters() if p.requires_grad}
            moved = set(MATRICES) if group_name.endswith("muon") else trained - set(MATRICES)
            assert same.isdisjoint(moved), key
            assert trained - moved <= same, key


def test_scheduler_reaches_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    scheduler = torch.optim.lr_scheduler.LambdaLR(setup.optimizer, lambda epoch: 0.5**epoch)
    backward(setup.model, 0)
    setup.optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in setup.optimizer.param_groups] == [0.01, 0.0005]


def test_tensor_learning_rate_equals_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build(monkeypatch, lr=0.25, adamw_lr=0.125)
    tensor = build(monkeypatch, lr=torch.tensor(0.25), adamw_lr=torch.tensor(0.125))
    for setup in (plain, tensor):
        backward(setup.model, 0)
        setup.optimizer.step()
    for name, weight in weights(plain.model).items():
        assert torch.equal(weight, tensor.model.get_parameter(name)), name


def test_closure_runs_with_gradients_and_its_loss_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    before = weights(setup.model)

    def closure() -> Tensor:
        setup.optimizer.zero_grad()
        loss = setup.model(torch.ones(2, 12)).square().sum()
        loss.backward()
        return loss

    loss = setup.optimizer.step(closure)
    assert loss.item() > 0
    assert not torch.equal(setup.model.a_proj.weight, before["a_proj.weight"])


def test_step_on_zero_gradients_and_zero_lr_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch, weight_decay=0.5)
    before = weights(setup.model)
    for group in setup.optimizer.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    setup.optimizer.step()
    for name, weight in before.items():
        assert torch.equal(weight, setup.model.get_parameter(name)), name
    for matrix in setup.runtime.dedicated.values():
        if matrix.param.requires_grad:
            assert not setup.optimizer.state[matrix.param]["momentum_buffer"].any()


def test_parameter_without_gradient_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch, weight_decay=0.5)
    backward(setup.model, 0)
    setup.optimizer.step()
    before = weights(setup.model)
    momentum = setup.optimizer.state[setup.model.b_proj.weight]["momentum_buffer"].clone()
    setup.optimizer.zero_grad()
    backward(setup.model, 1)
    setup.model.b_proj.weight.grad = None
    setup.model.head.bias.grad = None
    setup.optimizer.step()
    assert torch.equal(before["b_proj.weight"], setup.model.b_proj.weight)
    assert torch.equal(momentum, setup.optimizer.state[setup.model.b_proj.weight]["momentum_buffer"])
    assert torch.equal(before["head.bias"], setup.model.head.bias)
    assert not torch.equal(before["a_proj.weight"], setup.model.a_proj.weight)


def test_frozen_dedicated_matrix_is_never_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch, weight_decay=0.5)
    before = setup.model.frozen_proj.weight.clone()
    backward(setup.model, 0)
    setup.model.frozen_proj.weight.grad = torch.ones(4, 4)
    setup.optimizer.step()
    assert torch.equal(before, setup.model.frozen_proj.weight)


def test_matrix_frozen_later_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch, weight_decay=0.5)
    before = weights(setup.model)
    setup.model.b_proj.weight.requires_grad_(False)
    backward(setup.model, 0)
    setup.optimizer.step()
    assert torch.equal(before["b_proj.weight"], setup.model.b_proj.weight)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ["b_proj.weight", "norm.bias"])
def test_nonfinite_gradient_skips_the_whole_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bad: float, name: str
) -> None:
    setup = build(monkeypatch)
    backward(setup.model, 0)
    setup.optimizer.step()
    before = weights(setup.model)
    state = {k: {n: v.clone() for n, v in s.items()} for k, s in setup.optimizer.state.items()}
    setup.optimizer.zero_grad()
    backward(setup.model, 1)
    grad = setup.model.get_parameter(name).grad
    assert grad is not None
    grad.view(-1)[3] = bad
    setup.runtime.calls.clear()
    with caplog.at_level(logging.WARNING):
        setup.optimizer.step()
    assert setup.optimizer.skipped_steps == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert setup.runtime.calls == ["prepare", "agree"]
    for key, weight in before.items():
        assert torch.equal(weight, setup.model.get_parameter(key)), key
    for param, entry in state.items():
        for key, value in entry.items():
            assert torch.equal(value, setup.optimizer.state[param][key])
    setup.optimizer.zero_grad()
    backward(setup.model, 1)
    setup.optimizer.step()
    assert setup.optimizer.skipped_steps == 1
    assert not torch.equal(before["a_proj.weight"], setup.model.a_proj.weight)


def test_nonfinite_gradient_on_another_rank_skips_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    before = weights(setup.model)
    backward(setup.model, 0)

    def overflowed(values: Tensor) -> Tensor:
        values[0] = 1.0
        return values

    setup.runtime.others = overflowed
    setup.optimizer.step()
    assert setup.optimizer.skipped_steps == 1
    assert torch.equal(before["a_proj.weight"], setup.model.a_proj.weight)


@pytest.mark.parametrize("scale", [1e20, 1e-20])
def test_large_and_small_finite_gradients_are_stepped(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    plain, scaled = build(monkeypatch), build(monkeypatch)
    for setup in (plain, scaled):
        backward(setup.model, 0)
        if setup is scaled:
            for name in MATRICES:
                grad = setup.model.get_parameter(name).grad
                assert grad is not None
                grad.mul_(scale)
        setup.optimizer.step()
    assert scaled.optimizer.skipped_steps == 0
    for name in MATRICES:
        torch.testing.assert_close(
            scaled.model.get_parameter(name), plain.model.get_parameter(name), rtol=1e-4, atol=1e-6
        )


def test_different_numbers_of_backward_passes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    before = weights(setup.model)
    backward(setup.model, 0)

    def ran_two(values: Tensor) -> Tensor:
        values[1], values[2] = 2.0, -2.0
        return values

    setup.runtime.others = ran_two
    with pytest.raises(LockstepError, match=r"between 1 and 2 backward passes since zero_grad.* 1 on this one"):
        setup.optimizer.step()
    assert torch.equal(before["a_proj.weight"], setup.model.a_proj.weight)


def test_step_prepares_agrees_once_and_publishes_each_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    for asynchronous in (True, False):
        setup = build(monkeypatch, replicate_async=asynchronous)
        assert setup.runtime.calls == ["maximum"]  # that all ranks run Newton-Schulz alike
        setup.runtime.calls.clear()
        backward(setup.model, 0)
        setup.optimizer.step()
        waits = [] if asynchronous else ["finish publish"]
        assert setup.runtime.calls == ["prepare", "agree", "publish first", "publish second", *waits]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_dedicated_gradients_and_tells_the_runtime(
    monkeypatch: pytest.MonkeyPatch, set_to_none: bool
) -> None:
    setup = build(monkeypatch)
    setup.runtime.calls.clear()
    backward(setup.model, 0)
    setup.optimizer.zero_grad(set_to_none=set_to_none)
    assert setup.runtime.calls == ["discard"]
    assert all(setup.model.get_parameter(name).grad is None for name in MATRICES)
    bias = setup.model.head.bias.grad
    assert bias is None if set_to_none else (bias is not None and not bias.any())


def test_parameters_swapped_behind_the_optimizer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    setup.model.head.bias = nn.Parameter(torch.zeros(3))
    backward(setup.model, 0)
    with pytest.raises(ConfigurationError, match=r"head.bias: the parameter that .* holds is no longer in the model"):
        setup.optimizer.step()


def test_optimizer_cannot_be_copied_away_from_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import copy

    setup = build(monkeypatch)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(setup.optimizer)


def test_first_step_logs_up_to_the_limit_and_only_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = build(monkeypatch, first_step_progress_log_limit=2)
    with caplog.at_level(logging.INFO):
        for seed in range(2):
            backward(setup.model, seed)
            setup.optimizer.step()
    messages = [record.getMessage() for record in caplog.records]
    assert [m for m in messages if "Newton-Schulz on" in m] == [
        "first step: Newton-Schulz on a_proj.weight (20, 12)",
        "first step: Newton-Schulz on c_proj.weight (20, 12)",
    ]
    assert sum("4 owned parameters updated" in m for m in messages) == 1


def test_first_step_log_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    setup = build(monkeypatch, first_step_progress_log=False)
    with caplog.at_level(logging.INFO):
        backward(setup.model, 0)
        setup.optimizer.step()
    assert caplog.records == []


def test_backend_object_and_name_choose_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    from dmuon_hf.core.ns import YOU_COEFFICIENTS, NewtonSchulz

    results = []
    for backend in ("gram", "direct", NewtonSchulz("direct", coefficients=YOU_COEFFICIENTS)):
        setup = build(monkeypatch, ns_backend=backend)
        backward(setup.model, 0)
        setup.optimizer.step()
        results.append(setup.model.a_proj.weight.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    assert (results[1] - results[2]).abs().max() > 1e-4


def test_matrix_owned_elsewhere_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    setup.runtime.dedicated["b_proj.weight"].is_owner = False
    before = weights(setup.model)
    backward(setup.model, 0)
    setup.optimizer.step()
    assert setup.optimizer.ns_matrices == 4
    assert torch.equal(before["b_proj.weight"], setup.model.b_proj.weight)


def test_bf16_model_keeps_fp32_momentum_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net(torch.bfloat16)
    use(monkeypatch, FakeRuntime(model))
    optimizer = Muon(model)
    with caplog.at_level(logging.WARNING):
        for seed in range(2):
            backward(model, seed)
            optimizer.step()
    assert sum("bfloat16" in record.getMessage() for record in caplog.records) == 1
    assert optimizer.state[model.a_proj.weight]["momentum_buffer"].dtype == torch.float32
    assert model.a_proj.weight.dtype == torch.bfloat16


def test_sparse_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    backward(setup.model, 0)
    setup.model.head.weight.grad = torch.ones(3, 18).to_sparse()
    with pytest.raises(ConfigurationError, match="a gradient is sparse"):
        setup.optimizer.step()
