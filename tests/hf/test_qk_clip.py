"""QK-clip against logits computed by hand, for every kind of attention, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from torch import Tensor, nn

import dmuon_hf
from dmuon_hf import hooks
from dmuon_hf.attention_logits import HeadMaxima, head_maxima, watch
from dmuon_hf.attention_pairs import pairs_of
from dmuon_hf.attention_sites import attention_sites
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.qk_clip import clip_logits, rescale
from dmuon_hf.survey import survey
from tests.harness import run_ranks
from tests.hf.support import arguments, as_launched, finish, fsdp_env, full_weights, make_trainer, tiny_llama
from tests.hf.zoo.build import build
from tests.hf.zoo.tiny import FAMILIES

LENGTH = 6


class Logits:
    """Attention that keeps the logits of its heads, computed the long way."""

    def __init__(self) -> None:
        self.of: dict[nn.Module, Tensor] = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * kwargs["scaling"]
        causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, -math.inf)
        self.of[module] = scores.detach().amax(dim=(0, 2, 3))
        return (scores.softmax(-1) @ value).transpose(1, 2), None


@pytest.fixture
def logits() -> Any:
    seen = Logits()
    tf.AttentionInterface.register("by_hand", seen)
    yield seen
    tf.AttentionInterface._global_mapping.pop("by_hand")


KINDS: dict[str, Any] = {
    "all heads have keys": lambda: tiny_llama(num_key_value_heads=4),
    "keys are shared": lambda: tiny_llama(num_key_value_heads=2),
    "latent": FAMILIES["deepseek_v3"].build,
    "biases": lambda: tiny_llama(attention_bias=True),
    "fused": FAMILIES["phi3"].build,
    "fused per head": FAMILIES["gpt_neox"].build,
    "stored transposed": FAMILIES["gpt2"].build,
}


def _grown(model: nn.Module) -> nn.Module:
    """With queries of some size, so that logits are no small numbers."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_", "k_", "qkv", "query", "kv_b", "c_attn")):
                parameter.mul_(6.0).add_(0.02 if name.endswith("bias") else 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def _inputs_of(model: nn.Module, ids: Tensor) -> dict[nn.Module, tuple[Any, Any]]:
    """What each attention module is called with."""
    found: dict[nn.Module, tuple[Any, Any]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        found[module] = (args, kwargs)

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if type(module).__name__.endswith("Attention")
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_head_over_the_threshold_has_it_as_its_largest_logit_for_the_same_input(kind: str, logits: Logits) -> None:
    model = _grown(KINDS[kind]())
    model.set_attn_implementation("by_hand")
    model.config.use_cache = False
    ids = torch.randint(4, 90, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    inputs = _inputs_of(model, ids)
    before = dict(logits.of)
    threshold = float(torch.cat(list(before.values())).median())
    assert threshold > 0
    optimizer = dmuon_hf.create_optimizer(model, lr=0.0, qk_clip=threshold)
    model(ids).logits.sum().backward()
    optimizer.step()
    report = dmuon_hf.last_qk_clip(optimizer)
    with torch.no_grad():
        for module, (args, kwargs) in inputs.items():
            module(*args, **kwargs)
            expected = before[module].clamp(max=threshold)
            torch.testing.assert_close(logits.of[module], expected, rtol=1e-4, atol=1e-5)
    assert report is not None
    everything = torch.cat(list(before.values()))
    assert report.max_logit == pytest.approx(float(everything.max()), rel=1e-5)
    assert report.clipped_heads == int((everything > threshold).sum())
    assert len(report.logits) == len(inputs)


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, tf.Cache) else value for name, value in kwargs.items()}


CLIPPED = (
    "opt", "mixtral", "t5", "bart", "bert", "albert", "distilbert", "modernbert", "llava", "paligemma", "vit", "swin",
    "segformer", "whisper", "moonshine",
)  # fmt: skip


@pytest.mark.parametrize("name", CLIPPED)
def test_rows_of_a_family_belong_to_the_heads_that_they_are_said_to(name: str) -> None:
    hooks.install()
    family = FAMILIES[name]
    model: Any = _grown(family.build())
    sites, bounded = attention_sites(survey(model))
    assert sites and not bounded
    maxima = [watch(site.module, site.name, site.heads, site.shared, lambda: True) for site in sites]
    calls: dict[nn.Module, list[Any]] = {site.module: [] for site in sites}
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs: calls[module].append((args, _without_cache(kwargs))),
            with_kwargs=True,
        )
        for module in calls
    ]
    with torch.no_grad():
        model(**family.batch(0))
        before = [found for found in (each.take() for each in maxima) if found is not None]
        threshold = torch.cat(before).median().clamp(min=1e-3)
        for site, most in zip(sites, before, strict=True):
            for rows in site.rows:
                rescale(rows, (threshold / most).clamp(0, 1).where(most > threshold, torch.ones(())))
        for handle in handles:
            handle.remove()
        for site, most, each in zip(sites, before, maxima, strict=True):
            for args, kwargs in calls[site.module]:
                site.module(*args, **kwargs)
            torch.testing.assert_close(each.take(), most.clamp(max=threshold), rtol=1e-4, atol=1e-5)


