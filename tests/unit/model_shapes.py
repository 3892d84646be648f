"""Matrices of published models, by the shapes in their configurations."""

from __future__ import annotations

from dmuon_hf.core.plan import MatrixSpec

Matrices = dict[str, tuple[tuple[int, int], MatrixSpec]]

WHOLE = MatrixSpec()


def _llama(hidden: int, kv: int, feed_forward: int, query: int | None = None) -> Matrices:
    query = query or hidden
    shapes = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
    shapes |= {"gate": (feed_forward, hidden), "up": (feed_forward, hidden), "down": (hidden, feed_forward)}
    return {name: (shape, WHOLE) for name, shape in shapes.items()}


def _experts(count: int, hidden: int, feed_forward: int) -> Matrices:
    shapes = {"gate": (feed_forward, hidden), "up": (feed_forward, hidden), "down": (hidden, feed_forward)}
    return {f"{expert}.{name}": (shape, WHOLE) for expert in range(count) for name, shape in shapes.items()}


def _attention(matrices: Matrices) -> Matrices:
    return {name: matrices[name] for name in ("q", "k", "v", "o")}


# Layers, and the matrices of one.
MODEL_SHAPES: dict[str, tuple[int, Matrices]] = {
    "llama-3-8b": (32, _llama(4096, 1024, 14336)),
    "llama-3-70b": (80, _llama(8192, 1024, 28672)),
    "llama-3-405b": (126, _llama(16384, 1024, 53248)),
    "qwen2.5-0.5b": (24, _llama(896, 128, 4864)),
    "gemma-2-9b": (42, _llama(3584, 2048, 14336, query=4096)),
    "gpt2": (
        12,
        {
            "c_attn": ((768, 2304), MatrixSpec(transposed=True, sections=(768, 768, 768))),
            "c_proj": ((768, 768), MatrixSpec(transposed=True)),
            "c_fc": ((768, 3072), MatrixSpec(transposed=True)),
            "mlp.c_proj": ((3072, 768), MatrixSpec(transposed=True)),
        },
    ),
    "phi-3-mini": (
        32,
        {
            "qkv_proj": ((9216, 3072), MatrixSpec(sections=(3072, 3072, 3072))),
            "o_proj": ((3072, 3072), WHOLE),
            "gate_up_proj": ((16384, 3072), MatrixSpec(sections=(8192, 8192))),
            "down_proj": ((3072, 8192), WHOLE),
        },
    ),
    "mixtral-8x7b": (32, _attention(_llama(4096, 1024, 1)) | _experts(8, 4096, 14336)),
    "qwen3-30b-a3b": (48, _attention(_llama(2048, 512, 1, query=4096)) | _experts(128, 2048, 768)),
}


def matrices_of(model: str) -> dict[str, tuple[tuple[int, int], MatrixSpec]]:
    """Stored shape and spec of every matrix of a model."""
    layers, matrices = MODEL_SHAPES[model]
    return {f"layers.{layer:03}.{name}": matrix for layer in range(layers) for name, matrix in matrices.items()}
