"""Training goes on from every mode in every other: a star through one process, and pairs picked across it.

A visit of a mode starts from the checkpoints of one process, as DCP's directory and as whole state dicts, trains a step
from each, and saves in both forms; one process goes on from these. So a launch covers a mode in both directions, and
two modes that pass pass with each other as far as one format goes. Pairs go directly, from what a visit has saved.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import dmuon_hf.core as dmuon
from tests.distributed.checkpoint_models import assert_close
from tests.distributed.checkpoint_modes import build, train
from tests.harness import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ONE, ONE_NORMUON = ("one_owned", 1), ("one_owned+normuon", 1)
START = 2
"""Steps before the checkpoints that visits start from."""

SIZES = {
    "ddp": (1, 2, 4, 8),
    "ddp_tp": (4, 8),
    "z2": (1, 2, 4, 8),
    "z3": (1, 2, 4, 8),
    "hsdp": (4, 8),
    "tp": (2, 4, 8),
    "hsdp_tp": (8,),
    "sharded": (1, 2, 4, 8),
    "sharded_hsdp": (4, 8),
    "sharded_tp": (2, 4, 8),
    "sharded_hsdp_tp": (8,),
    "expert_parallel": (2, 4, 8),
}
"""Numbers of ranks of every mode, of 1, 2, 4 and 8 those that it can have."""
VISITS = [(mode, ranks) for mode, sizes in SIZES.items() for ranks in sizes]
VISITS += [(f"{mode}+normuon", ranks) for mode, ranks in (("z3", 2), ("hsdp", 4), ("ddp", 2), ("tp", 4))]
VISITS += [(f"{mode}+normuon", ranks) for mode, ranks in (("sharded_tp", 4), ("expert_parallel", 2))]
PAIRS = [
    (("sharded_tp", 8), ("z3", 4)),
    (("z3", 4), ("expert_parallel", 2)),
    (("expert_parallel", 4), ("tp", 4)),
    (("hsdp_tp", 8), ("ddp", 4)),
    (("ddp_tp", 4), ("sharded", 4)),
    (("ddp", 2), ("sharded_tp", 4)),
    (("sharded_tp+normuon", 4), ("z3+normuon", 2)),
]

States = tuple[dict[str, Any], dict[str, Any]]


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def whole(model: nn.Module, optimizer: dmuon.Muon) -> States:
    return dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)


def save(model: nn.Module, optimizer: dmuon.Muon, directory: Path) -> None:
    """In three forms: DCP, our whole state dicts, torch's."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=directory / "dcp", no_dist=not dist.is_initialized())
    gathered = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    ours = whole(model, optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"ours": ours, "torch": gathered}, directory / "whole.pt")


def load(model: nn.Module, optimizer: dmuon.Muon, directory: Path, form: str) -> None:
    if form == "dcp":
        weights, state = get_state_dict(model, optimizer)
        found = {"model": weights, "optimizer": state}
        dcp.load(found, checkpoint_id=directory / "dcp", no_dist=not dist.is_initialized())
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        return
    weights, state = torch.load(directory / "whole.pt")[form]
    if form == "ours":
        dmuon.set_model_state_dict(model, weights)
        dmuon.set_optimizer_state_dict(model, optimizer, state)
        return
    # Torch cuts the whole tensors, or has the first rank send them.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world_size() == 4)
    if options.broadcast_from_rank0 and dist.get_rank() > 0:
        weights, state = {}, {}
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, state, options=options)


FORMS = ("dcp", "ours", "torch")


def visit(rank: int, world: int, mode: str, source: str, target: str | None, start: int) -> dict[str, States]:
    """Go on for a step from each form of ``source``, in a model of other values; save to ``target``."""
    reached: dict[str, States] = {}
    for form in FORMS:
        model, optimizer = build(mode, world, seed=7, lr=0.5)
        load(model, optimizer, Path(source), form)
        train(mode, model, optimizer, rank, world, range(start, start + 1))
        reached[form] = whole(model, optimizer)
    if target is not None:
        save(model, optimizer, Path(target))
    return reached


def one_like(mode: str) -> tuple[str, int]:
    """One process with the update rule of a mode."""
    return ONE_NORMUON if mode.endswith("+normuon") else ONE


@cache
def uninterrupted(steps: int, one: tuple[str, int] = ONE) -> States:
    model, optimizer = build(*one, seed=1)
    train(one[0], model, optimizer, 0, 1, range(steps))
    return whole(model, optimizer)


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def saved(directory: Path) -> Any:
    """The directory of what a mode has saved after `START` steps and a visit; of one process after `START`."""

    @cache
    def saved_by(mode: str, world: int) -> tuple[Path, dict[str, States]]:
        target = directory / f"{mode}-{world}"
        target.mkdir(exist_ok=True)
        if (mode, world) == one_like(mode):
            model, optimizer = build(mode, world, seed=1)
            train(mode, model, optimizer, 0, 1, range(START))
            save(model, optimizer, target)
            return target, {}
        source = saved_by(*one_like(mode))[0]
        return target, run_ranks(visit, world, mode, str(source), str(target), START)[0]

    return saved_by


@pytest.mark.parametrize(("mode", "world"), VISITS, ids=str)
def test_mode_goes_on_from_one_process_and_one_process_from_it(mode: str, world: int, saved: Any) -> None:
    target, reached = saved(mode, world)
    one = one_like(mode)
    for states in reached.values():
        assert_close(states, uninterrupted(START + 1, one))
    alone = one[0] if world % 4 else one[0].replace("owned", "plain")
    for form, states in visit(0, 1, alone, str(target), None, START + 1).items():
        assert_close(states, uninterrupted(START + 2, one)), form


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def test_mode_goes_on_from_another(source: tuple[str, int], target: tuple[str, int], saved: Any) -> None:
    path, _ = saved(*source)
    for states in run_ranks(visit, target[1], target[0], str(path), None, START + 1)[0].values():
        assert_close(states, uninterrupted(START + 2, one_like(target[0])))


def load_other_rule(rank: int, world: int, directory: str, saved: str, here: str) -> list[str]:
    """What each form of a checkpoint says to an optimizer of another update rule."""
    model, optimizer = build(saved, world, seed=1)
    train(saved, model, optimizer, rank, world, range(1))
    save(model, optimizer, Path(directory))
    model, optimizer = build(here, world, seed=1)
    messages = []
    for form in FORMS:
        with pytest.raises(dmuon.ConfigurationError) as error:
            load(model, optimizer, Path(directory), form)
        messages.append(str(error.value))
    momenta = [entry["momentum_buffer"] for entry in optimizer.state.values() if "momentum_buffer" in entry]
    assert not any(momentum.to_local().any() for momentum in momenta)
    return messages


@pytest.mark.parametrize(("saved", "here"), [("muon", "normuon"), ("normuon", "muon")])
def test_state_of_another_update_rule_is_refused_with_a_way_out(saved: str, here: str, tmp_path: Path) -> None:
    modes = {"muon": "z3", "normuon": "z3+normuon"}
    for messages in run_ranks(load_other_rule, 2, str(tmp_path), modes[saved], modes[here]):
        for message in messages:
            assert f"was saved with update_rule='{saved}', but has '{here}' here" in message
            assert f"build the optimizer with update_rule='{saved}'" in message