def test_linear_attention_beside_latent_attention_is_no_obstacle() -> None:
    sites, bounded = attention_sites(survey(build("kimi_linear", "KimiLinearForCausalLM")))
    assert {type(site.module).__name__ for site in sites} == {"KimiLinearAttention"} and not bounded


def _train(rank: int, world: int, clip: float | None) -> dict[str, Any]:
    """Three steps of two micro-batches, this rank's part of batches of eight."""
    as_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = _grown(tiny_llama(num_key_value_heads=4, attention_bias=True))
    routes = {"model.layers.0.*.q_proj.weight": "adamw"}
    optimizer: Any = dmuon_hf.create_optimizer(model, lr=2e-3, weight_decay=0.1, eps=1e-3, qk_clip=clip, routes=routes)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(7)
    reports = []
    for _ in range(3):
        for batch in torch.randint(0, 128, (2, 8, LENGTH), generator=generator):
            ids = batch.chunk(world)[rank]
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()
        reports.append(dmuon_hf.last_qk_clip(optimizer))
    weights = full_weights(accelerator.unwrap_model(model))
    finish()
    return {
        "mode": str(accelerator.distributed_type),
        "weights": weights,
        "logits": [report and report.max_logit for report in reports],
        "clipped": [report and report.clipped_heads for report in reports],
    }


THRESHOLD = 2.9


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(_train, 1, THRESHOLD, init=False)[0]


@pytest.mark.parametrize(
    ("world", "env"),
    [(2, fsdp_env(2)), (4, fsdp_env(4, replicas=2)), (2, {})],
    ids=["FSDP2", "HSDP", "DDP"],
)
def test_ranks_clip_like_one_process(world: int, env: dict[str, str], alone: dict[str, Any]) -> None:
    assert 0 < alone["clipped"][0] < 8 and len(set(alone["clipped"])) > 1
    for result in run_ranks(_train, world, THRESHOLD, init=False, env=env, timeout=100):
        assert ("FSDP" in result["mode"]) == bool(env)
        assert result["clipped"] == alone["clipped"]
        assert result["logits"] == pytest.approx(alone["logits"], rel=1e-4)
        for name, value in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-3, atol=2e-5, msg=name)


def test_blocks_of_logits_and_masks_give_the_maxima_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, 7, 8, generator=generator), torch.randn(2, 2, 7, 8, generator=generator)
    mask = torch.rand(2, 1, 7, 7, generator=generator) > 0.5
    whole = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(2, dim=1)) * 0.5
    expected = whole.masked_fill(~mask, -math.inf).amax((0, 2, 3))
    for block in (1, 60, 1 << 24):
        torch.testing.assert_close(head_maxima(query, key, 0.5, lambda rows: mask[..., rows, :], block), expected)


