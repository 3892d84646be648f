"""A model on the meta device is dedicated, sharded and then materialised: no rank ever holds the whole of it."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dmuon_hf.core as dmuon
from dmuon_hf.core.errors import ConfigurationError, LockstepError
from dmuon_hf.core.runtime import OwnedTensor
from tests.distributed.training import full
from tests.harness import run_ranks
from tests.harness.comm import CollectiveCounter
from tests.harness.reference import ReferenceOptimizer

WIDTH, LAYERS = 32, 6
HYPER: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "adamw_lr": 1e-2, "adamw_weight_decay": 0.0}
MODES = {"z3": 2, "z2": 2, "hsdp": 4}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def reset_parameters(self) -> None:
        self.scale.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


def make_net(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return param.ndim == 2


def initialise(model: nn.Module) -> None:
    """What the model's own initialiser does, module by module, from one seed."""
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def make_mesh(mode: str, world: int) -> DeviceMesh:
    if mode == "hsdp":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))


def dedicate(model: nn.Sequential, mode: str, world: int, **options: Any) -> None:
    mesh = make_mesh(mode, world)
    replicate = mesh["replicate"] if mode == "hsdp" else None
    dmuon.dedicate_params(
        model, mesh["shard"], is_matrix, replicate_mesh=replicate, reshard_after_forward=mode != "z2", **options
    )
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=mode != "z2")
    fully_shard(model, mesh=mesh)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors with values had at one time since this was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # and be called for what it runs on local tensors
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (weakref.ref(tensor), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if entry[0]() is not None}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result


def whole_bytes() -> int:
    return sum(param.numel() * 4 for param in make_net("meta").parameters())


