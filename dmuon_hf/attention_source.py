"""Reads what the code of an attention module does with its queries and keys before it attends.

Rescaling rows of their projections rescales attention logits by the same factors only where nothing but linear
operations, head by head, lies between: reshaping, rotary positions, factors. A normalisation undoes it, an added bias
or a clamp changes it. Reading needs no inputs and no memory, and errs to the side of a refusal.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

__all__ = ["Reading", "calls_interface", "has_softmax", "read"]

_LINEAR = frozenset(
    {
        "apply", "cat", "chunk", "clone", "contiguous", "detach", "expand", "flatten", "flip", "float", "masked_fill",
        "mul", "pad", "permute", "repeat", "repeat_interleave", "reshape", "roll", "split", "split_with_sizes",
        "squeeze", "stack", "tensor_split", "to", "transpose", "type", "type_as", "unbind", "unflatten", "unsqueeze",
        "update", "view", "view_as", "where", "zip",
    }
)  # fmt: skip
"""Functions and methods that keep what they are given linear: they move values, or multiply them."""
_LINEAR_PARTS = ("apply_rotary", "repeat_kv", "rotate", "shape", "transpose_for_scores", "split_heads", "rope")
"""Parts of the names of helpers that do the same."""
_NO_VALUES = frozenset({"shape", "size", "dtype", "device", "ndim", "dim", "numel", "new_empty", "new_zeros"})
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
}
_NOTHING: frozenset[str] = frozenset()


class Reading:
    """What became of the layers of one attention module on their way to the attention function.

    Attributes:
        queries, keys: layers whose output arrives as queries, as keys.
        problems: what is done to them on the way that is not linear, in the words of the code.
        calls: calls of the attention function.
    """

    def __init__(self) -> None:
        self.queries: set[str] = set()
        self.keys: set[str] = set()
        self.problems: set[str] = set()
        self.calls = 0


def calls_interface(module: nn.Module) -> bool:
    """Whether a module attends through an attention function that transformers chooses."""
    return any(".get_interface(" in source for source in _sources(module).values())


def has_softmax(module: nn.Module) -> bool:
    """Whether a module itself takes a softmax, or attends by a function of torch; True where it cannot be read."""
    sources = _sources(module).values()
    return not sources or any("softmax" in source or "scaled_dot_product" in source for source in sources)


def read(module: nn.Module, layers: Collection[str]) -> Reading:
    """Follow the outputs of `layers`, attributes of `module`, through its code.

    What the settings of this very module leave out (`self.qk_norm` that is None) is left out.
    """
    reading = Reading()
    for source in _sources(module).values():
        if ".get_interface(" in source:
            _Reader(module, frozenset(layers), reading).visit(ast.parse(source))
    return reading


def _sources(module: nn.Module) -> dict[str, str]:
    kind: Any = type(module)
    return _sources_of(kind)


@cache
def _sources_of(kind: type) -> dict[str, str]:
    """Code of every method that an instance has, by name, without those of torch and those that cannot be read."""
    found: dict[str, str] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            continue
        for name, value in vars(base).items():
            function = inspect.unwrap(value) if callable(value) else value
            if isinstance(function, FunctionType) and name not in found:
                try:
                    found[name] = textwrap.dedent(inspect.getsource(function))
                except (OSError, TypeError):
                    continue
    return found


class _Reader(ast.NodeVisitor):
    """Keeps for every variable the layers whose outputs it holds, in the order of the statements."""

    def __init__(self, module: nn.Module, layers: frozenset[str], reading: Reading) -> None:
        self._module = module
        self._layers = layers
        self._reading = reading
        self._holds: dict[str, frozenset[str]] = {}
        self._interfaces: set[str] = set()
        self._returned = _NOTHING

    def visit_Assign(self, node: ast.Assign) -> None:
        held = self._of(node.value)
        if _is_interface(node.value):
            self._interfaces |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for target in node.targets:
            self._bind(target, held, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit_Assign(ast.Assign(targets=[node.target], value=node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        held = self._of(ast.BinOp(left=_loaded(node.target), op=node.op, right=node.value))
        self._bind(node.target, held, None)

    def visit_Expr(self, node: ast.Expr) -> None:
        self._of(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self._returned |= self._of(node.value)

    def visit_If(self, node: ast.If) -> None:
        taken = _decided(node.test, self._module)
        for statement in (*(node.body if taken is not False else ()), *(node.orelse if taken is not True else ())):
            self.visit(statement)

    def _bind(self, target: ast.expr, held: frozenset[str], value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self._holds[target.id] = held
        elif isinstance(target, ast.Subscript):
            self._fill(target, held)
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else None
            for index, element in enumerate(target.elts):
                one = held if values is None or len(values) != len(target.elts) else self._of(values[index])
                self._bind(element, one, None)

    def _of(self, node: ast.expr | None) -> frozenset[str]:
        """Layers whose outputs are in the value of an expression."""
        if isinstance(node, ast.Name):
            return self._holds.get(node.id, _NOTHING)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.BinOp):
            return self._of_operator(node)
        if isinstance(node, ast.Attribute):
            return _NOTHING if node.attr in _NO_VALUES else self._of(node.value)
        if isinstance(node, ast.IfExp):
            taken = _decided(node.test, self._module)
            ways = [way for way, left_out in ((node.body, False), (node.orelse, True)) if taken is not left_out]
            return _NOTHING.union(*map(self._of, ways))
        if isinstance(node, (ast.Subscript, ast.Starred)):
            return self._of(node.value)
        if isinstance(node, ast.UnaryOp):
            return self._of(node.operand)
        if isinstance(node, (ast.Tuple, ast.List)):
            return _NOTHING.union(*map(self._of, node.elts))
        if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
            source = _NOTHING.union(*(self._of(generator.iter) for generator in node.generators))
            for generator in node.generators:
                self._bind(generator.target, source, None)
            return self._of(node.elt)
        return _NOTHING

    def _of_operator(self, node: ast.BinOp) -> frozenset[str]:
        left, right = self._of(node.left), self._of(node.right)
        sums = isinstance(node.op, (ast.Add, ast.Sub)) and left != right
        products = isinstance(node.op, ast.Mult) and left and right
        fractions = isinstance(node.op, ast.Div) and right
        if sums or products or fractions or not isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
            self._refuse(node, left | right)
        return left | right

    def _of_call(self, node: ast.Call) -> frozenset[str]:
        arguments = [self._of(argument) for argument in (*node.args, *(keyword.value for keyword in node.keywords))]
        given = _NOTHING.union(*arguments)
        if self._attends(node):
            return _NOTHING
        function = node.func
        if isinstance(function, ast.Attribute):
            if isinstance(function.value, ast.Name) and function.value.id == "self":
                if function.attr in self._layers:
                    return frozenset({function.attr})
                if given and getattr(self._module, function.attr, None) is None:
                    return given
                if isinstance(getattr(self._module, function.attr, None), (nn.Dropout, nn.Identity)):
                    return given
                if function.attr in _sources(self._module):
                    return self._of_method(function.attr, node)
            elif function.attr in _NO_VALUES:
                return _NOTHING
            elif function.attr == "copy_":
                self._fill(function.value, given)
                return given
            else:
                given |= self._of(function.value)
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if given and name not in _LINEAR and not any(part in name for part in _LINEAR_PARTS):
            self._refuse(node, given)
        return given

    def _fill(self, target: ast.expr, held: frozenset[str]) -> None:
        """A part of a variable is written."""
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name):
            self._holds[target.id] = self._holds.get(target.id, _NOTHING) | held

    def _of_method(self, name: str, node: ast.Call) -> frozenset[str]:
        """What a method of the module returns, read with what it is given here."""
        definition = ast.parse(_sources(self._module)[name]).body[0]
        assert isinstance(definition, ast.FunctionDef)
        inner = _Reader(self._module, self._layers, self._reading)
        parameters = [argument.arg for argument in definition.args.args][1:]
        inner._holds = {name: self._of(value) for name, value in zip(parameters, node.args, strict=False)}
        inner._holds |= {keyword.arg: self._of(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        for statement in definition.body:
            inner.visit(statement)
        return inner._returned

    def _attends(self, node: ast.Call) -> bool:
        """Note what arrives, if this calls the attention function."""
        if not (isinstance(node.func, ast.Name) and node.func.id in self._interfaces) and not (
            isinstance(node.func, ast.Call) and _is_interface(node.func)
        ):
            return False
        by_name = {keyword.arg: keyword.value for keyword in node.keywords}
        self._reading.calls += 1
        for place, names, found in (
            (1, ("query", "query_states"), self._reading.queries),
            (2, ("key", "key_states"), self._reading.keys),
        ):
            value = node.args[place] if len(node.args) > place else next(map(by_name.get, names), None)
            found |= self._of(value)
        return True

    def _refuse(self, node: ast.expr, held: frozenset[str]) -> None:
        if held:
            self._reading.problems.add(ast.unparse(node))


def _is_interface(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get_interface"


def _loaded(target: ast.expr) -> ast.expr:
    return ast.Name(id=target.id, ctx=ast.Load()) if isinstance(target, ast.Name) else target


def _decided(test: ast.expr, module: nn.Module) -> bool | None:
    """What a condition comes to by the settings of a module alone; None where it takes more to say."""
    if isinstance(test, ast.BoolOp):
        parts = [_decided(part, module) for part in test.values]
        deciding = isinstance(test.op, ast.Or)
        if deciding in parts:
            return deciding
        return None if None in parts else not deciding
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _decided(test.operand, module)
        return None if inner is None else not inner
    try:
        return bool(_setting(test, module))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _setting(node: ast.expr, module: nn.Module) -> Any:
    """The value of an expression of a module's settings, of constants and of one comparison of these.

    Raises:
        ValueError: it is of something else, or of whether the module trains, which changes.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id == "self":
        return module
    if isinstance(node, ast.Attribute) and node.attr != "training":
        return getattr(_setting(node.value, module), node.attr)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        compare = _COMPARISONS[type(node.ops[0])]
        return compare(_setting(node.left, module), _setting(node.comparators[0], module))
    raise ValueError(ast.unparse(node))
