"""Reads one method: which outputs of `self.<layer>(...)` it splits, and does not put together again."""

from __future__ import annotations

import ast
from typing import NamedTuple

__all__ = ["Given", "OutputReader"]

_SPLITS = frozenset({"chunk", "narrow", "split", "split_with_sizes", "tensor_split", "unbind"})
_VIEWS = frozenset(
    {"flatten", "movedim", "permute", "rearrange", "reshape", "swapaxes", "transpose", "unflatten", "view"}
)
_KEEPS = frozenset({"clone", "contiguous", "float", "squeeze", "to", "type_as", "unsqueeze"})
_ACTIVATIONS = frozenset({"dropout", "elu", "gelu", "leaky_relu", "relu", "sigmoid", "silu", "softplus", "tanh"})
_JOINS = frozenset({"cat", "concat", "concatenate", "stack"})


class Given(NamedTuple):
    """A method, and which of its arguments are the output of a layer."""

    method: str
    outputs: tuple[tuple[str | int, Output], ...] = ()


class Output(NamedTuple):
    """The whole output of a layer; `viewed` where its features may be in several dimensions."""

    layer: str
    viewed: bool = False


class OutputReader(ast.NodeVisitor):
    """Follows variables that hold the output of a layer to a split, and its parts to where they are joined.

    Attributes:
        split_layers: the layers whose outputs stay apart.
        calls: methods that are handed such an output.
    """

    def __init__(self, body: ast.FunctionDef, given: Given, elementwise: frozenset[str], gates: frozenset[str]) -> None:
        names = [argument.arg for argument in body.args.args]
        self._self, self._elementwise, self._gates = names[0], elementwise, gates
        self._holds = {
            names[place] if isinstance(place, int) else place: output
            for place, output in given.outputs
            if not isinstance(place, int) or place < len(names)
        }
        self._part_of: dict[str, str] = {}
        self._slices: dict[str, set[str]] = {}
        self._split: set[str] = set()
        self._joined: set[str] = set()
        self.calls: set[Given] = set()
        for statement in body.body:
            self.visit(statement)
        self._split |= {layer for layer, places in self._slices.items() if len(places) > 1}
        self.split_layers = self._split - self._joined

    # -- statements ----------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self._assign(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._assign(node.target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            self._unpack(target, value)
        elif isinstance(target, ast.Name):
            output, part = self._output(value), self._part(value)
            self._holds.pop(target.id, None)
            if output is not None:
                self._holds[target.id] = output
            elif part is not None:
                # A part stays one of its layer whatever becomes of it: it is rotated, cast, normalised.
                self._part_of[target.id] = part

    def _unpack(self, target: ast.Tuple, value: ast.expr) -> None:
        if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            for element, part in zip(target.elts, value.elts, strict=True):
                self._assign(element, part)
            return
        layer = self._split_layer(value)
        output = self._output(value)
        if layer is None and output is not None and output.viewed:
            layer = output.layer
            self._split.add(layer)
        if layer is not None:
            self._part_of.update({name.id: layer for name in target.elts if isinstance(name, ast.Name)})

    # -- expressions ---------------------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        layer = self._split_layer(node)
        if layer is not None and not self._is_of_batches(node):
            self._split.add(layer)
        name = _called(node)
        halved = self._output(node.args[0]) if node.args and (name == "glu" or self._own(node) in self._gates) else None
        if halved is not None:
            self._split.add(halved.layer)
        if name in _JOINS and node.args:
            self._join(node.args[0])
        method = self._own(node)
        if method is not None:
            self._hand_over(method, node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        output = self._output(node.value)
        if output is not None and _selects(node.slice, viewed=output.viewed):
            self._slices.setdefault(output.layer, set()).add(ast.dump(node.slice))

    def _hand_over(self, method: str, node: ast.Call) -> None:
        places: list[tuple[str | int, ast.expr]] = [
            *((place, argument) for place, argument in enumerate(node.args, 1)),
            *((keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg is not None),
        ]
        outputs = ((place, self._output(value)) for place, value in places)
        # What is in heads already stays so.
        fused = tuple((place, output) for place, output in outputs if output is not None and not output.viewed)
        if fused:
            self.calls.add(Given(method, fused))

    def _join(self, parts: ast.expr) -> None:
        """Parts of one output that meet in a concatenation are one role, as the rotated part of a query is."""
        direct = self._split_layer(parts)
        if direct is not None:
            self._joined.add(direct)
        elements = parts.elts if isinstance(parts, (ast.Tuple, ast.List)) else []
        layers = [self._part(element) for element in elements]
        self._joined.update(layer for layer in layers if layer is not None and layers.count(layer) > 1)

    def _part(self, node: ast.expr) -> str | None:
        """The layer of whose parts an expression is made, by arithmetic and slices alone."""
        if any(isinstance(inner, ast.Call) for inner in ast.walk(node)):
            return None
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        layers = {self._part_of[name] for name in names if name in self._part_of}
        layers |= {self._holds[name].layer for name in names if name in self._holds and isinstance(node, ast.Subscript)}
        return layers.pop() if len(layers) == 1 else None

    def _split_layer(self, node: ast.expr) -> str | None:
        """The layer whose output an expression splits."""
        if not isinstance(node, ast.Call) or _called(node) not in _SPLITS:
            return None
        output = self._output(_operand(node))
        return None if output is None else output.layer

    def _is_of_batches(self, node: ast.Call) -> bool:
        """Whether a split is along the first dimension of an output as it came, where there are no features."""
        output = self._output(_operand(node))
        dims = [keyword.value for keyword in node.keywords if keyword.arg == "dim"]
        return output is not None and not output.viewed and bool(dims) and ast.dump(dims[0]) == ast.dump(_ZERO)

    def _output(self, node: ast.expr) -> Output | None:
        """The layer whose whole output an expression is."""
        if isinstance(node, ast.Name):
            return self._holds.get(node.id)
        if isinstance(node, ast.NamedExpr):
            return self._output(node.value)
        if isinstance(node, ast.BinOp):
            return self._output(node.left) if isinstance(node.right, ast.Constant) else None
        if not isinstance(node, ast.Call):
            return None
        own = self._own(node)
        if own is not None:
            if own not in self._elementwise:
                return Output(own)
            # With more arguments it is something else, such as a table of rotations.
            return self._output(node.args[0]) if len(node.args) == 1 and not node.keywords else None
        if _called(node) == "linear" and len(node.args) > 1:
            return self._output_of_weight(node.args[1])
        inner = self._output(_operand(node))
        if inner is None or _called(node) not in _VIEWS | _KEEPS | _ACTIVATIONS:
            return None
        return Output(inner.layer, viewed=inner.viewed or _called(node) in _VIEWS)

    def _output_of_weight(self, weight: ast.expr) -> Output | None:
        """The layer `self.<layer>.weight` of a product that the method computes itself."""
        if isinstance(weight, ast.Attribute) and isinstance(weight.value, ast.Attribute):
            owner = weight.value
            if isinstance(owner.value, ast.Name) and owner.value.id == self._self:
                return Output(owner.attr)
        return None

    def _own(self, node: ast.Call) -> str | None:
        """The attribute of the module itself that a call calls."""
        function = node.func
        is_own = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
        return function.attr if is_own and function.value.id == self._self else None  # type: ignore[attr-defined]


_ZERO = ast.Constant(0)
_LIBRARIES = frozenset({"F", "einops", "functional", "nn", "torch"})


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _operand(node: ast.Call) -> ast.expr:
    """What a method or a function of a library works on."""
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if name not in _LIBRARIES:
            return owner
    return node.args[0] if node.args else _ZERO


def _selects(index: ast.expr, *, viewed: bool) -> bool:
    """Whether an index takes some of the features: of an output as it came in the last dimension, else one of several.

    A slice of what was viewed as heads is a part of each head, which is rotated or normalised apart.
    """
    items = index.elts if isinstance(index, ast.Tuple) else [index]
    if viewed:
        return any(isinstance(item, ast.Constant) and isinstance(item.value, int) for item in items)
    is_last = len(items) > 2 or (len(items) == 2 and isinstance(items[0], ast.Constant) and items[0].value is ...)
    last = items[-1]
    return is_last and isinstance(last, ast.Slice) and not (last.lower is None and last.upper is None)
