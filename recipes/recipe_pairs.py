"""Conversations, preferences and pairs of texts made of the docstrings of Python's standard library."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

__all__ = ["CHAT_TEMPLATE", "conversations", "give_chat_template", "preferences", "sources_and_targets"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% generation %}"
    "{% endgeneration %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""For tokenizers that have none."""


def conversations(name: str, limit: int) -> Dataset:
    """Rows `{"messages": [user, assistant]}`: of docstrings for `stdlib`, else a file or a dataset on the Hub."""
    if name != "stdlib":
        return _loaded(name).select_columns(["messages"])
    rows = [
        {"messages": [_user(signature), {"role": "assistant", "content": text}]}
        for signature, text in _docstrings(limit)
    ]
    return Dataset.from_list(rows)


def preferences(name: str, limit: int) -> Dataset:
    """Rows `{"prompt", "chosen", "rejected"}`, messages each: the docstring of a function, and that of another one."""
    if name != "stdlib":
        return _loaded(name).select_columns(["prompt", "chosen", "rejected"])
    found = list(_docstrings(limit))
    others = [text for _, text in found[1:] + found[:1]]
    rows = [
        {
            "prompt": [_user(signature)],
            "chosen": [{"role": "assistant", "content": text}],
            "rejected": [{"role": "assistant", "content": other}],
        }
        for (signature, text), other in zip(found, others, strict=True)
    ]
    return Dataset.from_list(rows)


def sources_and_targets(name: str, limit: int, source_column: str, target_column: str) -> Dataset:
    """Rows `{"source", "target"}`: a docstring and its function's name for `stdlib`, else the columns of a dataset.

    Raises:
        SystemExit: a column is not there.
    """
    if name == "stdlib":
        rows = [{"source": text, "target": signature.partition("(")[0]} for signature, text in _docstrings(limit)]
        return Dataset.from_list(rows)
    loaded = _loaded(name)
    if not {source_column, target_column} <= set(loaded.column_names):
        raise SystemExit(f"name the columns with --source_column and --target_column; they are {loaded.column_names}")
    columns = {source_column: "source", target_column: "target"}
    return loaded.select_columns(list(columns)).rename_columns(columns)


def give_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """A chat template for a tokenizer without one."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE


def _user(signature: str) -> dict[str, str]:
    return {"role": "user", "content": f"What does {signature} do?"}


def _loaded(name: str) -> Any:
    return (
        load_dataset("json", data_files=name, split="train")
        if Path(name).is_file()
        else load_dataset(name, split="train")
    )


def _docstrings(limit: int) -> Iterator[tuple[str, str]]:
    """`(name(arguments), first line of its docstring)` of functions, the same on every machine with this Python."""
    count = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text:
                yield f"{node.name}({ast.unparse(node.args)})", text.splitlines()[0]  # type: ignore[attr-defined]
                count += 1
                if count == limit:
                    return
