"""No test depends on how fast the machine is, or on how long the tests before it took."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "time", "time_ns", "now"}
HANGS_ARE_ENDED_AFTER = 600
WAITS = {"Barrier", "check_call", "check_output", "communicate", "run"}


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when the module is imported: everything but the bodies of functions."""
    yield node
    deferred = node.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else ()
    if isinstance(node, ast.Lambda):
        return
    for child in ast.iter_child_nodes(node):
        if child not in deferred:
            yield from _run_on_import(child)


def clocks_read_on_import(tree: ast.Module) -> list[str]:
    calls = (node for node in _run_on_import(tree) if isinstance(node, ast.Call))
    return [f"line {call.lineno}: {_called(call)}()" for call in calls if _called(call) in CLOCKS]


def short_guards(tree: ast.Module) -> list[str]:
    """Waits for processes and threads that give up sooner than a machine under load may need."""
    return [
        f"line {call.lineno}: timeout={word.value.value}"
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _called(call) in WAITS
        for word in call.keywords
        if word.arg == "timeout" and isinstance(word.value, ast.Constant) and word.value.value < HANGS_ARE_ENDED_AFTER
    ]


@pytest.mark.parametrize("find", [clocks_read_on_import, short_guards])
def test_no_test_is_in_a_hurry(find):
    found = {
        str(path.relative_to(TESTS)): hurried
        for path in sorted(TESTS.rglob("*.py"))
        if (hurried := find(ast.parse(path.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("code", "find"),
    [
        ("END = time.monotonic() + 600", clocks_read_on_import),
        ("class Case:\n    end = time.time()", clocks_read_on_import),
        ("def guard(end=time.perf_counter()): ...", clocks_read_on_import),
        ("def test():\n    subprocess.run([], timeout=30)", short_guards),
    ],
)
def test_hurry_is_found(code, find):
    assert len(find(ast.parse(code))) == 1


def test_clock_inside_of_a_function_is_no_hurry():
    assert (
        clocks_read_on_import(ast.parse("def test():\n    start = time.monotonic()\nlate = lambda: time.time()")) == []
    )
