"""The four state-dict functions: their format, resuming on other topologies, and refusing what does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

from dmuon_hf.core.checkpoint import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from dmuon_hf.core.errors import ConfigurationError, LockstepError
from dmuon_hf.core.runtime import OwnedTensor
from tests.distributed.checkpoint_models import Layout, assert_close, build, flat, single_run, train
from tests.harness import run_ranks

StateDicts = tuple[dict[str, Any], dict[str, Any]]


def states(model: nn.Module, optimizer: torch.optim.Optimizer, **options: bool) -> StateDicts:
    return get_model_state_dict(model, **options), get_optimizer_state_dict(model, optimizer, **options)


def trained_states(rank: int, world: int, kind: str, layout: Layout, rank0_only: bool) -> StateDicts:
    model, optimizer = build(kind, layout, world, seed=1)
    train(kind, model, optimizer, rank, world, range(2))
    return states(model, optimizer, rank0_only=rank0_only)


@pytest.mark.parametrize(
    ("kind", "layout", "world"),
    [("uneven", "fsdp", 3), ("uneven", "hsdp", 4), ("llama", "fsdp", 4), ("tied", "fsdp", 2), ("tied", "hsdp", 4)],
)
def test_state_dicts_equal_those_of_one_process(kind: str, layout: Layout, world: int) -> None:
    model, optimizer = single_run(kind, range(2))
    expected = states(model, optimizer)
    assert list(expected[0]) == list(model.state_dict())
    first, *others = run_ranks(trained_states, world, kind, layout, rank0_only=True)
    assert_close(first, expected)
    empty: StateDicts = ({}, {"fsdp": {}, "dedicated": {}, "dedicated_adamw": {}, "param_groups": []})
    assert all(other == empty for other in others)


def test_state_dicts_without_rank0_only_are_whole_on_every_rank() -> None:
    results = run_ranks(trained_states, 2, "tied", "fsdp", rank0_only=False)
    assert_close(results[0], results[1], atol=0.0)
    assert_close(results[0], states(*single_run("tied", range(2))))


def test_optimizer_state_dict_has_documented_sections() -> None:
    model, optimizer = single_run("tied", range(1))
    state = get_optimizer_state_dict(model, optimizer)
    assert list(state) == ["fsdp", "dedicated", "dedicated_adamw", "param_groups"]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert state["dedicated"][name]["momentum_buffer"].shape == (64, 64)
    assert state["fsdp"]["model.norm.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert state["dedicated_adamw"] == {}
    assert [group["group_name"] for group in state["param_groups"]] == ["default/muon", "default/adamw"]
    assert name in state["param_groups"][0]["params"] and "model.norm.weight" in state["param_groups"][1]["params"]
    assert state["param_groups"][0]["lr"] == 0.02


def no_aliases(rank: int, world: int) -> None:
    model, optimizer = build("tied", "fsdp", world, seed=1)
    train("tied", model, optimizer, rank, world, range(1))
    before = states(model, optimizer, rank0_only=False)
    frozen = copy.deepcopy(before)
    train("tied", model, optimizer, rank, world, range(1, 3))
    model.steps_seen.add_(1)
    assert_close(before, frozen, atol=0.0)
    after = states(model, optimizer, rank0_only=False)
    for part in after:
        for value in flat(part).values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    assert get_model_state_dict(model, rank0_only=False)["model.norm.weight"].any()


def test_state_dicts_share_nothing_with_the_model() -> None:
    run_ranks(no_aliases, 1)  # one rank: a shard is the whole, so gathering it may alias
    run_ranks(no_aliases, 2)


def test_tied_names_share_one_tensor() -> None:
    model, _ = single_run("tied", range(1))
    state = get_model_state_dict(model)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]


def loads_in_place(rank: int, world: int, reference: StateDicts) -> None:
    model, optimizer = build("uneven", "fsdp", world, seed=7)
    held = [(param, optimizer.state[param], dict(optimizer.state[param])) for param in model.parameters()]
    versions = {name: p.content.version for name, p in model.named_parameters() if isinstance(p, OwnedTensor)}
    loaded = reference if rank == 0 else ({}, {})
    set_model_state_dict(model, loaded[0])
    set_optimizer_state_dict(model, optimizer, loaded[1])
    for param, state, entries in held:
        assert optimizer.state[param] is state and all(state[key] is value for key, value in entries.items())
    assert all(dict(model.named_parameters())[name].content.version > version for name, version in versions.items())


def test_loading_writes_in_place_and_marks_gathered_weights_stale() -> None:
    run_ranks(loads_in_place, 2, states(*single_run("uneven", range(2))))


def with_option(state: dict[str, Any], option: str, value: Any) -> list[dict[str, Any]]:
    """The groups of an optimizer's state dict with another value where they have an option."""
    return [group | ({option: value} if option in group else {}) for group in copy.deepcopy(state["param_groups"])]


