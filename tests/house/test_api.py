"""Every name, argument, order and default of the reference is in ``dmuon_hf.core``."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import dmuon_hf.core as dmuon

PAGE = Path(__file__).parent / "data" / "api-reference.txt"

KINDS = inspect.Parameter
Argument = tuple[str, Any, object]


class Documented(NamedTuple):
    """One line: the arguments as name, kind and default (``KINDS.empty`` without one), or ``None`` without a list."""

    name: str
    arguments: list[Argument] | None


def documented() -> list[Documented]:
    return [_parsed(line) for line in PAGE.read_text().splitlines() if line.strip()]


def _parsed(line: str) -> Documented:
    name, bracket, rest = line.partition("(")
    if not bracket:
        return Documented(name, None)
    definition = ast.parse(f"def f({rest}: ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    args = definition.args
    first = len(args.args) - len(args.defaults)
    found: list[Argument] = [
        (arg.arg, KINDS.POSITIONAL_OR_KEYWORD, _value(args.defaults[i - first]) if i >= first else KINDS.empty)
        for i, arg in enumerate(args.args)
    ]
    found += [
        (arg.arg, KINDS.KEYWORD_ONLY, KINDS.empty if default is None else _value(default))
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return Documented(name, found)


def _value(node: ast.expr) -> object:
    return ast.literal_eval(node)


def _ours(name: str) -> Any:
    """What the package has under a documented name, members of classes with a dot; ``None`` for nothing."""
    found = functools.reduce(lambda owner, part: getattr(owner, part, None), name.split("."), dmuon)
    return found if name.partition(".")[0] in dmuon.__all__ else None


# Members that instances alone have.
ATTRIBUTES = {"Muon.last_muon_grad_clip_stats"}
NAMES = [entry for entry in documented() if entry.name not in ATTRIBUTES]


@pytest.mark.parametrize("entry", NAMES, ids=lambda entry: entry.name)
def test_every_name_of_the_reference_exists_with_its_arguments_and_defaults(entry: Documented) -> None:
    ours = _ours(entry.name)
    assert ours is not None
    if entry.arguments is None:
        return
    arguments = [p for p in inspect.signature(ours).parameters.values() if p.name != "self"]
    for place, (name, kind, default) in enumerate(entry.arguments):
        here = arguments[place] if kind is KINDS.POSITIONAL_OR_KEYWORD else _named(arguments, name)
        assert (here.name, here.kind) == (name, kind)
        assert _same(here.default, default), f"{name}={here.default!r}, documented {default!r}"
    beyond = [p for p in arguments if p.name not in {name for name, _, _ in entry.arguments}]
    assert all(p.default is not KINDS.empty for p in beyond), "an argument of ours that a caller of the reference lacks"


def _named(arguments: list[inspect.Parameter], name: str) -> inspect.Parameter:
    return next(p for p in arguments if p.name == name)


def _same(here: object, documented_default: object) -> bool:
    return here is documented_default or (type(here) is type(documented_default) and here == documented_default)


def test_attributes_of_the_reference_are_there_from_the_start() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    dmuon.dedicate_params(model, None, lambda name, param: param.ndim == 2)
    optimizer = dmuon.Muon(model)
    assert [name for name in ATTRIBUTES if not hasattr(optimizer, name.partition(".")[2])] == []


def test_constants_have_the_documented_rows() -> None:
    assert [list(row) for row in dmuon.YOU_COEFFICIENTS] == [
        [4.0848, -6.8946, 2.927],
        [3.9505, -6.3029, 2.6377],
        [3.7418, -5.5913, 2.3037],
        [2.8769, -3.1427, 1.2046],
        [2.8366, -3.0525, 1.2012],
    ]
    assert len(dmuon.POLAR_EXPRESS_COEFFICIENTS) == 5
