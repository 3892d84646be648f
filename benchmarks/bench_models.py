"""The models that the benchmarks train, their batches, and what Muon takes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dmuon_hf.core.plan import MatrixSpec

__all__ = ["BATCH", "batch_of", "is_matrix", "make_llama", "make_moe", "spec_of", "tp_plan"]

BATCH = (2, 32)
"""Sequences and tokens of one rank's batch."""
_VOCABULARY = 512
_EXPERT_WIDTH = 128


def batch_of(rank: int, step: int, shape: tuple[int, int] = BATCH) -> Tensor:
    """Token ids, other ones on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, _VOCABULARY, shape, generator=generator)


def make_llama() -> Any:
    """A Llama in fp32, the same on every rank: 3.15 M of its 3.41 M parameters are matrices for Muon."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=_VOCABULARY,
            attn_implementation="eager",
            tie_word_embeddings=False,
        )
    )


def make_moe() -> Any:
    """A Qwen3-MoE in fp32, the same on every rank: 16 experts of width 128 in each of 4 layers, of which a token has 2.

    6.29 M of its 7.37 M parameters are matrices of experts, 0.79 M those of attention.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=256,
            moe_intermediate_size=_EXPERT_WIDTH,
            num_experts=16,
            num_experts_per_tok=2,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            vocab_size=_VOCABULARY,
            attn_implementation="eager",
            tie_word_embeddings=False,
        )
    )


def is_matrix(name: str, param: nn.Parameter) -> bool:
    """The matrices of the layers, stacks of experts among them, without routers."""
    return "layers." in name and param.ndim >= 2 and not name.endswith("mlp.gate.weight")


def spec_of(name: str, param: nn.Parameter) -> MatrixSpec:
    """Gate and up of an expert are two matrices in one."""
    if name.endswith("gate_up_proj"):
        return MatrixSpec(sections=(_EXPERT_WIDTH, _EXPERT_WIDTH))
    return MatrixSpec()


def tp_plan() -> dict[str, Any]:
    """Column- and row-wise tensor parallelism of a layer of the Llama, for ``parallelize_module``."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    return {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