def refuses(rank: int, world: int) -> None:
    model, optimizer = build("tied", "fsdp", world, seed=1)
    train("tied", model, optimizer, rank, world, range(1))
    model.steps_seen.add_(7)
    good = states(model, optimizer, rank0_only=False)
    weight, norm = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"

    def without(nested: dict[str, Any], *path: str) -> dict[str, Any]:
        return changed(nested, *path, to=None)

    def changed(nested: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
        result = copy.deepcopy(nested)
        holder = result
        for key in path[:-1]:
            holder = holder[key]
        if to is None:
            del holder[path[-1]]
        else:
            holder[path[-1]] = to
        return result

    bad_models = {
        f"{weight} is missing": without(good[0], weight),
        "steps_seen is missing": without(good[0], "steps_seen"),
        "extra is unexpected": good[0] | {"extra": torch.zeros(1)},
        r"has shape \(64, 96\), but \(96, 64\) here": good[0] | {weight: good[0][weight].T},
        "is a str, not a tensor": good[0] | {weight: "weights"},
        "is distributed": good[0] | {weight: dict(model.named_parameters())[weight].detach()},
        "one tied parameter but have different": good[0] | {"lm_head.weight": torch.zeros(128, 64)},
        "complex64, which does not load into torch.float32": good[0] | {weight: good[0][weight].to(torch.complex64)},
        "int8, which does not load into torch.float32": good[0] | {weight: good[0][weight].to(torch.int8)},
        "bool, which does not load into torch.float32": good[0] | {weight: good[0][weight] > 0},
        "steps_seen has dtype torch.int64": good[0] | {"steps_seen": good[0]["steps_seen"].long()},
        "is on the meta device": good[0] | {weight: good[0][weight].to("meta")},
        "is sparse_coo": good[0] | {weight: good[0][weight].to_sparse()},
        "is quantised": good[0] | {weight: torch.quantize_per_tensor(good[0][weight], 0.1, 0, torch.qint8)},
        "is a TwoTensor": good[0] | {weight: TwoTensor(good[0][weight], good[0][weight].clone())},
    }
    section = good[1]["dedicated"]
    moved = without(good[1], "dedicated", weight)
    moved["fsdp"][weight] = section[weight]
    renamed = copy.deepcopy(good[1]["param_groups"])
    renamed[0]["group_name"] = "other"
    regrouped = copy.deepcopy(good[1]["param_groups"])
    regrouped[0]["params"].remove(weight)
    bad_optimizers = {
        f"{weight}/momentum_buffer is missing": without(good[1], "dedicated", weight),
        "exp_avg_sq is missing": without(good[1], "fsdp", norm, "exp_avg_sq"),
        "dedicated/ghost/momentum_buffer is unexpected": changed(
            good[1], "dedicated", to=section | {"ghost": section[weight]}
        ),
        r"has shape \(3,\)": changed(good[1], "fsdp", norm, "exp_avg", to=torch.zeros(3)),
        "is in section 'fsdp' of the state dict": moved,
        "param_groups are .'other'": changed(good[1], "param_groups", to=renamed),
        "differs in .*up_proj": changed(good[1], "param_groups", to=regrouped),
        "not a list of dicts": changed(good[1], "param_groups", to="groups"),
        "fsdp is unexpected": changed(good[1], "fsdp", to=[1]),
        "exp_avg has dtype torch.int64": changed(good[1], "fsdp", norm, "exp_avg", to=torch.zeros(64).long()),
        "momentum_buffer is sparse_coo": changed(
            good[1], "dedicated", weight, "momentum_buffer", to=section[weight]["momentum_buffer"].to_sparse()
        ),
        "has lr='fast', but": changed(good[1], "param_groups", to=with_option(good[1], "lr", "fast")),
        r"has betas=\(0.9,\), but": changed(good[1], "param_groups", to=with_option(good[1], "betas", (0.9,))),
        r"has lr=tensor\(\[": changed(good[1], "param_groups", to=with_option(good[1], "lr", torch.ones(2))),
    }
    for where in ("every rank", "rank 1 only", "sent by rank 0"):

        def given(bad: dict[str, Any], fine: dict[str, Any], where: str = where) -> dict[str, Any]:
            if where == "every rank":
                return bad
            if where == "rank 1 only":
                return bad if rank == 1 else fine
            return bad if rank == 0 else {}

        for words, bad in bad_models.items():
            with pytest.raises(ConfigurationError, match=words):
                set_model_state_dict(model, given(bad, good[0]))
        for words, bad in bad_optimizers.items():
            with pytest.raises(ConfigurationError, match=words):
                set_optimizer_state_dict(model, optimizer, given(bad, good[1]))
    for empty in ({}, {"fsdp": {}, "dedicated": {}, "param_groups": []}):
        with pytest.raises(ConfigurationError, match="missing"):
            set_optimizer_state_dict(model, optimizer, empty)
    with pytest.raises(ConfigurationError, match="rank 0 among them"):
        set_model_state_dict(model, good[0] if rank == 1 else {})
    assert_close(states(model, optimizer, rank0_only=False), good, atol=0.0)


def test_what_does_not_fit_is_refused_on_every_rank_and_nothing_changes() -> None:
    run_ranks(refuses, 2)


def test_one_tied_name_is_enough() -> None:
    model, _ = single_run("tied", range(1))
    state = get_model_state_dict(model)
    target, _ = build("tied", "single", 1, seed=3)
    set_model_state_dict(target, {name: value for name, value in state.items() if name != "lm_head.weight"})
    assert_close(get_model_state_dict(target), state, atol=0.0)


def some_names(rank: int, world: int) -> None:
    model, _ = build("uneven", "fsdp", world, seed=1)
    before = get_model_state_dict(model, rank0_only=False)
    first, *others = before
    given = {first: torch.ones_like(before[first])} if rank == 0 else {}
    set_model_state_dict(model, given, only=[first])
    after = get_model_state_dict(model, rank0_only=False)
    assert torch.equal(after[first], torch.ones_like(before[first]))
    assert all(torch.equal(after[name], before[name]) for name in others)
    with pytest.raises(ConfigurationError, match="unexpected"):
        set_model_state_dict(model, {others[0]: before[others[0]], **before} if rank == 0 else {}, only=[first])


def test_names_that_are_not_asked_for_stay_as_they_are() -> None:
    run_ranks(some_names, 2)


def only_on_rank_0(rank: int, world: int) -> None:
    model, optimizer = build("uneven", "fsdp", world, seed=1)
    short = timedelta(seconds=1)
    if rank == 0:
        with pytest.raises(LockstepError, match=r"get_model_state_dict.*ranks \[1\].*every rank"):
            get_model_state_dict(model, timeout=short)
        with pytest.raises(LockstepError, match=r"set_optimizer_state_dict.*ranks \[1\]"):
            set_optimizer_state_dict(model, optimizer, {}, timeout=short)
    dist.barrier()
    assert bool(get_model_state_dict(model)) == (rank == 0)  # the ranks are still in step


def test_call_on_rank_0_only_is_an_error_that_names_the_missing_ranks() -> None:
    run_ranks(only_on_rank_0, 2)


def test_optimizer_without_routes_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="no routes"):
        get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))


