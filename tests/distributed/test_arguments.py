"""What a caller passes to a module is what the module gets: no tensor, list or cache is replaced by another."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import dmuon_hf.core as dmuon
from tests.distributed.training import full
from tests.harness import run_ranks

D = 12
Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Record:
    hidden: Tensor
    seen: list[Any]


class Cache:
    """An object that no traversal of containers looks into."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []


class Block(nn.Module):
    """A residual MLP of two matrices and a norm, which calls `rule` with itself and what it was called with."""

    def __init__(self, rule: Callable[..., Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up_proj = nn.Linear(D, 20, bias=False)
        self.down_proj = nn.Linear(20, D, bias=False)
        self.rule = rule

    def mlp(self, x: Tensor) -> Tensor:
        return x + self.down_proj(torch.tanh(self.up_proj(self.norm(x))))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.rule(self, *args, **kwargs)


class Stack(nn.Module):
    """Three blocks that `drive` runs; the output is a loss, and `facts` holds what the case saw."""

    def __init__(self, case: str, checkpointing: str | None) -> None:
        super().__init__()
        rule, self.drive = CASES[case]
        self.inp = nn.Linear(D, D)
        self.layers = nn.ModuleList(Block(rule) for _ in range(3))
        self.facts: list[Any] = []
        self.run: Callable[..., Any] = lambda block, *args, **kwargs: block(*args, **kwargs)
        if checkpointing is not None:
            self.run = functools.partial(checkpoint, use_reentrant=checkpointing == "reentrant")

    def forward(self, x: Tensor) -> Tensor:
        return self.drive(self, self.inp(x))


def append_loss(block: Block, x: Tensor, log: list[Tensor]) -> Tensor:
    y = block.mlp(x)
    log.append(block.up_proj(y).square().mean())
    return y


def drive_losses(model: Stack, x: Tensor) -> Tensor:
    log: list[Tensor] = []
    for block in model.layers:
        x = model.run(block, x, log)
    model.facts.append(len(log))
    return x.square().mean() + sum(entry for entry in log if entry.requires_grad)


def drive_nested(model: Stack, x: Tensor) -> Tensor:
    extras: dict[str, Any] = {"deep": {"log": []}, "none": None}
    for block in model.layers:
        x = model.run(block, x, extras=extras)
    model.facts.append((sorted(extras), len(extras["deep"]["log"])))
    return x.square().mean() + extras["last"].mean()


def fill_nested(block: Block, x: Tensor, extras: dict[str, Any]) -> Tensor:
    y = block.mlp(x)
    extras["deep"]["log"].append(float(y.detach().mean()))
    extras["last"] = y * y
    return y


def drive_states(model: Stack, x: Tensor) -> Tensor:
    states = [x]
    for block in model.layers:
        model.run(block, states)
    model.facts.append(len(states))
    return torch.stack([state.square().mean() for state in states]).sum()


def append_state(block: Block, states: list[Tensor]) -> None:
    states.append(block.mlp(states[-1]))


def drive_beside(model: Stack, x: Tensor) -> Tensor:
    states = deque([x])
    for block in model.layers:
        x = model.run(block, x, states=states)
    model.facts.append(len(states))
    return torch.stack([state.square().mean() for state in states]).sum()


def append_beside(block: Block, x: Tensor, states: deque[Tensor]) -> Tensor:
    y = block.mlp(x)
    states.append(y)
    return y


def drive_cache(model: Stack, x: Tensor) -> Tensor:
    cache = Cache()
    for block in model.layers:
        x = model.run(block, x, cache=cache)
    model.facts.append(len(cache.items))
    return x.square().mean()


def fill_cache(block: Block, x: Tensor, cache: Cache) -> Tensor:
    cache.items.append(block.up_proj(x))
    return block.mlp(x) + 0.1 * cache.items[0].mean()


def drive_record(model: Stack, x: Tensor) -> Tensor:
    record = Record(x, [])
    for block in model.layers:
        record = model.run(block, record)
    model.facts.append(len(record.seen))
    return record.hidden.square().mean()


def pass_record(block: Block, record: Record) -> Record:
    record.seen.append(1)
    return Record(block.mlp(record.hidden), record.seen)


def drive_pair(model: Stack, x: Tensor) -> Tensor:
    pair = Pair(x, x)
    for block in model.layers:
        pair = model.run(block, pair, pair.first, None)
    return pair.first.square().mean() + pair.second.mean()


def pass_pair(block: Block, pair: Pair, again: Tensor, nothing: None) -> Pair:
    return Pair(block.mlp(pair.first) + 0.3 * again, pair.second)


def drive_idle(model: Stack, x: Tensor) -> Tensor:
    first = model.layers[0](x)
    kept = model.layers[1](first, through=True)
    return model.layers[2](kept).square().mean() + kept.mean()


def pass_through(block: Block, x: Tensor, through: bool = False) -> Tensor:
    return x if through else block.mlp(x)


def drive_in_place(model: Stack, x: Tensor) -> Tensor:
    for block in model.layers:
        x = x * 1.0
        same = model.run(block, x)
        model.facts.append(same is x)
        x = same
    return x.square().mean()


def change_in_place(block: Block, x: Tensor) -> Tensor:
    x += block.down_proj(torch.tanh(block.up_proj(x.clone())))
    return x


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "losses in a list": (append_loss, drive_losses),
    "nested dicts": (fill_nested, drive_nested),
    "only a list of states": (append_state, drive_states),
    "a deque of states beside the input": (append_beside, drive_beside),
    "an opaque cache": (fill_cache, drive_cache),
    "a dataclass": (pass_record, drive_record),
    "a named tuple, a tensor twice and None": (pass_pair, drive_pair),
    "a block that hands its input on": (pass_through, drive_idle),
}
UNWRAPPED = {"an input changed in place": (change_in_place, drive_in_place)}
CASES |= UNWRAPPED


def whole_batch() -> Tensor:
    return torch.randn(8, D, generator=torch.Generator().manual_seed(3))


def built(case: str, checkpointing: str | None) -> Stack:
    torch.manual_seed(0)
    return Stack(case, checkpointing)


def expected(case: str, checkpointing: str | None, world: int) -> tuple[list[Any], dict[str, Tensor]]:
    """Facts of one rank and the mean gradients of all, from plain torch on each part of the batch."""
    model = built(case, checkpointing)
    for part in whole_batch().chunk(world):
        model.facts.clear()
        (model(part) / world).backward()
    return model.facts, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def observed(
    rank: int, world: int, cases: list[str], mode: str, wrap: str, checkpointing: str | None
) -> dict[str, tuple[list[Any], dict[str, Tensor]]]:
    results = {}
    for case in cases:
        model = built(case, checkpointing)
        chosen = lambda name, param: "proj" in name  # noqa: E731
        reshard = mode != "z2"
        if mode == "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
            dmuon.dedicate_params(model, mesh["shard"], chosen, replicate_mesh=mesh["replicate"])
        else:
            mesh = init_device_mesh("cpu", (world,))
            dmuon.dedicate_params(model, mesh, chosen, reshard_after_forward=reshard)
        for block in model.layers if wrap == "blocks" else ():
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        model(whole_batch().chunk(world)[rank]).backward()
        gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        results[case] = (model.facts, gradients)
    return results


@pytest.mark.parametrize(
    ("mode", "wrap", "checkpointing"),
    [
        ("z2", "blocks", None),
        ("z3", "blocks", None),
        ("z3", "root", None),
        ("hsdp", "blocks", None),
        ("z3", "blocks", "reentrant"),
        ("z3", "root", "reentrant"),
        ("z3", "blocks", "not reentrant"),
        ("z3", "root", "not reentrant"),
    ],
)
def test_arguments_are_the_callers_and_gradients_are_those_of_plain_torch(
    mode: str, wrap: str, checkpointing: str | None
) -> None:
    # A tensor that is an argument itself comes to a wrapped block as FSDP2's alias of it, which must not be changed in
    # place; nor may the input of a checkpoint.
    world = 4 if mode == "hsdp" else 2
    cases = [case for case in CASES if case not in UNWRAPPED or (wrap == "root" and checkpointing is None)]
    if checkpointing == "reentrant":
        # What torch itself takes: tensors among positional arguments, and no list that needs a gradient.
        cases = ["losses in a list", "a block that hands its input on"]
    for results in run_ranks(observed, world, cases, mode, wrap, checkpointing):
        for case in cases:
            facts, gradients = expected(case, checkpointing, world)
            assert results[case][0] == facts, case
            for name, gradient in gradients.items():
                torch.testing.assert_close(
                    results[case][1][name],
                    gradient,
                    rtol=1e-4,
                    atol=1e-6,
                    msg=lambda m: f"{case} {name}: {m}",  # noqa: B023
                )


@dataclasses.dataclass
class Seen:
    total: Any
    names: list[str]


class Recording(nn.Module):
    """A block that changes every container it is given, beside an fp32 loss in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(D, 20, bias=False)
        self.down_proj = nn.Linear(20, D, bias=False)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor, losses: list[Any], found: dict[str, Any], seen: Seen, pair: Pair) -> Tensor:
        y = x + self.down_proj(torch.tanh(self.up_proj(x)))
        self.dtypes.append(pair.second["mask"].dtype)
        losses.append(y.float().square().mean())
        found["deep"][f"entry{len(found['deep'])}"] = y.float().mean()
        found.pop("once", None)
        seen.total = seen.total + y.float().mean()
        seen.names.append("block")
        pair.first.add(len(pair.first))
        return y


def record(rank: int, world: int, inputs_cast: bool, grad: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Module()
    # The second has nothing owned.
    model.layers = nn.ModuleList(Recording() for _ in range(3))
    model.forward = lambda x, *rest: functools.reduce(lambda h, block: block(h, *rest), model.layers, x)
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, lambda name, param: "layers.1" not in name, compute_dtype=torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=inputs_cast)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    mask = torch.ones(3)
    losses, found, seen = [torch.zeros(())], {"deep": {}, "once": torch.ones(2)}, Seen(torch.zeros(()), [])
    pair = Pair(set(), {"mask": mask})
    x = whole_batch().chunk(world)[rank]
    with torch.set_grad_enabled(grad):
        model(x if inputs_cast else x.bfloat16(), losses, found, seen, pair)
    return {
        "losses": (len(losses), {loss.dtype for loss in losses}, [loss.requires_grad for loss in losses[1:]]),
        "found": (sorted(found), len(found["deep"])),
        "seen": (seen.total.item() != 0, len(seen.names)),
        "pair": (len(pair.first), pair.second["mask"] is mask),
        "dtypes": [block.dtypes for block in model.layers],
    }


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inputs_cast", [True, False])
def test_containers_are_the_callers_under_a_policy_that_casts_inputs(inputs_cast: bool, grad: bool) -> None:
    for result in run_ranks(record, 2, inputs_cast, grad):
        assert result == {
            "losses": (4, {torch.float32}, [grad] * 3),
            "found": (["deep"], 3),
            "seen": (True, 3),
            "pair": (3, True),
            "dtypes": [[torch.bfloat16 if inputs_cast else torch.float32]] * 3,
        }
