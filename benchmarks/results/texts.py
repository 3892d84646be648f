"""Blocks of tokens that the studies train and measure on, from what every machine with this environment has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

import neighbours
import torch
from recipe_data import load_blocks
from torch import Tensor
from transformers import PreTrainedTokenizerBase

__all__ = ["prose", "source"]


def source(tokenizer: PreTrainedTokenizerBase, tokens: int, *, train: int, held_out: int) -> tuple[Tensor, Tensor]:
    """`(train, tokens)` and `(held_out, tokens)` ids of the standard library; every twentieth file is held out.

    The held-out blocks are spread evenly over the held-out text.
    """
    blocks = load_blocks("stdlib", tokenizer, block_size=tokens, max_train=train, max_held_out=64 * held_out)
    return torch.tensor(blocks.train[:]["input_ids"]), _spread(torch.tensor(blocks.held_out[:]["input_ids"]), held_out)


def prose(tokenizer: PreTrainedTokenizerBase, tokens: int, count: int) -> Tensor:
    """`(count, tokens)` ids of English prose, spread evenly over the descriptions of the installed packages."""
    ids: list[int] = []
    for paragraph in _paragraphs():
        ids += [*tokenizer(paragraph, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return _spread(torch.tensor(ids[: len(ids) // tokens * tokens]).view(-1, tokens), count)


def _paragraphs() -> Iterator[str]:
    """Paragraphs of 20 words or more, nearly all letters, from the packages pinned in constraints.txt."""
    lines = (neighbours.ROOT / "constraints.txt").read_text().splitlines()
    names = sorted({re.split(r"[=;\s]", line)[0].lower() for line in lines if line and line[0] != "#"})
    for name in names:
        try:
            found = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        for paragraph in re.split(r"\n\s*\n", str(found.get_payload() or found.get("Description") or "")):
            text = " ".join(paragraph.split())
            letters = sum(character.isalpha() or character in " ,.'" for character in text)
            if len(text.split()) >= 20 and letters >= 0.95 * len(text):
                yield text


def _spread(blocks: Tensor, count: int) -> Tensor:
    """`count` of the blocks at equal distances, or all."""
    return blocks[torch.linspace(0, len(blocks) - 1, min(count, len(blocks))).long()]
