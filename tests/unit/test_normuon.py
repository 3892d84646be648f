"""NorMuon in one process: parity with an independent float64 computation, and what its state must survive."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns import NewtonSchulz
from dmuon_hf.core.optim import Muon
from dmuon_hf.core.optim.update import MuonRule, OwnedMatrix, apply_muon
from dmuon_hf.core.plan import MatrixSpec
from tests.harness.reference import ReferenceOptimizer
from tests.unit.muon_fakes import FakeRuntime, Net, backward, build, use

HYPER: dict[str, Any] = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1}


def interleaved(stored: Tensor) -> list[Tensor]:
    blocks = stored.unflatten(0, (3, 6))
    return [blocks[:, :4], blocks[:, 4:]]


# Stored shape, layout, and the same cut written by hand.
LAYOUTS: dict[str, tuple[tuple[int, ...], MatrixSpec, Callable[[Tensor], list[Tensor]]]] = {
    "wide": ((9, 20), MatrixSpec(), lambda w: [w]),
    "tall": ((21, 8), MatrixSpec(), lambda w: [w]),
    "row": ((1, 9), MatrixSpec(), lambda w: [w]),
    "transposed": ((8, 21), MatrixSpec(transposed=True), lambda w: [w.T]),
    "fused": ((18, 7), MatrixSpec(sections=(10, 4, 4)), lambda w: list(w.split((10, 4, 4)))),
    "fused and transposed": (
        (7, 18),
        MatrixSpec(sections=(9, 9), transposed=True),
        lambda w: list(w.T.split((9, 9))),
    ),
    "interleaved": ((18, 12), MatrixSpec(groups=3, sections=(4, 2)), interleaved),
    "experts": ((3, 10, 6), MatrixSpec(sections=(5, 5)), lambda w: [half for one in w for half in one.split(5)]),
    "transposed experts": ((3, 6, 10), MatrixSpec(transposed=True), lambda w: [one.T for one in w]),
}


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index, (shape, _, _) in enumerate(LAYOUTS.values()):
            self.register_parameter(f"m{index}", nn.Parameter(torch.randn(shape, generator=generator)))


def draw_gradients(model: nn.Module, seed: int) -> None:
    """Rows of unequal size, whose orthogonalised ones are unequal too."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.grad = (grad * torch.linspace(0.1, 2, grad.shape[-2]).unsqueeze(-1)).to(param.dtype)


def rows_of(values: Tensor, spec: MatrixSpec) -> Tensor:
    """The value of every row from a tensor that has it in each of its elements."""
    return values[..., 0, :] if spec.transposed else values[..., 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta2", [0.95, 0.5])
def test_weights_momentum_and_second_moments_equal_the_reference(dtype: torch.dtype, beta2: float) -> None:
    specs = {f"m{index}": spec for index, (_, spec, _) in enumerate(LAYOUTS.values())}
    cuts = {f"m{index}": cut for index, (_, _, cut) in enumerate(LAYOUTS.values())}
    model, other = Matrices().to(dtype), Matrices().double()
    muon = Muon(
        model,
        predicate=lambda name, param: True,
        matrix_spec_fn=lambda name, param: specs[name],
        update_rule="normuon",
        normuon_beta2=beta2,
        **HYPER,
    )
    reference = ReferenceOptimizer(other, list(specs), split=cuts, normuon_beta2=beta2, **HYPER)
    for seed in range(4):
        for net, optimizer in ((model, muon), (other, reference)):
            draw_gradients(net, seed)
            optimizer.step()
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-5, "atol": 1e-6}
    for kind, (name, spec) in zip(LAYOUTS, specs.items(), strict=True):
        state = muon.state[model.get_parameter(name)]
        assert state["second_moment"].dtype == dtype
        for got, want in (
            (model.get_parameter(name), other.get_parameter(name)),
            (state["momentum_buffer"], reference.buffers[name]),
            (state["second_moment"], rows_of(reference.second_moments[name], spec)),
        ):
            torch.testing.assert_close(got.double(), want, msg=lambda text, kind=kind: f"{kind}: {text}", **tolerance)


def owned(shape: tuple[int, ...], seed: int = 0) -> OwnedMatrix:
    generator = torch.Generator().manual_seed(seed)
    weight, grad, momentum = (torch.randn(shape, generator=generator) for _ in range(3))
    second_moment = torch.rand(shape[:-1], generator=generator)
    return OwnedMatrix(f"m{seed}", weight, grad, momentum, MatrixSpec(), second_moment=second_moment)


