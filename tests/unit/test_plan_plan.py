"""The frozen plan: validation, JSON form, digest, and the words for a difference."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math

import pytest
import torch
from torch import nn

from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.plan import Candidate, MatrixSpec, Plan, canonical_name, make_plan, matrix_cost, newton_schulz_flops
from dmuon_hf.core.plan.cost import FOOTPRINT_FLOPS

SHAPES = {"q_proj": (256, 256), "k_proj": (128, 256), "gate_proj": (768, 256), "down_proj": (256, 768)}


def candidates(layers: int = 3) -> list[Candidate]:
    return [
        Candidate(name=f"layers.{layer}.{name}.weight", shape=shape, dtype=torch.float32, unit=f"layers.{layer}")
        for layer in range(layers)
        for name, shape in SHAPES.items()
    ]


def plan_of(layers: int = 3, **options: object) -> Plan:
    units = [f"layers.{layer}" for layer in range(layers)]
    return make_plan(candidates(layers), units=units, **{"shard_size": 2, "replicate_size": 2} | options)  # type: ignore[arg-type]


def test_plan_keeps_order_and_accounts_for_all_cost() -> None:
    plan = plan_of()
    assert [entry.name for entry in plan.entries] == [candidate.name for candidate in candidates()]
    assert sum(plan.loads()) == sum(entry.cost for entry in plan.entries)
    assert plan.imbalance() == pytest.approx(max(plan.loads()) * 4 / sum(plan.loads()) - 1)
    assert [entry.name for entry in plan.unit_entries("layers.1")] == [f"layers.1.{name}.weight" for name in SHAPES]
    assert {plan.flat_owner(entry) for entry in plan.entries} == {0, 1, 2, 3}


def test_flat_owner_follows_the_replicate_major_mesh() -> None:
    plan = plan_of()
    entry = dataclasses.replace(plan.entries[0], owner=(1, 0))
    assert plan.flat_owner(entry) == 1
    assert plan.flat_owner(dataclasses.replace(entry, owner=(0, 1))) == 2


def test_json_round_trip_gives_an_equal_plan_and_digest() -> None:
    tied = Candidate(
        name="layers.0.qkv.weight", shape=(64, 192), dtype=torch.bfloat16, unit="root",
        spec=MatrixSpec(groups=2, sections=(32, 32, 32), transposed=True), aliases=("head.weight",),
    )  # fmt: skip
    plan = make_plan([tied], units=["root"], shard_size=3, settings={"reshard": True, "dtype": None})
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan and again.digest() == plan.digest() and plan.difference(again) is None
    assert again.entry("head.weight").name == "layers.0.qkv.weight"


def test_digest_of_a_known_plan_is_stable() -> None:
    plan = make_plan(
        [Candidate(name="w", shape=(4, 3), dtype=torch.float32, unit="u")], units=["u"], shard_size=1, settings={"a": 1}
    )
    text = (
        f'{{"entries":[{{"aliases":[],"cost":{plan.entries[0].cost},"dtype":"float32","name":"w","owner":[0,0],'
        '"route":"muon","shape":[4,3],"spec":{"groups":1,"sections":null,"transposed":false},"unit":"u"}],"replicate_size":1,"settings":{"a":1},'
        '"shard_size":1,"units":["u"],"version":1}'
    )
    assert plan.digest() == hashlib.sha256(text.encode()).hexdigest()


def test_every_field_changes_the_digest_and_is_named() -> None:
    plan = plan_of(settings={"reshard": True})
    changes = {
        "shard_size": {"shard_size": 4},
        "replicate_size": {"replicate_size": 3},
        "settings": {"settings": (("reshard", False),)},
        "units": {"units": (*plan.units, "extra")},
        "layers.2.q_proj.weight": {"entries": plan.entries[:8] + plan.entries[9:]},
        "layers.2.down_proj.weight is dedicated here only": {"entries": plan.entries[:-1]},
    }
    per_entry = {
        "name": "other", "aliases": ("tied",), "shape": (512, 128), "dtype": torch.float64, "unit": "layers.1",
        "spec": MatrixSpec(sections=(128, 128)), "owner": (1 - plan.entries[0].owner[0], 0), "cost": 1,
        "route": "adamw",
    }  # fmt: skip
    for attribute, value in per_entry.items():
        changed = dataclasses.replace(plan.entries[0], **{attribute: value})
        key = (
            "layers.0.q_proj.weight here, other there"
            if attribute == "name"
            else f"{attribute} of layers.0.q_proj.weight"
        )
        changes[key] = {"entries": (changed, *plan.entries[1:])}
    for words, change in changes.items():
        other = dataclasses.replace(plan, **change)  # type: ignore[arg-type]
        assert other.digest() != plan.digest()
        difference = plan.difference(other)
        assert difference is not None and words in difference
    fields = {field.name for field in dataclasses.fields(plan.entries[0])}
    assert fields == set(per_entry)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": ("layers.0", "layers.1")}, "layers.2"),
        ({"units": ("layers.0", "layers.1", "layers.2", "layers.2")}, "unique"),
        ({"shard_size": 1}, "outside a mesh"),
    ],
)
def test_inconsistent_plan_raises(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        dataclasses.replace(plan_of(), **change)  # type: ignore[arg-type]


def test_alias_that_is_also_a_name_raises() -> None:
    first, *rest = candidates()
    with pytest.raises(ConfigurationError, match="twice"):
        make_plan([dataclasses.replace(first, aliases=(rest[0].name,)), *rest], units=plan_of().units, shard_size=1)


def test_candidate_that_is_no_matrix_is_named() -> None:
    bias = Candidate(name="layers.0.bias", shape=(8,), dtype=torch.float32, unit="u")
    kernel = Candidate(name="conv.weight", shape=(4, 8, 3, 3), dtype=torch.float32, unit="u")
    with pytest.raises(ConfigurationError, match=r"layers\.0\.bias"):
        make_plan([bias], units=["u"], shard_size=1)
    with pytest.raises(NotImplementedError, match=r"conv\.weight.*AdamW"):
        make_plan([kernel], units=["u"], shard_size=1)


def test_json_of_another_version_raises() -> None:
    with pytest.raises(ConfigurationError, match="version 2"):
        Plan.from_json(plan_of().to_json() | {"version": 2})


def test_unknown_name_is_no_entry() -> None:
    with pytest.raises(KeyError, match="nothing"):
        plan_of().entry("nothing")


def test_owner_options_reach_the_assignment() -> None:
    assert {entry.owner for entry in plan_of(owner_strategy="rank0").entries} == {(0, 0)}
    by_numel = plan_of(owner_cost_model="numel")
    assert [entry.cost for entry in by_numel.entries] == [math.prod(entry.shape) for entry in by_numel.entries]
    capped = plan_of(max_owners_per_group=1)
    assert all(len({entry.owner for entry in capped.unit_entries(unit)}) == 1 for unit in capped.units)
    grouped = [dataclasses.replace(candidate, group="all") for candidate in candidates()]
    together = make_plan(grouped, units=plan_of().units, shard_size=4, max_owners_per_group=1)
    assert len({entry.owner for entry in together.entries}) == 1


def test_flops_follow_the_formulas_in_either_orientation() -> None:
    assert newton_schulz_flops((8, 32), algorithm="direct") == 20 * 64 * 32 + 10 * 512
    assert newton_schulz_flops((32, 8), algorithm="gram") == 8 * 64 * 32 + 28 * 512


def test_matrix_cost_is_the_cheaper_algorithm_per_logical_matrix() -> None:
    square, wide = matrix_cost((64, 64), MatrixSpec()), matrix_cost((64, 256), MatrixSpec())
    assert square == 30 * 64**3 + FOOTPRINT_FLOPS * 64 * 64
    assert wide == 8 * 64 * 64 * 256 + 28 * 64**3 + FOOTPRINT_FLOPS * 64 * 256
    assert matrix_cost((128, 64), MatrixSpec(sections=(64, 64))) == 2 * square
    assert matrix_cost((64, 128), MatrixSpec(sections=(64, 64), transposed=True)) == 2 * square


def test_unknown_cost_model_raises() -> None:
    with pytest.raises(ConfigurationError, match="owner_cost_model"):
        matrix_cost((4, 4), MatrixSpec(), model="guess")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.q_proj.weight", "model.layers.0.q_proj.weight"),
        ("_orig_mod.model.w", "model.w"),
        ("module._orig_mod.model.w", "model.w"),
        ("_orig_mod.module.model.w", "model.w"),
        ("layers.0._checkpoint_wrapped_module.mlp._orig_mod.w", "layers.0.mlp.w"),
        ("layers.0.module.w", "layers.0.module.w"),
        ("my_module.w", "my_module.w"),
        ("_orig_model.w", "_orig_model.w"),
        ("module", "module"),
    ],
)
def test_canonical_name_drops_wrapper_segments_only(name: str, expected: str) -> None:
    assert canonical_name(name) == expected


def test_canonical_name_keeps_a_submodule_called_module() -> None:
    assert canonical_name("module.weight", nn.Module()) == "module.weight"


def test_stack_costs_its_owner_what_its_members_do() -> None:
    spec = MatrixSpec(sections=(4, 4))
    alone = Candidate(name="a", shape=(8, 8), dtype=torch.float32, unit="u", spec=spec)
    stack = Candidate(name="b", shape=(5, 8, 8), dtype=torch.float32, unit="u", spec=spec)
    plan = make_plan([alone, stack], units=["u"], shard_size=1)
    assert plan.entry("b").cost == 5 * plan.entry("a").cost
    assert plan.entry("b").logical_shapes == [(4, 8)] * 10
    assert Plan.from_json(plan.to_json()) == plan
