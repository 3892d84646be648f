"""Helpers of the Hugging Face tests: launch environments, a tiny model, a tiny dataset, a Trainer run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import dmuon_hf
from dmuon_hf import hooks
from dmuon_hf.core.plan import canonical_name
from tests.harness import RankOutcome

VOCABULARY = 128


def fsdp_env(
    world: int, *, replicas: int = 1, state_dict: str = "FULL_STATE_DICT", mesh: bool = True, **extra: str
) -> dict[str, str]:
    """What `accelerate launch` puts into the environment for FSDP2 over `world` CPU processes."""
    env = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "no",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": state_dict,
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_OFFLOAD_PARAMS": "false",
    }
    if mesh:
        env |= {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(replicas),
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(world // replicas),
        }
    return env | extra


def tiny_llama(**overrides: Any) -> LlamaForCausalLM:
    """A two-layer Llama with fixed fp32 weights."""
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**config | overrides))


def tiny_deepseek() -> DeepseekV3ForCausalLM:
    """A tied model with stacks of experts and a buffer that checkpoints hold, beside rotary ones that they do not."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.5, -0.5, 0.25, 0.0]))
    return model


def tiny_dataset(size: int = 96, length: int = 16) -> list[dict[str, list[int]]]:
    """Random token sequences, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for _ in range(size)]
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(output_dir: Path | str, **overrides: Any) -> TrainingArguments:
    """TrainingArguments of a short, silent CPU run."""
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**settings | overrides)


def make_trainer(model: nn.Module, args: TrainingArguments, **options: Any) -> Trainer:
    """A Trainer on the tiny dataset with DMuon."""
    return Trainer(
        model=model,
        args=args,
        train_dataset=tiny_dataset(),
        eval_dataset=tiny_dataset(16),
        optimizers=dmuon_hf.create(**options),
    )


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole weights on every rank. Collective."""
    return {
        canonical_name(name, model): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def losses(trainer: Trainer) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every logged step."""
    return [
        (entry["step"], entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry
    ]


def error_of(outcome: RankOutcome) -> str:
    """Message of the exception that a rank raised."""
    assert outcome.exception is not None, outcome
    return outcome.exception.message


def as_launched() -> None:
    """What `import dmuon_hf` does first in a process that was launched for FSDP."""
    hooks.install()


def finish() -> None:
    """Leave together, so that no rank tears the store down while another still reads."""
    if dist.is_initialized():
        dist.barrier()