def test_optimizer_of_another_model_is_refused() -> None:
    _, optimizer = single_run("uneven", range(1))
    other, _ = single_run("uneven", range(1))
    with pytest.raises(ConfigurationError, match="does not"):
        get_optimizer_state_dict(other, optimizer)


class Remembering(nn.Linear):
    """A module with state that is no tensor."""

    memory = "blank"

    def get_extra_state(self) -> str:
        return self.memory

    def set_extra_state(self, state: str) -> None:
        self.memory = state


class Picky(Remembering):
    def set_extra_state(self, state: str) -> None:
        if state == "spoilt":
            raise ValueError("will not have it")
        super().set_extra_state(state)


def refused_extra_state(rank: int, world: int) -> None:
    model = nn.Sequential(Remembering(2, 2), Picky(2, 2))
    before = copy.deepcopy(get_model_state_dict(model, rank0_only=False))
    state = {name: value + 1 if isinstance(value, torch.Tensor) else "new" for name, value in before.items()}
    if rank == 1:
        state["1._extra_state"] = "spoilt"
    with pytest.raises(ConfigurationError, match=r"rank 1.*nothing was loaded.*Picky.*ValueError: will not have it"):
        set_model_state_dict(model, state)
    assert_close(get_model_state_dict(model, rank0_only=False), before, atol=0.0)


