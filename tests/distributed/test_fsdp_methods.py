"""The public methods of FSDPModule act on owned weights as on FSDP2's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp._fully_shard as fully_shard_package
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

import dmuon_hf.core as dmuon
from dmuon_hf.core.runtime import fsdp_methods, install_patch, uninstall_patch
from dmuon_hf.core.runtime.runtime import require_runtime
from dmuon_hf.core.runtime.states import WeightState
from tests.distributed.training import full
from tests.harness import run_ranks
from tests.harness.models import TinyMLP, dense_batch, rank_part

FUNCTIONS = {
    "fully_shard": "leaves owned weights alone; tests/distributed/test_setup.py",
    "register_fsdp_forward_method": "acts",
    "share_comm_ctx": "no effect: owned weights have streams of their own",
}
TYPES = {
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
}


def test_every_public_method_and_function_of_fsdp2_is_decided_upon() -> None:
    methods = {name for name in dir(FSDPModule) if not name.startswith("_")}
    assert methods == {*fsdp_methods.ACTING, *fsdp_methods.NO_EFFECT, *fsdp_methods.REFUSED}
    assert set(fully_shard_package.__all__) == {*FUNCTIONS, *TYPES}


def test_uninstalling_gives_torch_everything_back() -> None:
    installed = {name: vars(FSDPModule).get(name) for name in fsdp_methods.ACTING}
    code = register_fsdp_forward_method.__code__
    uninstall_patch()
    try:
        assert "zero_grad" not in vars(FSDPModule)
        assert register_fsdp_forward_method.__code__ is not code
        for name in {*fsdp_methods.ACTING, *fsdp_methods.REFUSED} - {"zero_grad"}:
            assert vars(FSDPModule)[name].__module__.startswith("torch.")
    finally:
        install_patch()
    assert set(installed) == {name for name in fsdp_methods.ACTING if name in vars(FSDPModule)}


class Model(TinyMLP):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Uses weights of the first layer without calling it."""
        layer = self.layers[0]
        return layer.down_proj(layer.up_proj(x)).square().mean()


def plain() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model()


