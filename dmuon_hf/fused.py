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

from dmuon_hf.output_reader import Given, OutputReader

__all__ = ["is_split_by"]


def is_split_by(caller: nn.Module, layer: str) -> bool:
    """Whether the code of `caller` splits what its layer `layer` puts out."""
    if isinstance(caller, nn.Sequential):
        following = list(caller._modules.items())[list(caller._modules).index(layer) + 1 :]
        return bool(following) and isinstance(following[0][1], nn.GLU)
    kind: Any = type(caller)
    plain = {name: child for name, child in caller.named_children() if next(child.parameters(), None) is None}
    gates = frozenset(name for name, child in plain.items() if isinstance(child, nn.GLU))
    return layer in _split_layers(kind, frozenset(plain) - gates, gates)


@cache
def _split_layers(kind: type, elementwise: frozenset[str], gates: frozenset[str]) -> frozenset[str]:
    """Attributes of a class whose outputs a method of it splits. Empty where there is no source to read.

    Args:
        elementwise: attributes without parameters, as activations are.
        gates: those that halve what they are given.
    """
    bodies = {method.__name__: tree for method in _methods(kind) if (tree := _tree_of(method)) is not None}
    pending = [Given(name) for name in bodies]
    known, found = set(pending), set[str]()
    while pending:
        given = pending.pop()
        reader = OutputReader(bodies[given.method], given, elementwise, gates)
        found |= reader.split_layers
        # A method that is handed an output splits it for its caller.
        new = {call for call in reader.calls if call.method in bodies} - known
        known |= new
        pending += new
    return frozenset(found)


def _tree_of(method: FunctionType) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):
        return None
    body = tree.body[0] if tree.body else None
    return body if isinstance(body, ast.FunctionDef) and body.args.args else None


def _methods(kind: type) -> Iterator[FunctionType]:
    """Methods that the authors of a model wrote, those of base classes first."""
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] != "torch":
            yield from (value for value in vars(base).values() if isinstance(value, FunctionType))
