"""Muon in a training loop of one's own, through `Accelerator.prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import dmuon_hf
from dmuon_hf.core.runtime import OwnedTensor
from tests.harness import run_ranks
from tests.hf.support import (
    arguments,
    as_launched,
    finish,
    fsdp_env,
    full_weights,
    make_trainer,
    tiny_dataset,
    tiny_deepseek,
    tiny_llama,
)


def _accelerator(world: int, replicas: int, **plugin: Any) -> Accelerator:
    if world == 1:
        return Accelerator(cpu=True)
    mesh = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=world // replicas)
    return Accelerator(cpu=True, fsdp_plugin=dmuon_hf.DMuonPlugin(**plugin), parallelism_config=mesh)


def _loader(world: int, batch: int = 8) -> DataLoader[Any]:
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in tiny_dataset(32)]
    return DataLoader(rows, batch_size=batch // world)  # type: ignore[arg-type]


def _loop(rank: int, world: int, replicas: int, max_norm: float, **plugin: Any) -> dict[str, Any]:
    accelerator = _accelerator(world, replicas, **plugin)
    model = tiny_llama()
    # A large epsilon keeps the sign of gradients that are zero but for rounding out of the first AdamW steps.
    optimizer = dmuon_hf.create_optimizer(model, lr=5e-3, weight_decay=0.1, eps=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(world))
    norms, clipped = [], {}
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
        if not clipped:
            clipped = {n: _full(p.grad).clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    result = {
        "fsdp2": accelerator.is_fsdp2,
        "types": sorted({type(p.data).__name__ for p in model.parameters()}),
        "norms": norms,
        "clipped": clipped,
        "weights": full_weights(model),
        "state_dict": accelerator.get_state_dict(model),
    }
    finish()
    return result


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("max_norm", [0.5])
@pytest.mark.parametrize(("world", "replicas", "reshard"), [(2, 1, True), (4, 2, False)])
def test_accelerator_clips_by_the_one_process_norm(world: int, replicas: int, reshard: bool, max_norm: float) -> None:
    alone = run_ranks(_loop, 1, 1, max_norm, init=False)[0]
    results = run_ranks(_loop, world, replicas, max_norm, init=False, reshard_after_forward=reshard)
    assert alone["norms"][0] > max_norm
    for result in results:
        assert result["fsdp2"]
        assert result["types"] == ["DTensor", "OwnedTensor"]
        assert result["norms"][0] == pytest.approx(alone["norms"][0], rel=1e-5)
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        for name, gradient in alone["clipped"].items():
            torch.testing.assert_close(result["clipped"][name], gradient, rtol=1e-4, atol=1e-6)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-3, atol=2e-5)


def _schedule(rank: int, world: int) -> list[float]:
    accelerator = _accelerator(world, 1)
    model = tiny_llama()
    optimizer = dmuon_hf.create_optimizer(model, lr=5e-3, muon_lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    optimizer.step()
    scheduler.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    finish()
    return rates


def test_scheduler_reaches_every_group() -> None:
    for rates in run_ranks(_schedule, 2, init=False):
        # accelerate advances a schedule once per process.
        assert rates == pytest.approx([1e-2 / 4, 5e-3 / 4, 5e-3 / 4])


def test_get_state_dict_is_whole_on_the_main_process() -> None:
    results = run_ranks(_loop, 2, 1, 1.0, init=False)
    state = results[0]["state_dict"]
    assert set(state) == {name for name, _ in tiny_llama().named_parameters()}
    for name, weight in results[0]["weights"].items():
        assert torch.equal(state[name], weight)


def _accumulate(rank: int, world: int, micro: int) -> dict[str, torch.Tensor]:
    accelerator = _accelerator(world, 1)
    accelerator.gradient_accumulation_steps = micro
    model = tiny_llama()
    optimizer = dmuon_hf.create_optimizer(model, lr=5e-3, eps=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(world, 8 // micro))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    weights = full_weights(model)
    finish()
    return weights


def test_accumulated_micro_batches_equal_one_batch() -> None:
    expected = run_ranks(_accumulate, 1, 1, init=False)[0]
    actual = run_ranks(_accumulate, 2, 4, init=False)[0]
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-3, atol=2e-5)


def _save_and_load(rank: int, world: int, directory: str, state_dict: str) -> dict[str, Any]:
    accelerator = _accelerator(world, 1, state_dict_type=state_dict)
    model = tiny_llama()
    optimizer = dmuon_hf.create_optimizer(model, lr=5e-3, eps=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(world))

    def train() -> None:
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    train()
    accelerator.save_state(directory)
    train()
    expected = full_weights(model)
    accelerator.load_state(directory)
    train()
    actual = full_weights(model)
    finish()
    return {"expected": expected, "actual": actual}


@pytest.mark.parametrize("state_dict", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_load_state_continues_as_the_saved_run_did(tmp_path: Path, state_dict: str) -> None:
    result = run_ranks(_save_and_load, 2, str(tmp_path), state_dict, init=False)[0]
    for name, weight in result["expected"].items():
        assert torch.equal(result["actual"][name], weight), name


def _empty(model: nn.Module, kind: str) -> None:
    """Take the weights and saved buffers, as on a rank that has loaded nothing."""
    if kind == "garbage":
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(float("nan"))
        return
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(parameter.to("meta"))
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            module._buffers[name] = module._buffers[name].to("meta")
    model.tie_weights()


def _ram_efficient(rank: int, world: int, directory: str, kind: str) -> dict[str, Any]:
    as_launched()
    accelerator = Accelerator()
    model = tf.AutoModelForCausalLM.from_pretrained(directory)
    if rank != 0:
        _empty(model, kind)
    optimizer = dmuon_hf.create_optimizer(model, lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    values = full_weights(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}
    finish()
    return {"values": values, "tied": model.lm_head.weight is model.model.embed_tokens.weight}


@pytest.mark.parametrize(("world", "replicas", "kind"), [(2, 1, "garbage"), (4, 2, "meta")])
def test_ram_efficient_loading_gives_every_owner_the_weights_of_rank_zero(
    tmp_path: Path, world: int, replicas: int, kind: str
) -> None:
    source = tiny_deepseek()
    source.save_pretrained(tmp_path)
    env = fsdp_env(world, replicas=replicas, FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_SYNC_MODULE_STATES="true")
    results = run_ranks(_ram_efficient, world, str(tmp_path), kind, init=False, env=env)
    expected = dict(source.named_parameters()) | dict(source.named_buffers())
    for result in results:
        assert result["tied"]
        assert result["values"].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(result["values"][name], value), name


def _trainer_of_one_loader(rank: int, world: int, directory: str, output: str) -> dict[str, torch.Tensor]:
    if world > 1:
        as_launched()
    args = arguments(output, max_steps=2, per_device_train_batch_size=8 // world, adam_epsilon=1e-3)
    model = tf.AutoModelForCausalLM.from_pretrained(directory)
    if rank != 0:
        _empty(model, "garbage")
    trainer = make_trainer(model, args)
    trainer.train()
    weights = full_weights(trainer.model)
    finish()
    return weights


def test_trainer_whose_first_rank_loads_alone_trains_like_one_process(tmp_path: Path) -> None:
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    env = fsdp_env(2, FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_SYNC_MODULE_STATES="true")
    one, many = (
        run_ranks(_trainer_of_one_loader, world, str(tmp_path / "model"), str(tmp_path), init=False, env=extra)
        for world, extra in ((1, {}), (2, env))
    )
    for weights in many:
        for name, value in one[0].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-5, msg=name)


def _mixed_precision(rank: int, world: int) -> dict[str, Any]:
    as_launched()
    accelerator = Accelerator()
    model = tiny_llama().to(torch.bfloat16)
    optimizer = dmuon_hf.create_optimizer(model, lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(world))
    dtypes = []
    handle = model.model.layers[0].mlp.up_proj.register_forward_pre_hook(
        lambda module, args: dtypes.append((args[0].dtype, module.weight.dtype))
    )
    batch = next(iter(loader))
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    handle.remove()
    owned = model.model.layers[0].mlp.up_proj.weight
    finish()
    return {"seen": dtypes, "master": owned.dtype, "owned": isinstance(owned.data, OwnedTensor)}


def test_mixed_precision_computes_in_bf16_and_keeps_fp32_masters() -> None:
    for result in run_ranks(_mixed_precision, 2, init=False, env=fsdp_env(2, ACCELERATE_MIXED_PRECISION="bf16")):
        assert result["owned"]
        assert set(result["seen"]) == {(torch.bfloat16, torch.bfloat16)}
        assert result["master"] == torch.float32


def _checkpointed(rank: int, world: int, enabled: bool) -> dict[str, torch.Tensor]:
    accelerator = _accelerator(world, 1, activation_checkpointing=enabled)
    model: nn.Module = tiny_llama()
    optimizer = dmuon_hf.create_optimizer(model, lr=5e-3, eps=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(world))
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in model.named_parameters()]
    assert any("_checkpoint_wrapped_module" in name for name in names) is enabled
    weights = {name.replace("_checkpoint_wrapped_module.", ""): w for name, w in full_weights(model).items()}
    finish()
    return weights


def test_activation_checkpointing_changes_no_weight() -> None:
    plain = run_ranks(_checkpointed, 2, False, init=False)[0]
    checkpointed = run_ranks(_checkpointed, 2, True, init=False)[0]
    for name, weight in plain.items():
        torch.testing.assert_close(checkpointed[name], weight, rtol=1e-5, atol=1e-6)
