"""Tiny models and deterministic data, the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


class GatedBlock(nn.Module):
    """Residual gated MLP with layer norm, a block of `TinyMLP`: two `(ff, d)` matrices and one `(d, ff)`."""

    def __init__(self, d: int, ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d, ff, bias=False)
        self.up_proj = nn.Linear(d, ff, bias=False)
        self.down_proj = nn.Linear(ff, d, bias=False)
        self.ln = nn.LayerNorm(d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.ln(x)
        return x + self.down_proj(self.gate_proj(h) * self.up_proj(h))


class TinyMLP(nn.Module):
    """`GatedBlock`s in `layers`, then a head. Input `(batch, d)`, output a scalar. Muon predicate: `"proj" in name`."""

    def __init__(self, d: int = 16, ff: int = 32, n_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedBlock(d, ff) for _ in range(n_layers))
        self.head = nn.Linear(d, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class ContainerMLP(nn.Module):
    """The same network with each block a `ModuleDict`: a container whose own forward is never called."""

    def __init__(self, d: int = 16, ff: int = 32, n_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "gate_proj": nn.Linear(d, ff, bias=False),
                    "up_proj": nn.Linear(d, ff, bias=False),
                    "down_proj": nn.Linear(ff, d, bias=False),
                    "ln": nn.LayerNorm(d),
                }
            )
            for _ in range(n_layers)
        )
        self.head = nn.Linear(d, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer["ln"](x)
            x = x + layer["down_proj"](layer["gate_proj"](h) * layer["up_proj"](h))
        return self.head(x).square().mean()


class UnevenBlock(nn.Module):
    """Matrices whose rows divide by no usual number of ranks: 33x64, 32x33, 7x32, 64x7 and 5x3; a block of
    `UnevenModel`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.wide = nn.Linear(64, 33)
        self.fold = nn.Linear(33, 32, bias=False)
        self.odd = nn.Linear(32, 7, bias=False)
        self.back = nn.Linear(7, 64, bias=False)
        self.small = nn.Linear(3, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.odd(torch.tanh(self.fold(torch.tanh(self.wide(self.norm(x)))))))
        side = self.small(h[..., :3]).sum(-1, keepdim=True)
        return x + self.back(h) + 0.1 * side


class UnevenModel(nn.Module):
    """`UnevenBlock`s in `layers`, then a head. Input `(batch, 64)`, output a scalar. A good Muon predicate: `"layers"
    in name and ndim == 2`."""

    def __init__(self, n_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(UnevenBlock() for _ in range(n_layers))
        self.head = nn.Linear(64, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def tiny_mlp(seed: int = 0, *, d: int = 16, ff: int = 32, n_layers: int = 3) -> TinyMLP:
    """A `TinyMLP` with the weights of `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyMLP(d, ff, n_layers)


def container_mlp(seed: int = 0, *, d: int = 16, ff: int = 32, n_layers: int = 3) -> ContainerMLP:
    """A `ContainerMLP` with the weights of `seed`; its parameter names and values are those of `tiny_mlp(seed)`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ContainerMLP(d, ff, n_layers)


def uneven_model(seed: int = 0, *, n_layers: int = 2) -> UnevenModel:
    """An `UnevenModel` with the weights of `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return UnevenModel(n_layers)


def tiny_llama(seed: int = 0, *, tied: bool = False, n_layers: int = 2) -> LlamaForCausalLM:
    """A two-layer fp32 Llama of hidden size 64 and vocabulary 128; `tied` shares the embedding with the output head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=n_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def dense_batch(step: int, *, batch: int = 8, width: int = 16, seed: int = 0) -> torch.Tensor:
    """The whole `(batch, width)` fp32 input of a step, the same wherever it is called."""
    generator = torch.Generator().manual_seed(100_003 * seed + step)
    return torch.randn(batch, width, generator=generator)


def token_batch(step: int, *, batch: int = 8, length: int = 12, vocab: int = 128, seed: int = 0) -> torch.Tensor:
    """The whole `(batch, length)` int64 token matrix of a step; ids 0 to 2 (pad, begin, end) do not occur."""
    generator = torch.Generator().manual_seed(100_003 * seed + step)
    return torch.randint(3, vocab, (batch, length), generator=generator)


def rank_part(batch: torch.Tensor, rank: int, world: int, *, micro: int = 0, n_micro: int = 1) -> torch.Tensor:
    """Rows of `batch` for one rank and one of its micro-batches. The parts of all ranks and micro-batches make up the
    batch."""
    pieces = world * n_micro
    if batch.shape[0] % pieces:
        raise ValueError(
            f"a batch of {batch.shape[0]} rows does not divide into {world} ranks x {n_micro} micro-batches"
        )
    return batch.chunk(pieces)[rank * n_micro + micro]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean loss: the model's own output for dense input, next-token cross-entropy for a causal language model."""
    if batch.is_floating_point():
        return model(batch)
    return model(input_ids=batch, labels=batch).loss