def built(world: int, mode: str, wrap: str = "blocks") -> Any:
    model = plain()
    hsdp = mode == "hsdp"
    shape, names = ((2, world // 2), ("replicate", "shard")) if hsdp else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    options: dict[str, Any] = {"replicate_mesh": mesh["replicate"]} if hsdp else {}
    reshard = mode != "z2"
    dmuon.dedicate_params(model, mesh["shard"], lambda n, p: "proj" in n, reshard_after_forward=reshard, **options)
    for layer in model.layers if wrap == "blocks" else ():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() >= wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m: f"{name}: {m}")  # noqa: B023


def states(model: nn.Module) -> list[WeightState]:
    return [unit.weights.state for unit in require_runtime(model).units]


def use_outside(rank: int, world: int, mode: str, wrap: str, asynchronous: bool) -> None:
    model, reference = built(world, mode, wrap), plain()
    target = model.layers[0] if wrap == "blocks" else model
    x = dense_batch(rank)
    if asynchronous:
        target.unshard(async_op=True).wait()
    else:
        target.unshard()
    others = states(model)[1:]
    assert others == [WeightState.SHARDED if wrap == "blocks" else WeightState.GATHERED] * 2
    with torch.no_grad():
        torch.testing.assert_close(model.layers[0].up_proj(x), reference.layers[0].up_proj(x))
    target.reshard()
    assert states(model)[0] is WeightState.SHARDED
    assert type(model.layers[0].up_proj.weight).__name__ != "Parameter"
    # With a gradient, from use outside of the forward.
    target.unshard()
    whole = dense_batch(5, batch=8)
    model.layers[0].up_proj(rank_part(whole, rank, world)).square().mean().backward()
    reference.layers[0].up_proj(whole).square().mean().backward()
    close(gradients(model), gradients(reference))


@pytest.mark.parametrize(
    ("mode", "wrap", "world", "asynchronous"),
    [("z3", "blocks", 2, False), ("z2", "root", 2, True), ("hsdp", "blocks", 4, True)],
)
def test_unshard_makes_weights_usable_until_reshard(mode: str, wrap: str, world: int, asynchronous: bool) -> None:
    run_ranks(use_outside, world, mode, wrap, asynchronous)


def use_method(rank: int, world: int, mode: str, wrap: str) -> None:
    model, reference = built(world, mode, wrap), plain()
    for part in (model, *model.layers):
        register_fsdp_forward_method(part, "features" if part is model else "extra_repr")
    whole = dense_batch(2, batch=8)
    target = model
    if wrap == "blocks":
        # The root's own group has no owned weight: the method belongs to the module that has.
        type(reference.layers[0]).features = lambda self, x: self.down_proj(self.up_proj(x)).square().mean()
        target = model.layers[0]
        register_fsdp_forward_method(target, "features")
    target.features(rank_part(whole, rank, world)).backward()
    wanted = reference.layers[0] if wrap == "blocks" else reference
    wanted.features(whole).backward()
    close(gradients(target), gradients(wanted))
    with torch.no_grad():
        torch.testing.assert_close(target.features(whole), wanted.features(whole))


@pytest.mark.parametrize(("mode", "wrap", "world"), [("z3", "blocks", 2), ("z3", "root", 2), ("hsdp", "blocks", 4)])
def test_a_registered_forward_method_gathers_owned_weights_and_trains_them(mode: str, wrap: str, world: int) -> None:
    run_ranks(use_method, world, mode, wrap)


def penalise(rank: int, world: int, mode: str) -> None:
    model, reference = built(world, mode), plain()
    whole = dense_batch(3, batch=8)
    results = []
    for net, x in ((model, rank_part(whole, rank, world)), (reference, whole)):
        if net is model:
            model.set_reshard_after_backward(False)
            model.set_reshard_after_forward(False)
        x = x.clone().requires_grad_()
        loss = net(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        scale = 1 if net is reference else 1 / world
        (loss + (slope * scale).square().sum() * (1 if net is reference else world)).backward()
        if net is model:
            assert states(model) == [WeightState.GATHERED] * 3
            for part in (model, *model.layers):
                part.reshard()
            assert states(model) == [WeightState.SHARDED] * 3
        results.append(gradients(net))
    close(*results)


@pytest.mark.parametrize(("mode", "world"), [("z3", 2), ("hsdp", 4)])
def test_gradient_penalty_with_weights_kept_equals_plain_torch(mode: str, world: int) -> None:
    run_ranks(penalise, world, mode)


def set_flags(rank: int, world: int) -> None:
    model = built(world, "z3")
    x = dense_batch(rank)
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(x)
    assert states(model) == [WeightState.GATHERED] * 3
    model.layers[1].set_reshard_after_forward(True, recurse=False)
    with torch.no_grad():
        model(x)
    assert states(model)[1] is WeightState.SHARDED
    model.set_reshard_after_forward(True)
    model(x).backward()
    before = gradients(model)
    for part in (model, *model.layers):
        part.zero_grad()
    for unit in require_runtime(model).units:
        unit.module.set_gradient_divide_factor(2.0 * world)
    units = require_runtime(model).units
    assert all(unit.grads._reduction.divide_factor == 2.0 * world for unit in units)
    halved = [unit.grads._reduction for unit in units]
    # FSDP2 needs an operation for this that gloo lacks, so its own gradients keep the default.
    for layer in model.layers:
        for group in layer._get_fsdp_state()._fsdp_param_groups:
            group.gradient_divide_factor = None
    model(x).backward()
    after = gradients(model)
    for name, value in before.items():
        torch.testing.assert_close(after[name] * (2 if "proj" in name else 1), value)
    assert len(halved) == 3


def test_flags_of_resharding_and_the_divide_factor_reach_the_units() -> None:
    run_ranks(set_flags, 2)


def prefetch(rank: int, world: int) -> list[list[int]]:
    model = built(world, "z3")
    first, second, third = model.layers
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    found = []
    unit = require_runtime(model).units
    require_runtime(model).prefetcher.before_forward(unit[0])
    found.append([u.index for u in unit if u.weights.state is not WeightState.SHARDED])
    for u in unit:
        u.reshard()
    require_runtime(model).prefetcher.before_backward(unit[2])
    found.append([u.index for u in unit if u.weights.state is not WeightState.SHARDED])
    for u in unit:
        u.reshard()
    first.set_unshard_in_backward(False)
    require_runtime(model).prefetcher.before_backward(unit[2])
    found.append([u.index for u in unit if u.weights.state is not WeightState.SHARDED])
    return found


def test_explicit_prefetch_takes_the_place_of_the_next_unit() -> None:
    assert run_ranks(prefetch, 2) == [[[1, 2], [0, 1], [1]]] * 2


def accumulate(rank: int, world: int, setter: str) -> None:
    model, reference = built(world, "hsdp"), plain()
    whole = dense_batch(4, batch=16)
    for micro in range(2):
        getattr(model, setter)(micro == 1)
        (model(rank_part(whole, rank, world, micro=micro, n_micro=2)) / 2).backward()
    reference(whole).backward()
    close(gradients(model), gradients(reference))


@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward"])
def test_accumulating_without_a_reduction_gives_the_gradient_of_the_whole(setter: str) -> None:
    run_ranks(accumulate, 4, setter)


def hook_and_reset(rank: int, world: int) -> str:
    model, reference = built(world, "z3"), plain()
    whole = dense_batch(6, batch=8)
    loss = model(rank_part(whole, rank, world))
    handle = model.layers[1].register_full_backward_hook(fail)
    with pytest.raises(RuntimeError, match="half-way"):
        model(rank_part(whole, rank, world)).backward()
    del loss
    handle.remove()
    model.reset_iter_state()
    assert states(model) == [WeightState.SHARDED] * 3
    model.zero_grad()
    model(rank_part(whole, rank, world)).backward()
    reference(whole).backward()
    close(gradients(model), gradients(reference))
    with pytest.raises(NotImplementedError) as refused:
        model.layers[0].set_all_reduce_hook(lambda output: None)
    return str(refused.value)


def fail(*_: Any) -> None:
    raise RuntimeError("half-way")


def test_reset_drops_a_broken_pass_and_an_all_reduce_hook_is_refused_by_name() -> None:
    for message in run_ranks(hook_and_reset, 2):
        assert "layers.0." in message
        assert "replicate_mesh" in message