def rule(**changes: Any) -> MuonRule:
    values = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "ns_steps": 5, "weight_decay": 0.0, "lr_scale": "none"}
    return MuonRule(**{**values, "update_rule": "normuon", **changes})


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_update_has_the_norm_of_an_orthogonal_matrix_and_at_first_equal_rows(shape: tuple[int, int]) -> None:
    matrix = owned(shape)
    matrix.second_moment.zero_()
    before = matrix.weight.clone()
    apply_muon([matrix], rule(), NewtonSchulz())
    update = (before - matrix.weight) / 0.1
    torch.testing.assert_close(update.norm(), torch.tensor(min(shape) ** 0.5), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(update.norm(dim=1), update.norm(dim=1).mean().expand(shape[0]), rtol=1e-4, atol=0.0)


def test_matrix_of_zeros_and_row_of_zeros_stay_and_nothing_is_infinite() -> None:
    zeros, some = owned((4, 6), 1), owned((4, 6), 2)
    for part in (zeros.grad, zeros.momentum, zeros.second_moment, some.grad[1], some.momentum[1], some.second_moment):
        part.zero_()
    before = zeros.weight.clone(), some.weight.clone()
    apply_muon([zeros, some], rule(), NewtonSchulz())
    assert torch.equal(zeros.weight, before[0])
    assert torch.equal(some.weight[1], before[1][1])
    assert some.weight.isfinite().all() and not torch.equal(some.weight, before[1])
    assert not zeros.second_moment.any()


@pytest.mark.parametrize("max_batch_numel", [1, 1 << 20])
def test_batched_matrices_equal_single_ones(max_batch_numel: int) -> None:
    shapes = [(8, 5), (5, 8), (8, 5), (3, 8, 5)]
    together, alone = ([owned(shape, seed) for seed, shape in enumerate(shapes)] for _ in range(2))
    apply_muon(together, rule(), NewtonSchulz(), max_batch_numel=max_batch_numel)
    for single in alone:
        apply_muon([single], rule(), NewtonSchulz())
    for left, right in zip(together, alone, strict=True):
        torch.testing.assert_close(left.weight, right.weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(left.second_moment, right.second_moment, rtol=1e-5, atol=1e-7)


def test_bf16_matrix_keeps_fp32_second_moments_across_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch, dtype=torch.bfloat16, update_rule="normuon")
    backward(setup.model, 0)
    setup.optimizer.step()
    saved = copy.deepcopy(setup.optimizer.state_dict())
    setup.optimizer.load_state_dict(saved)
    kept = setup.optimizer.state[setup.model.a_proj.weight]["second_moment"]
    assert kept.dtype == torch.float32
    assert any(torch.equal(kept, entry.get("second_moment", torch.zeros(0))) for entry in saved["state"].values())


def test_run_that_is_loaded_goes_on_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(monkeypatch, update_rule="normuon")
    for seed in range(2):
        backward(first.model, seed)
        first.optimizer.step()
        first.optimizer.zero_grad()
    second = build(monkeypatch, update_rule="normuon")
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for setup in (first, second):
        backward(setup.model, 2)
        setup.optimizer.step()
    for name, param in first.model.named_parameters():
        assert torch.equal(param, second.model.get_parameter(name)), name


def test_skipped_step_leaves_second_moments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch, update_rule="normuon")
    backward(setup.model, 0)
    setup.optimizer.step()
    kept = setup.optimizer.state[setup.model.a_proj.weight]["second_moment"]
    before = kept.clone()
    assert before.any()
    setup.model.b_proj.weight.grad.fill_(float("inf"))
    setup.optimizer.step()
    assert torch.equal(kept, before)


@pytest.mark.parametrize(("saved", "here"), [("muon", "normuon"), ("normuon", "muon")])
def test_state_of_the_other_rule_is_refused_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, saved: str, here: str
) -> None:
    state = build(monkeypatch, update_rule=saved).optimizer.state_dict()
    if saved == "muon":
        # Written before there were update rules.
        state["param_groups"] = [{k: v for k, v in g.items() if k != "update_rule"} for g in state["param_groups"]]
    with pytest.raises(ConfigurationError, match=f"build the optimizer with update_rule='{saved}'"):
        build(monkeypatch, update_rule=here).optimizer.load_state_dict(state)


def test_groups_may_have_either_rule_which_is_fixed_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    use(monkeypatch, FakeRuntime(model))
    chosen = model.a_proj.weight
    rest = [param for param in model.parameters() if param.requires_grad and param is not chosen]
    groups = [{"params": [chosen], "group_name": "a", "update_rule": "normuon"}, {"params": rest, "group_name": "rest"}]
    optimizer = Muon(model, param_groups=groups)
    backward(model, 0)
    optimizer.step()
    assert optimizer.state[chosen]["second_moment"].shape == (20,)
    assert set(optimizer.state[model.c_proj.weight]) == {"momentum_buffer"}
    optimizer.param_groups[1]["update_rule"] = "normuon"
    with pytest.raises(ConfigurationError, match=r"'rest/muon' has update_rule='normuon' now and was made with 'muon'"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_rule": "adamuon"}, "update_rule must be one of"),
        ({"normuon_beta2": 1.0}, r"normuon_beta2 .* \[0, 1\)"),
    ],
)
def test_argument_out_of_range_is_named(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(monkeypatch, **options)