def _allowed(implementation: str, mask: Any, queries: int, keys: int, batch: int = 1, **arguments: Any) -> list[Any]:
    query, key = torch.zeros(batch, 1, queries, 2), torch.zeros(batch, 1, keys, 2)
    module = nn.Module()
    pairs = pairs_of(module, query, key, mask, implementation, arguments)(slice(0, queries))
    pairs = torch.ones(1, dtype=torch.bool) if pairs is None else pairs
    return pairs.expand(batch, 1, queries, keys)[0, 0].int().tolist()


LOWER = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
NEVER = torch.finfo(torch.bfloat16).min


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("sdpa", None, 3, 3), LOWER),
        (("flash_attention_2", None, 2, 3), [[1, 1, 0], [1, 1, 1]]),
        (("flash_attention_2", torch.tensor([[0, 1, 1]]), 3, 3), [[0, 0, 0], [0, 1, 0], [0, 1, 1]]),
        (("eager", torch.tensor([[0.0, NEVER], [0.5, -2.0]])[None, None].bfloat16(), 2, 2), [[1, 0], [1, 1]]),
        (("sdpa", torch.tensor([[[[True, False]]]]), 2, 2), [[1, 0], [1, 0]]),
    ],
    ids=["causal", "last query with last key", "padding", "additive", "boolean for all queries"],
)
def test_mask_is_read_as_the_attention_function_reads_it(given: Any, expected: Any) -> None:
    assert _allowed(*given) == expected


