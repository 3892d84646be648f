"""Accelerate and the Trainer: what reaches the optimizer, which mode really runs, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon_hf
import dmuon_hf.core as dmuon
from dmuon_hf.boundaries import HookBoundaries
from dmuon_hf.presets import muon_specs, routes
from tests.harness import run_ranks
from tests.harness.reference import ReferenceOptimizer
from tests.hf.support import as_launched, finish, fsdp_env, tiny_deepseek, tiny_llama

HYPER: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "adamw_lr": 1e-3, "adamw_weight_decay": 0.1}


def _refusal(call: Callable[[], Any]) -> str:
    """The message of the refusal that `call` ends with; the rank goes on, so that its peers reach theirs."""
    with pytest.raises((dmuon_hf.ConfigurationError, NotImplementedError)) as refused:
        call()
    return str(refused.value)


# -- encoder-decoder models --------------------------------------------------------------------------------------------


def _t5() -> nn.Module:
    torch.manual_seed(0)
    config = tf.T5Config(
        d_model=32, d_ff=48, num_layers=2, num_heads=2, d_kv=16, vocab_size=64, dropout_rate=0.0, pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return tf.T5ForConditionalGeneration(config)


def _bart() -> nn.Module:
    torch.manual_seed(0)
    config = tf.BartConfig(
        d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, vocab_size=64, max_position_embeddings=32,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    return tf.BartForConditionalGeneration(config)


_SEQ2SEQ = {"t5": _t5, "bart": _bart}


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(3, 64, (4, 6), generator=torch.Generator().manual_seed(step))


def _blocks(model: nn.Module) -> list[nn.Module]:
    boundaries = HookBoundaries(model)
    found = [boundaries.block(name) for name, route in routes(model).items() if route.route == "muon"]
    return list(dict.fromkeys(block for block in found if block is not None))


def _train_seq2seq(rank: int, world: int, which: str, steps: int) -> dict[str, Any]:
    model = _SEQ2SEQ[which]()
    mesh = init_device_mesh("cpu", (world,))
    specs = muon_specs(routes(model))
    boundaries = HookBoundaries(model)
    blocks = _blocks(model)
    dmuon.dedicate_params(
        model, mesh, lambda name, param: name in specs, hook_boundary_resolver=boundaries,
        matrix_spec_fn=lambda name, param: specs[name],
    )  # fmt: skip
    for block in blocks:
        fully_shard(block, mesh=mesh)
    # The root's group holds the embedding with every module that shares it.
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, **HYPER)
    for step in range(steps):
        part = _tokens(step).chunk(world)[rank]
        model(input_ids=part, labels=part).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {"weights": {n: w.detach().clone() for n, w in weights.items()}, "blocks": len(blocks)}


@pytest.mark.parametrize("which", ["t5", "bart"])
def test_encoder_decoder_model_with_shared_embedding_trains_like_one_process(which: str) -> None:
    steps = 2
    model = _SEQ2SEQ[which]()
    specs = muon_specs(routes(model))
    reference = ReferenceOptimizer(model, lambda name, param: name in specs, **HYPER)
    for step in range(steps):
        tokens = _tokens(step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        reference.step()
        reference.zero_grad()
    for result in run_ranks(_train_seq2seq, 2, which, steps):
        assert result["blocks"] == 4
        for name, param in model.named_parameters():
            torch.testing.assert_close(
                result["weights"][name], param.detach(), rtol=2e-3, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


# -- models that one rank loads ----------------------------------------------------------------------------------------


_LOADED = {"rotary": lambda: tiny_llama(tie_word_embeddings=True).eval(), "saved": lambda: tiny_deepseek().eval()}


def _loaded_by_one_rank(rank: int, world: int, directory: str) -> tuple[torch.Tensor, bool]:
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    as_launched()
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(directory)
    if rank != 0:
        # What a rank that has loaded nothing may hold.
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(float("nan"))
    optimizer = dmuon_hf.create_optimizer(model, lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(8).unsqueeze(0)).logits
    finish()
    return logits, model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("buffer", list(_LOADED))
def test_model_loaded_by_one_rank_computes_the_same_on_all(tmp_path: Any, buffer: str) -> None:
    source = _LOADED[buffer]()
    source.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = source(input_ids=torch.arange(8).unsqueeze(0)).logits
    env = fsdp_env(2, FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_SYNC_MODULE_STATES="true")
    for logits, tied in run_ranks(_loaded_by_one_rank, 2, str(tmp_path), init=False, env=env):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        assert tied


# -- the mode that really runs -----------------------------------------------------------------------------------------


def _sharded_by_transformers(rank: int, world: int, directory: str) -> str:
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    as_launched()
    torch.distributed.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(directory, distributed_config=DistributedConfig(fsdp_size=world))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = dmuon_hf.create_optimizer(model, lr=1e-3)
    return _refusal(lambda: Accelerator().prepare(model, optimizer))


@pytest.mark.parametrize(("launched_for_fsdp", "message"), [(False, "leave the model out"), (True, "shard it again")])
def test_model_that_transformers_has_sharded_is_not_prepared_again(
    launched_for_fsdp: bool, message: str, tmp_path: Any
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    env = fsdp_env(2) if launched_for_fsdp else None
    for refusal in run_ranks(_sharded_by_transformers, 2, str(tmp_path), init=False, env=env):
        assert message in refusal


def _rates(rank: int, world: int) -> dict[str, Any]:
    """The rates that a step sees after the scheduler has run, and how far each route moves."""
    from accelerate import Accelerator

    as_launched()
    accelerator = Accelerator()
    model = tiny_llama()
    optimizer = dmuon_hf.create_optimizer(model, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    ids = torch.arange(8).unsqueeze(0)

    def moved() -> dict[str, float]:
        before = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        return {n: float((p.full_tensor() - before[n]).detach().norm()) for n, p in model.named_parameters()}

    first = moved()
    scheduler.step()
    second = moved()
    finish()
    return {"first": first, "second": second}


def test_schedule_that_ends_at_zero_stops_both_routes() -> None:
    for result in run_ranks(_rates, 2, init=False, env=fsdp_env(2)):
        assert all(distance > 0 for name, distance in result["first"].items())
        assert set(result["second"].values()) == {0.0}


# -- engines with a sharding of their own ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_engine_that_keeps_its_own_optimizer_is_refused(kind: str) -> None:
    from dmuon_hf.checks import check_launch

    state: Any = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), mixed_precision="no")
    with pytest.raises(dmuon_hf.ConfigurationError, match=f"{kind} keeps its own optimizer.*FSDP2"):
        check_launch(state)