def materialise(rank: int, world: int, mode: str) -> tuple[int, dict[str, torch.Tensor]]:
    model = make_net("meta")
    with LiveBytes() as live:
        dedicate(model, mode, world)
        model.to_empty(device="cpu")
        initialise(model)
    assert all(not param.is_meta for param in model.parameters())
    return live.most, {name: full(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("mode", MODES)
def test_no_rank_holds_the_model_and_its_initialiser_draws_what_one_process_draws(mode: str) -> None:
    expected = make_net()
    initialise(expected)
    for most, weights in run_ranks(materialise, MODES[mode], mode):
        # Its part, one matrix that is drawn, and under HSDP the published copy of the column's matrices.
        assert most < (0.9 if mode == "hsdp" else 0.75) * whole_bytes()
        for name, param in expected.named_parameters():
            assert torch.equal(weights[name], param), name


def train(rank: int, world: int, mode: str, optimizer_first: bool) -> dict[str, torch.Tensor]:
    model = make_net("meta")
    dedicate(model, mode, world)
    optimizer = dmuon.Muon(model, **HYPER) if optimizer_first else None
    model.to_empty(device="cpu")
    initialise(model)
    optimizer = optimizer or dmuon.Muon(model, **HYPER)
    for step in range(2):
        batch = torch.randn(2 * world, WIDTH, generator=torch.Generator().manual_seed(step))
        model(batch.chunk(world)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize(("mode", "optimizer_first"), [("z3", False), ("z3", True), ("z2", False), ("hsdp", True)])
def test_materialised_model_trains_like_one_process(mode: str, optimizer_first: bool) -> None:
    world = MODES[mode]
    model = make_net()
    initialise(model)
    optimizer = ReferenceOptimizer(model, is_matrix, **HYPER)
    for step in range(2):
        model(torch.randn(2 * world, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in run_ranks(train, world, mode, optimizer_first):
        for name, param in model.named_parameters():
            torch.testing.assert_close(weights[name], param.detach(), rtol=2e-4, atol=2e-5)


DRAWS = {
    "normal_": lambda p: nn.init.normal_(p, std=0.02),
    "trunc_normal_": lambda p: nn.init.trunc_normal_(p, std=0.02),
    "kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p, a=5**0.5),
    "xavier_normal_": nn.init.xavier_normal_,
    "generator": lambda p: p.detach().uniform_(-1, 1, generator=torch.Generator().manual_seed(5)),
    "rand_like": lambda p: p.detach().copy_(torch.rand_like(p)),
    "bernoulli_": lambda p: p.detach().bernoulli_(0.3),
}


def draw(rank: int, world: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    local = torch.empty(5 if rank == 1 else 0, 3)
    owned = nn.Parameter(OwnedTensor.from_local(local, mesh, owner=1, shape=(5, 3)))
    before = owned.content.version
    torch.manual_seed(11)
    DRAWS[name](owned)
    assert owned.content.version > before
    return full(owned), torch.rand(1)


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_an_owned_tensor_are_those_of_one_process(name: str) -> None:
    plain = nn.Parameter(torch.empty(5, 3))
    torch.manual_seed(11)
    DRAWS[name](plain)
    after = torch.rand(1)
    for value, following in run_ranks(draw, 2, name):
        assert torch.equal(value, plain)
        assert torch.equal(following, after)


def load_after(rank: int, world: int, how: str, directory: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    source = make_net()
    state = source.state_dict()
    if how == "dcp":
        dcp.save(state, checkpoint_id=directory)
        dist.barrier()
    model = make_net("meta")
    dedicate(model, "z3", world)
    with pytest.raises(ConfigurationError, match=r"0\.norm\.weight is on the meta device.*to_empty"):
        dmuon.set_model_state_dict(model, state)
    model.to_empty(device="cpu")
    if how == "dcp":
        target = get_model_state_dict(model)
        dcp.load(target, checkpoint_id=directory)
        set_model_state_dict(model, target)
    elif how == "whole":
        dmuon.set_model_state_dict(model, state if rank == 0 else {})
    return {name: full(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("how", ["dcp", "whole"])
def test_checkpoint_loads_into_a_materialised_model(how: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    expected = make_net().state_dict()
    for weights in run_ranks(load_after, 2, how, tmp_path):
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name


def use_unmaterialised(rank: int, world: int, rest: bool) -> None:
    model = make_net("meta")
    dedicate(model, "z3", world)
    if rest:  # what FSDP2 keeps has values, what is owned has none
        for layer in model:
            layer.norm.to_empty(device="cpu")
    named = r"0\.up\.weight" if rest else r"0\.norm\.weight"
    with pytest.raises(ConfigurationError, match=rf"{named} is on the meta device.*to_empty\(device=\"cpu\"\)"):
        model(torch.ones(1, WIDTH))


@pytest.mark.parametrize("rest", [False, True])
def test_weights_without_values_are_named_when_they_are_used(rest: bool) -> None:
    run_ranks(use_unmaterialised, 2, rest)


def refuse(rank: int, world: int) -> None:
    with pytest.raises(LockstepError, match=r"on meta.*0\.up\.weight"):
        dedicate(make_net("meta" if rank == 0 else "cpu"), "z3", world)
    with pytest.raises(ConfigurationError, match=r"0\.up\.weight is on the meta device on rank 1"):
        dedicate(make_net("cpu" if rank == 0 else "meta"), "z3", world, source_rank=1)
    with pytest.raises(ConfigurationError, match="source_rank=7"):
        dedicate(make_net(), "z3", world, source_rank=7)


def test_ranks_that_disagree_about_meta_are_refused_alike() -> None:
    run_ranks(refuse, 2)


def from_source(rank: int, world: int, mode: str) -> dict[str, Any]:
    torch.manual_seed(4)
    model = make_net("cpu" if rank == 1 else "meta")
    mesh = make_mesh(mode, world)
    with CollectiveCounter() as counter, LiveBytes() as live:
        owners = dmuon.dedicate_params(
            model,
            mesh["shard"],
            is_matrix,
            replicate_mesh=mesh["replicate"] if mode == "hsdp" else None,
            source_rank=1,
        )
    sent = sum(record.ring_bytes for record in counter.select("all_to_all"))
    owned = {name: param for name, param in model.named_parameters() if param in owners}
    return {
        "sent": sent,
        "live": live.most,
        "mine": sum(param.numel() * 4 for param in owned.values() if param.is_owner),
        "weights": {name: full(param) for name, param in owned.items()},
    }


@pytest.mark.parametrize("mode", ["z3", "hsdp"])
def test_source_rank_sends_each_matrix_to_its_owner_alone(mode: str) -> None:
    torch.manual_seed(4)
    expected = make_net().state_dict()
    results = run_ranks(from_source, MODES[mode], mode)
    matrices = 2 * LAYERS * 2 * WIDTH * WIDTH * 4
    # A gather buffer at a time is made, and freed, when units are built; columns of HSDP have a published copy.
    beside = matrices / LAYERS + (matrices / 2 if mode == "hsdp" else 0)
    for rank, result in enumerate(results):
        # Rank 3 shares a column with rank 1 and a replica with rank 2.
        forwarded = results[2]["mine"] if rank == 3 else 0
        assert result["sent"] == (matrices - result["mine"] if rank == 1 else forwarded)
        if rank != 1:
            assert result["live"] <= result["mine"] + beside
        for name, value in result["weights"].items():
            assert torch.equal(value, expected[name]), name


def initialise_llama(rank: int, world: int) -> dict[str, Any]:
    with torch.device("meta"):
        model = tiny_llama()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    dmuon.dedicate_params(model, mesh, lambda name, param: "_proj" in name)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.init_weights()
    ids = torch.arange(8).unsqueeze(0)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    owned = {name: param for name, param in model.named_parameters() if isinstance(param, OwnedTensor)}
    return {
        "loss": loss.item(),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "frequencies": model.model.rotary_emb.inv_freq,
        "grads": [param.grad is not None for param in owned.values()],
        "weights": {name: full(param) for name, param in owned.items()},
    }


def test_initialiser_of_transformers_fills_what_was_materialised() -> None:
    first, second = run_ranks(initialise_llama, 2)
    expected = tiny_llama().model.rotary_emb.inv_freq
    for result in (first, second):
        assert 0 < result["loss"] < 20 and result["tied"] and all(result["grads"])
        assert torch.equal(result["frequencies"], expected)
    assert len(first["weights"]) == 14
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name])
        assert 0.015 < value.std() < 0.025, name


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)
