"""Units in plan order, in windows, each published when its matrices are updated."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from dmuon_hf.core.ns import NewtonSchulz
from dmuon_hf.core.optim import sweep as sweeping
from dmuon_hf.core.optim.sweep import sweep, windows
from dmuon_hf.core.optim.update import MuonRule, OwnedMatrix, apply_muon
from dmuon_hf.core.plan import MatrixSpec
from tests.unit.muon_fakes import FakeMatrix, FakeUnit, backward, build

SHAPE = (8, 4)
RULE = MuonRule(lr=0.1, momentum=0.9, nesterov=True, ns_steps=5, weight_decay=0.1, lr_scale="none")


def unit(name: str, owned: Sequence[bool], calls: list[str]) -> FakeUnit:
    """A unit of as many matrices of 32 elements, some of them this rank's."""
    matrices = [
        FakeMatrix(f"{name}.{i}", nn.Parameter(torch.randn(SHAPE)), MatrixSpec(), mine) for i, mine in enumerate(owned)
    ]
    return FakeUnit(name, matrices, calls)


def mine_of(units: Sequence[FakeUnit]) -> dict[int, OwnedMatrix]:
    return {
        id(m.param): OwnedMatrix(m.name, m.param.detach(), torch.randn(SHAPE), torch.randn(SHAPE), m.spec)
        for each in units
        for m in each.matrices
        if m.is_owner
    }


@pytest.mark.parametrize(
    ("owned", "most", "expected"),
    [
        ([[True], [True], [True]], 64, [["0", "1"], ["2"]]),
        ([[True], [True], [True]], 1, [["0"], ["1"], ["2"]]),
        ([[True], [True], [True]], 1 << 20, [["0", "1", "2"]]),
        ([[False], [False], [True], [False], [True]], 64, [["0"], ["1"], ["2", "3", "4"]]),
        ([[True, True, True], [True]], 64, [["0"], ["1"]]),
        ([[False], [False]], 64, [["0"], ["1"]]),
        ([], 64, []),
    ],
)
def test_window_takes_consecutive_units_up_to_the_bound(
    owned: list[list[bool]], most: int, expected: list[list[str]]
) -> None:
    units = [unit(str(i), each, []) for i, each in enumerate(owned)]
    assert [[u.name for u in window] for window in windows(units, mine_of(units), most)] == expected


@pytest.mark.parametrize("most", [1, 64, 1 << 20])
def test_every_unit_is_published_in_order_after_its_matrices(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(sweeping, "windows", lambda units, mine: windows(units, mine, most))
    calls: list[str] = []
    units = [unit(str(i), owned, calls) for i, owned in enumerate([[True, False], [False], [True, True], [True]])]
    mine = mine_of(units)
    rules = {id(m.param): RULE for each in units for m in each.matrices}
    left_out = units[2].matrices[1].param
    del rules[id(left_out)], mine[id(left_out)]
    before = left_out.detach().clone()
    count = sweep(
        units, rules, mine, NewtonSchulz(), on_batch=lambda batch: calls.extend(f"update {m.name}" for m in batch)
    )
    assert count == 3
    assert [call for call in calls if call.startswith("publish")] == [f"publish {i}" for i in range(4)]
    for name in ("0.0", "2.0", "3.0"):
        assert calls.index(f"update {name}") < calls.index(f"publish {name[0]}")
    if most == 1:
        assert calls.index("publish 0") < calls.index("update 2.0")
    assert [m.updates for each in units for m in each.matrices] == [1, 1, 1, 1, 0, 1]
    assert torch.equal(left_out, before)


def test_windows_change_no_result_and_groups_share_no_batch() -> None:
    calls: list[str] = []
    units = [unit(str(i), [True, True], calls) for i in range(4)]
    mine = mine_of(units)
    twins = {
        key: OwnedMatrix(m.name, m.weight.clone(), m.grad.clone(), m.momentum.clone(), m.spec)
        for key, m in mine.items()
    }
    other = MuonRule(lr=0.1, momentum=0.9, nesterov=True, ns_steps=5, weight_decay=0.1, lr_scale="none")
    rules = {id(m.param): (RULE, other)[i] for each in units for i, m in enumerate(each.matrices)}
    batches: list[int] = []

    def record(matrices: Tensor, *, steps: int | None = None) -> Tensor:
        batches.append(len(matrices))
        return NewtonSchulz()(matrices, steps=steps)

    assert sweep(units, rules, mine, record) == 8
    assert batches == [4, 4]
    for key, twin in twins.items():
        apply_muon([twin], RULE, NewtonSchulz())
        torch.testing.assert_close(mine[key].weight, twin.weight, rtol=1e-5, atol=1e-6)


def test_profiler_names_the_phases_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    backward(setup.model, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        setup.optimizer.step()
    ranges = {event.key for event in profile.key_averages()}
    assert {"dmuon::agreement", "dmuon::newton_schulz first to second", "dmuon::adamw default/adamw"} <= ranges


def test_step_with_a_gradient_that_is_gone_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(monkeypatch)
    backward(setup.model, 0)
    setup.runtime.others = lambda values: torch.ones_like(values) * torch.tensor([0, 1, -1, *([1] * (len(values) - 3))])
    before = {name: param.detach().clone() for name, param in setup.model.named_parameters()}
    setup.model.fused_proj.weight.grad = None
    with pytest.raises(Exception, match=r"fused_proj\.weight.* is gone"):
        setup.optimizer.step()
    for name, param in setup.model.named_parameters():
        assert torch.equal(param, before[name]), name
