"""Text of the recipes, cut into blocks of tokens."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

__all__ = ["Blocks", "hold_out", "load_blocks"]

_LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True, slots=True)
class Blocks:
    """Training and held-out blocks, each a row with `input_ids` and `labels` of the same length."""

    train: Dataset
    held_out: Dataset


def load_blocks(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    block_size: int,
    max_train: int | None,
    max_held_out: int,
    config: str | None = None,
    split: str = "train",
    column: str | None = None,
) -> Blocks:
    """Blocks of tokens from `stdlib`, local files (separated by commas), or a dataset on the Hub.

    A column `messages` (lists of `{"role": ..., "content": ...}`) goes through the tokenizer's chat template. Every
    twentieth text is held out. Texts are joined by the end-of-text token; the rest that fills no block is dropped.

    Raises:
        SystemExit: no text column, no chat template for messages, or too little text.
    """
    texts = _texts(name, tokenizer, config=config, split=split, column=column)
    train, held_out = [], []
    for index, text in enumerate(texts):
        (held_out if index % 20 == 0 else train).append(text)
        if max_train is not None and index % 20 == 19 and _enough(train, max_train, block_size):
            break
    blocks = Blocks(
        train=_blocks(train, tokenizer, block_size, max_train),
        held_out=_blocks(held_out, tokenizer, block_size, max_held_out),
    )
    if len(blocks.train) == 0 or len(blocks.held_out) == 0:
        raise SystemExit(
            f"{name!r} has too little text for blocks of {block_size} tokens ({len(blocks.train)} to train on, "
            f"{len(blocks.held_out)} held out): use more text or a smaller --block_size"
        )
    return blocks


def hold_out(rows: Any, most: int) -> tuple[Any, Any]:
    """Rows to train on and held-out ones: every twentieth, at most `most`. Of a list or a dataset.

    Raises:
        SystemExit: there are fewer than two rows.
    """
    held_out = list(range(0, len(rows), 20))[:most]
    train = sorted(set(range(len(rows))) - set(held_out))
    if not train or not held_out:
        raise SystemExit(f"{len(rows)} rows are too few to train on some and to hold out others")
    if isinstance(rows, Dataset):
        return rows.select(train), rows.select(held_out)
    return [rows[index] for index in train], [rows[index] for index in held_out]


def _enough(texts: list[str], blocks: int, block_size: int) -> bool:
    """Whether the text surely fills the blocks; a token rarely has more than eight characters."""
    return sum(map(len, texts)) > 8 * blocks * block_size


def _texts(
    name: str, tokenizer: PreTrainedTokenizerBase, *, config: str | None, split: str, column: str | None
) -> Iterator[str]:
    paths = [Path(part) for part in name.split(",")]
    if name == "stdlib":
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            yield path.read_text(encoding="utf-8", errors="replace")
    elif all(path.is_file() for path in paths):
        for path in paths:
            loader = _LOADERS.get(path.suffix)
            if loader is None:
                yield from _paragraphs(path.read_text(encoding="utf-8", errors="replace"))
            else:
                yield from _column(load_dataset(loader, data_files=str(path), split="train"), tokenizer, column)
    else:
        yield from _column(load_dataset(name, config, split=split), tokenizer, column)


def _paragraphs(text: str) -> Iterator[str]:
    """Pieces of about 4,000 characters that end at line ends, so that part of a single file can be held out."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= 4000:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def _column(dataset: Any, tokenizer: PreTrainedTokenizerBase, column: str | None) -> Iterator[str]:
    names = dataset.column_names
    chosen = column or next((name for name in ("text", "messages") if name in names), None)
    if chosen not in names:
        raise SystemExit(f"name the column that holds the text with --text_column; the columns are {names}")
    for row in dataset:
        yield row[chosen] if isinstance(row[chosen], str) else _chat(row[chosen], tokenizer)


def _chat(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template is None:
        raise SystemExit(
            "the dataset holds messages, but the tokenizer has no chat template: take that of a chat model"
        )
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def _blocks(texts: list[str], tokenizer: PreTrainedTokenizerBase, size: int, limit: int | None) -> Dataset:
    rows: list[list[int]] = []
    pending: list[int] = []
    for text in texts:
        pending += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            pending.append(tokenizer.eos_token_id)
        while len(pending) >= size and (limit is None or len(rows) < limit):
            rows.append(pending[:size])
            pending = pending[size:]
        if limit is not None and len(rows) >= limit:
            break
    return Dataset.from_dict({"input_ids": rows, "labels": rows})