def test_extra_state_that_one_rank_refuses_leaves_every_rank_as_it_was() -> None:
    run_ranks(refused_extra_state, 2)


def unsendable(rank: int, world: int) -> None:
    model = nn.Sequential(Remembering(2, 2))
    state = get_model_state_dict(model)
    if rank == 0:
        state["0._extra_state"] = lambda: None
    with pytest.raises(ConfigurationError, match="cannot be sent"):
        set_model_state_dict(model, state)


def test_state_that_cannot_be_sent_is_an_error_on_every_rank() -> None:
    run_ranks(unsendable, 2)


class Tagged(torch.Tensor):
    pass


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "non-leaf": lambda value: value.detach().requires_grad_() * 1,
    "leaf that requires a gradient": lambda value: value.detach().clone().requires_grad_(),
    "parameter": lambda value: nn.Parameter(value.clone()),
    "transposed": lambda value: value.mT.contiguous().mT if value.ndim > 1 else value,
    "part of a larger one": lambda value: torch.cat([value, value])[: len(value)],
    "every other element": lambda value: torch.stack([value, value], dim=-1)[..., 0],
    "subclass": lambda value: value.clone().as_subclass(Tagged),
    "float64": lambda value: value.double(),
    "with NaN": lambda value: value.clone().fill_(torch.nan),
    "in flight": lambda value: AsyncCollectiveTensor(value.clone()),
}


def loads_forms(rank: int, world: int) -> None:
    model, optimizer = build("tied", "fsdp", world, seed=1)
    train("tied", model, optimizer, rank, world, range(1))
    good = states(model, optimizer, rank0_only=False)
    for form, make in FORMS.items():
        shifted = {name: value + 1 if value.is_floating_point() else value for name, value in good[0].items()}
        given = {name: make(value) if value.is_floating_point() else value for name, value in shifted.items()}
        moments = copy.deepcopy(good[1])
        for section in ("fsdp", "dedicated"):
            for entry in moments[section].values():
                entry.update({key: make(value + 1) for key, value in entry.items() if value.ndim > 0})
        for sent in (False, True):
            set_model_state_dict(model, good[0])
            set_optimizer_state_dict(model, optimizer, good[1])
            set_model_state_dict(model, given if rank == 0 or not sent else {})
            set_optimizer_state_dict(model, optimizer, moments if rank == 0 or not sent else {})
            loaded, state = states(model, optimizer, rank0_only=False)
            for name, value in shifted.items():
                expected = torch.full_like(value, torch.nan) if "NaN" in form and value.ndim > 0 else value
                assert torch.equal(loaded[name].nan_to_num(9), expected.nan_to_num(9)), (form, sent, name)
            for name, entry in good[1]["dedicated"].items():
                expected = entry["momentum_buffer"] + 1
                if "NaN" not in form:
                    assert torch.equal(state["dedicated"][name]["momentum_buffer"], expected), (form, sent, name)


def test_tensors_of_any_form_load_into_model_and_optimizer() -> None:
    run_ranks(loads_forms, 2)


def extra_states(rank: int, world: int) -> str:
    model = nn.Sequential(Remembering(2, 2))
    if rank == 0:
        model[0].memory = "rank 0"
    state = get_model_state_dict(model)
    model[0].memory = "blank"
    set_model_state_dict(model, state)
    return model[0].memory


def test_extra_state_of_modules_is_kept_and_sent() -> None:
    assert run_ranks(extra_states, 2) == ["rank 0", "rank 0"]


def test_compiled_model_has_names_without_wrapper_prefix() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    state = get_model_state_dict(compiled)
    assert list(state) == ["weight", "bias"]
    set_model_state_dict(compiled, {name: value + 1 for name, value in state.items()})
    assert torch.equal(model.weight, state["weight"] + 1)


def low_precision(rank: int, world: int) -> None:
    model, _ = build("uneven", "fsdp", world, seed=1)
    state = get_model_state_dict(model, rank0_only=False)
    halved = {name: value.to(torch.bfloat16) for name, value in state.items()}
    set_model_state_dict(model, halved if rank == 0 else {})
    loaded = get_model_state_dict(model, rank0_only=False)
    for name, value in loaded.items():
        assert value.dtype == state[name].dtype and torch.equal(value, halved[name].to(value.dtype)), name


def test_loading_another_dtype_keeps_the_models_dtype() -> None:
    run_ranks(low_precision, 2)