def test_windows_packed_sequences_and_block_masks_are_read() -> None:
    assert _allowed("flash_attention_2", None, 3, 3, sliding_window=2) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    packed = [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    assert _allowed("flash_attention_2", None, 3, 3, cu_seq_lens_q=starts) == packed
    assert _allowed("flash_attention_2", None, 3, 3, position_ids=torch.tensor([[0, 1, 0]])) == packed
    assert _allowed("sdpa", None, 2, 2, is_causal=False) == [[1, 1], [1, 1]]

    class BlockMask:
        @staticmethod
        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query >= key

    assert _allowed("flex_attention", BlockMask(), 3, 3) == LOWER


def test_trainer_logs_the_largest_logit_and_the_heads_that_were_clipped(tmp_path: Path) -> None:
    trainer = make_trainer(_grown(tiny_llama()), arguments(tmp_path, max_steps=2), qk_clip=THRESHOLD)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 2
    assert all(entry["max_attention_logit"] > THRESHOLD and entry["clipped_heads"] > 0 for entry in entries)
    report = dmuon_hf.last_qk_clip(trainer.optimizer)
    assert report is not None and report.max_logit == entries[-1]["max_attention_logit"]


def _step(model: Any, threshold: float, spoil: Any = None) -> tuple[Any, dict[str, Tensor]]:
    """One step at a learning rate of zero, and the weights that it changed."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = dmuon_hf.create_optimizer(model, lr=0.0, qk_clip=threshold)
    ids = torch.arange(4, 4 + LENGTH)[None]
    model(ids, labels=ids).loss.backward()
    if spoil is not None:
        spoil(model)
    optimizer.step()
    changed = {name: value for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    return optimizer, changed


def test_skipped_step_clips_nothing_and_the_next_one_does() -> None:
    model: Any = _grown(tiny_llama())
    optimizer, changed = _step(model, 0.1, lambda model: model.lm_head.weight.grad.fill_(math.inf))
    assert optimizer.skipped_steps == 1 and not changed and dmuon_hf.last_qk_clip(optimizer) is None
    optimizer.zero_grad()
    ids = torch.arange(4, 4 + LENGTH)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    report = dmuon_hf.last_qk_clip(optimizer)
    assert report is not None and report.clipped_heads > 0


def test_only_queries_of_shared_keys_are_rescaled_and_momentum_is_left_alone() -> None:
    model = _grown(tiny_llama())
    optimizer, changed = _step(model, 0.1)
    assert set(changed) == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)}
    momentum = optimizer.state[model.model.layers[0].self_attn.q_proj.weight]["momentum_buffer"]
    assert torch.equal(momentum, model.model.layers[0].self_attn.q_proj.weight.grad)


def test_evaluation_and_recomputed_forwards_are_not_seen_twice() -> None:
    calls = 0

    def count(original: Any) -> Any:
        def see(self: Any, *args: Any) -> None:
            nonlocal calls
            calls += 1
            original(self, *args)

        return see

    model: Any = _grown(tiny_llama())
    optimizer = dmuon_hf.create_optimizer(model, lr=0.0, qk_clip=0.1)
    ids = torch.arange(4, 4 + LENGTH)[None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadMaxima, "see", count(HeadMaxima.see))
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model(ids, labels=ids, use_cache=False).loss.backward()
        assert calls == 4
        model.eval()(ids)
        assert calls == 4
    optimizer.step()
    optimizer.zero_grad()
    model(ids, labels=ids).loss.backward()
    with pytest.raises(ConfigurationError, match=r"saw no attention logits.*model\.train\(\)"):
        optimizer.step()


def test_heads_whose_logits_are_no_numbers_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoiled = torch.tensor([math.nan, math.inf, 5.0, 1.0])
    monkeypatch.setattr(HeadMaxima, "take", lambda self: spoiled)
    model = _grown(tiny_llama())
    before = model.get_parameter("model.layers.0.self_attn.q_proj.weight").detach().clone().unflatten(0, (4, 16))
    optimizer, _ = _step(model, 2.0)
    after = model.get_parameter("model.layers.0.self_attn.q_proj.weight").detach().unflatten(0, (4, 16))
    expected = before * torch.tensor([1.0, 1.0, 0.4, 1.0])[:, None, None]
    torch.testing.assert_close(after, expected)
    report = dmuon_hf.last_qk_clip(optimizer)
    assert report is not None and report.clipped_heads == 2 and report.max_logit == math.inf
    assert "infinite or NaN" in caplog.text


def test_attention_that_is_unfrozen_between_steps_is_clipped_from_then_on() -> None:
    model: Any = _grown(tiny_llama())
    attention = model.model.layers[1].self_attn.requires_grad_(False)
    optimizer, changed = _step(model, 0.1)
    assert set(changed) == {"model.layers.0.self_attn.q_proj.weight"}
    attention.requires_grad_(True)
    before = attention.q_proj.weight.detach().clone()
    optimizer.zero_grad()
    ids = torch.arange(4, 4 + LENGTH)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert float(attention.q_proj.weight.detach().norm()) < 0.5 * float(before.norm())


def test_tensor_parallel_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = dmuon_hf.create_optimizer(tiny_llama(), lr=0.0)
    monkeypatch.setattr(type(optimizer.runtime.topology), "tensor", object())
    with pytest.raises(NotImplementedError, match="tensor parallelism is not built"):
        clip_logits(optimizer, [], 1.0)


def _with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"]))


def _frozen_keys() -> nn.Module:
    model = tiny_llama(num_key_value_heads=4)
    model.model.layers[1].self_attn.k_proj.requires_grad_(False)
    return model


def _shared_weight() -> nn.Module:
    model = tiny_llama()
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight
    return model


def _frozen_attention() -> nn.Module:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (FAMILIES["gemma3"].build, r"nothing to rescale.*normalised \(self\.[qk]_norm"),
        (FAMILIES["bloom"].build, r"BloomAttention does not attend through transformers' attention interface"),
        (FAMILIES["mamba"].build, r"no attention module was found"),
        (_with_lora, r"layers\.0\.self_attn: .*adapters"),
        (_frozen_keys, r"layers\.1\.self_attn: .*k_proj\.weight is frozen"),
        (_frozen_attention, r"no attention module was found"),
        (_shared_weight, r"shares .*layers\.1\.self_attn\.q_proj\.weight"),
    ],
    ids=["normalised", "own attention", "no attention", "adapters", "frozen keys", "frozen attention", "shared weight"],
)
def test_attention_that_cannot_be_clipped_is_refused_before_training(build: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        dmuon_hf.create_optimizer(build(), lr=1e-3, qk_clip=100.0)


@pytest.mark.parametrize("threshold", [0, -1.0, math.inf, math.nan, True, "100"])
def test_threshold_that_is_none_is_refused(threshold: Any) -> None:
    with pytest.raises(ConfigurationError, match="largest attention logit"):
        dmuon_hf.create(qk_clip=threshold)
