"""Hooks that users put on weights run for owned ones as FSDP2 runs them for its own: on the reduced gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import ConfigurationError, DMuonError
from tests.distributed.lockstep_setup import HYPER, Net, is_matrix, make_net, part_of
from tests.distributed.training import dedicate_on, full
from tests.harness import run_ranks

MODES = [("local", 1), ("z2", 2), ("z3", 2), ("hsdp", 4)]
MASKED = "layers.1.up.weight"
Hook = Callable[[nn.Parameter], None]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def halve(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def replace_by_double(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad * 2.0


def mask_first_rows(param: nn.Parameter) -> None:
    """A mask of the form of the weight."""
    assert param.grad is not None
    mask = torch.ones_like(param)
    local_of(mask)[:3] = 0.0
    param.grad.mul_(mask)


def drop(param: nn.Parameter) -> None:
    param.grad = None


def decay(param: nn.Parameter) -> None:
    """An optimizer in backward."""
    optimizer = torch.optim.SGD([param], lr=0.5)
    optimizer.step()
    optimizer.zero_grad()


HOOKS: dict[str, Hook] = {hook.__name__: hook for hook in (halve, replace_by_double, mask_first_rows, drop, decay)}


def prepare(mode: str, world: int, before: Callable[[Net], None] | None = None) -> Net:
    model = make_net(norm=True)
    if before is not None:
        before(model)
    if mode == "local":
        dmuon.dedicate_params(model, None, is_matrix)
        return model
    mesh = dedicate_on(model, world, mode, is_matrix)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def count_calls(rank: int, world: int, mode: str) -> list[list[str]]:
    """Names in the order of the calls: of a pass under no_sync, of one that reduces, after handles were removed."""
    model = prepare(mode, world)
    optimizer = dmuon.Muon(model, **HYPER)
    seen: list[str] = []
    handles = []
    for name, param in model.named_parameters():

        def note(param: nn.Parameter, name: str = name) -> None:
            assert param.grad is not None
            assert param.grad.shape == param.shape
            seen.append(name)

        handles.append(param.register_post_accumulate_grad_hook(note))
    calls = []
    if mode != "local":
        with dmuon.no_sync(model):
            model(part_of(0, rank, world)).backward()
        calls.append(list(seen))
    model(part_of(1, rank, world)).backward()
    calls.append(list(seen))
    optimizer.step()
    optimizer.zero_grad()
    seen.clear()
    for handle in handles:
        handle.remove()
    model(part_of(2, rank, world)).backward()
    calls.append(list(seen))
    return calls


@pytest.mark.parametrize(("mode", "world"), MODES)
def test_hook_runs_once_in_each_pass_that_reduces_in_one_order_on_all_ranks(mode: str, world: int) -> None:
    results = run_ranks(count_calls, world, mode, init=mode != "local")
    names = [name for name, _ in make_net(norm=True).named_parameters()]
    for *without_sync, reduced, removed in results:
        assert without_sync == [[]] * len(without_sync)
        assert sorted(reduced) == sorted(names)
        assert removed == []
    owned = [[name for name in reduced if "up" in name or "down" in name] for *_, reduced, _ in results]
    assert owned == [owned[0]] * len(owned)


def train_with_hook(rank: int, world: int, mode: str, hook: str, early: bool) -> dict[str, torch.Tensor | None]:
    """The gradient that the hook left after two passes, and the weight after the step."""

    def register(model: Net) -> None:
        dict(model.named_parameters())[MASKED].register_post_accumulate_grad_hook(HOOKS[hook])

    model = prepare(mode, world, before=register if early else None)
    if not early:
        register(model)
    optimizer = dmuon.Muon(model, **HYPER)
    for _ in range(2):
        losses = [model(part_of(0, part, 2)) for part in ((rank % 2,) if world > 1 else (0, 1))]
        torch.stack(losses).mean().backward()
    param = dict(model.named_parameters())[MASKED]
    grad = full(param.grad)
    optimizer.step()
    return {"grad": grad, "weight": full(param)}


@pytest.mark.parametrize("early", [False, True], ids=["registered_after", "registered_before"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hook_that_changes_gradient_or_weight_does_as_in_one_process(hook: str, early: bool) -> None:
    want = run_ranks(train_with_hook, 1, "local", hook, early, init=False)[0]
    modes = MODES[1:] if early else MODES[2:3]
    for mode, world in modes:
        for got in run_ranks(train_with_hook, world, mode, hook, early):
            assert (got["grad"] is None) == (want["grad"] is None)
            if want["grad"] is not None:
                torch.testing.assert_close(got["grad"], want["grad"], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(got["weight"], want["weight"], rtol=1e-3, atol=1e-4)


def step_inside(rank: int, world: int) -> str:
    model = prepare("z3", world)
    optimizer = dmuon.Muon(model, **HYPER)
    model.layers[0].up.weight.register_post_accumulate_grad_hook(lambda param: optimizer.step())
    with pytest.raises(DMuonError) as error:
        model(part_of(0, rank, world)).backward()
    return str(error.value)


def test_step_of_the_whole_optimizer_inside_backward_is_refused() -> None:
    for message in run_ranks(step_inside, 2):
        assert "inside of a backward pass" in message


def hook_the_gradient(rank: int, world: int, early: bool) -> str:
    def register(model: Net) -> None:
        model.layers[2].up.weight.register_hook(lambda grad: grad)

    try:
        model = prepare("z3", world, before=register if early else None)
        register(model)
        model(part_of(0, rank, world))
    except ConfigurationError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("early", [False, True])
def test_tensor_hook_on_an_owned_weight_is_refused_by_name(early: bool) -> None:
    for message in run_ranks(hook_the_gradient, 2, early):
        assert "layers.2.up.weight" in message
        assert "register_post_accumulate_grad_hook" in message


def add_statistic(model: Net, when: str) -> None:
    """Hooks of the first block that read a weight of it, as a user may have put them there before ownership."""
    block = model.layers[0]
    if when == "before its forward":
        block.register_forward_pre_hook(lambda module, args: (args[0] + 0.1 * module.up.weight.mean(),))
    else:
        block.register_forward_hook(lambda module, args, output: output + 0.1 * module.up.weight.mean())


def gradient_under(rank: int, world: int, mode: str, when: str) -> torch.Tensor:
    model = prepare(mode, world, before=lambda model: add_statistic(model, when))
    losses = [model(part_of(0, part, 2)) for part in ((rank % 2,) if world > 1 else (0, 1))]
    torch.stack(losses).mean().backward()
    gradient = full(model.layers[0].up.weight.grad)
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("when", ["before its forward", "after its forward"])
def test_forward_hook_from_before_ownership_reads_whole_weights(when: str) -> None:
    want = run_ranks(gradient_under, 1, "local", when, init=False)[0]
    for mode, world in MODES[1:]:
        for got in run_ranks(gradient_under, world, mode, when):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
