"""Sizes of Llamas for the benchmarks that plan and predict, and the plan that the package makes for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dmuon_hf.core.plan import Candidate, Plan, make_plan
from dmuon_hf.step_model import Layout

__all__ = ["MODELS", "LlamaShape", "plan_for"]


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama with grouped-query attention and untied embeddings, no biases."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """``(out, in)`` of each matrix of one layer, by its name in the layer."""
        kv = self.hidden * self.kv_heads // self.heads
        return {
            "self_attn.q_proj.weight": (self.hidden, self.hidden),
            "self_attn.k_proj.weight": (kv, self.hidden),
            "self_attn.v_proj.weight": (kv, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, self.hidden),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }

    def candidates(self) -> list[Candidate]:
        """The matrices for Muon, one unit per layer, as the package would name them."""
        units = [f"model.layers.{i}" for i in range(self.layers)]
        return [
            Candidate(name=f"{unit}.{name}", shape=shape, dtype=torch.float32, unit=unit)
            for unit in units
            for name, shape in self.layer_matrices().items()
        ]

    @property
    def matrix_numel(self) -> int:
        """P: elements of the matrices for Muon."""
        return self.layers * sum(math.prod(shape) for shape in self.layer_matrices().values())

    @property
    def rest_numel(self) -> int:
        """Q: embedding, head and norms."""
        return 2 * self.vocabulary * self.hidden + (2 * self.layers + 1) * self.hidden

    @property
    def units(self) -> int:
        return self.layers

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward, without recomputation."""
        return 6.0 * (self.matrix_numel + self.rest_numel) + 6.0 * self.layers * self.hidden * sequence


MODELS = {
    "llama-3-8b": LlamaShape("llama-3-8b", 4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": LlamaShape("llama-3-70b", 8192, 28672, 80, 64, 8, 128256),
    "benchmark": LlamaShape("benchmark", 256, 768, 4, 4, 2, 512),
}
"""``benchmark`` is the model of ``benchmarks/step.py``."""


def plan_for(shape: LlamaShape, layout: Layout) -> Plan:
    """The plan that the package makes for this model on these ranks."""
    return make_plan(
        shape.candidates(),
        units=[f"model.layers.{i}" for i in range(shape.layers)],
        shard_size=layout.shard,
        replicate_size=layout.replicate,
    )
