"""Finds fused weights by reading what a module's own code does with the output of its projections.

A weight whose output is split, and whose parts are not put together again, holds several matrices. Reading needs no
inputs and no memory, so it works for any model at set-up; it errs to the side of a warning.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

__all__ = ["is_split_by"]

_SPLITS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split", "unbind"})
_MOVES = frozenset({"contiguous", "flatten", "float", "permute", "reshape", "squeeze", "to", "transpose", "unflatten"})
_JOINS = frozenset({"cat", "concat", "concatenate"})


def is_split_by(caller: nn.Module, layer: str) -> bool:
    """Whether the code of `caller` splits what its layer `layer` puts out."""
    kind: Any = type(caller)
    return layer in _split_layers(kind)


@cache
def _split_layers(kind: type) -> frozenset[str]:
    """Attributes of a class whose outputs a method of it splits. Empty where there is no source to read."""
    found: set[str] = set()
    for method in _methods(kind):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        except (OSError, TypeError, SyntaxError):
            continue
        found |= _Reader().read(tree)
    return frozenset(found)


def _methods(kind: type) -> Iterator[FunctionType]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] != "torch":
            yield from (value for value in vars(base).values() if isinstance(value, FunctionType))


class _Reader(ast.NodeVisitor):
    """Follows variables that hold the output of `self.<layer>(...)` to a split, and its parts to a concatenation."""

    def __init__(self) -> None:
        self._holds: dict[str, str] = {}
        self._part_of: dict[str, str] = {}
        self._split: set[str] = set()
        self._joined: set[str] = set()

    def read(self, tree: ast.AST) -> set[str]:
        """The layers whose outputs stay apart."""
        self.visit(tree)
        return self._split - self._joined

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._assign(target.id, self._source(node.value))
            elif isinstance(target, ast.Tuple):
                self._unpack(target, node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        split = self._split_source(node)
        if split is not None:
            self._split.add(split)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _JOINS and node.args:
            self._join(node.args[0])

    def _assign(self, name: str, source: str | None) -> None:
        if source is None:
            self._holds.pop(name, None)
        else:
            self._holds[name] = source

    def _unpack(self, target: ast.Tuple, value: ast.expr) -> None:
        source = self._split_source(value)
        names = [element.id for element in target.elts if isinstance(element, ast.Name)]
        if source is not None:
            self._part_of.update(dict.fromkeys(names, source))
        elif isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            for element, part in zip(target.elts, value.elts, strict=True):
                if isinstance(element, ast.Name):
                    self._assign(element.id, self._source(part))

    def _join(self, parts: ast.expr) -> None:
        """Parts of one output that meet in a concatenation are one role, as the rotated part of a query is."""
        direct = self._split_source(parts)
        if direct is not None:
            self._joined.add(direct)
        elements = parts.elts if isinstance(parts, (ast.Tuple, ast.List)) else []
        sources = [self._part_of.get(part.id) for part in elements if isinstance(part, ast.Name)]
        self._joined.update(source for source in sources if source is not None and sources.count(source) > 1)

    def _split_source(self, node: ast.expr) -> str | None:
        """The layer whose output an expression splits."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in _SPLITS:
            return None
        owner = node.func.value
        by_function = isinstance(owner, ast.Name) and owner.id == "torch"
        return self._source(node.args[0] if by_function and node.args else owner)

    def _source(self, node: ast.expr) -> str | None:
        """The layer whose output an expression is, moved but whole."""
        if isinstance(node, ast.Name):
            return self._holds.get(node.id)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return None
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "self":
            return node.func.attr
        return self._source(owner) if node.func.attr in _MOVES or node.func.attr == "view" else None
