"""Every command that the documents print exists and takes the options it is printed with."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from dmuon_hf.cli.parser import make_parser
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = sorted(path for folder in ("benchmarks", "recipes") for path in (ROOT / folder).rglob("*.py"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
HEADS = r"(?:make|pip install|accelerate launch|torchrun|dmuon-hf|(?:\.venv/bin/)?python)"
COMMAND = re.compile(rf"{HEADS} \S.*")


def printed_commands() -> list[str]:
    """Command lines of the documents (shell blocks and inline code) and of the scripts' docstrings."""
    found: list[str] = []
    for document in DOCUMENTS:
        text = document.read_text()
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            found += block.replace("\\\n", " ").splitlines()
        found += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    for script in SCRIPTS:
        # A remark may follow a command after a wide gap.
        lines = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()
        found += [line.strip().partition("   ")[0] for line in lines if line.startswith("    ")]
    return sorted({line.strip() for line in found if COMMAND.fullmatch(line.strip())})


def words_of(command: str) -> list[str]:
    """The words of a command; brackets around what may be left out are dropped."""
    return shlex.split(command.replace("[--", "--").replace("TEXT]", "TEXT"), comments=True)


def script_call(words: list[str]) -> list[str] | None:
    """The script of this repository that a command runs, with its arguments."""
    if words[:2] == ["make", "bench"]:
        arguments = [word.partition("=")[2] for word in words if word.startswith("ARGS=")]
        return ["benchmarks/step.py", *(shlex.split(arguments[0]) if arguments else [])]
    for position, word in enumerate(words):
        if re.fullmatch(r"(benchmarks|recipes)/(?:\w+/)?\w+\.py", word):
            return words[position:]
    return None


def problem_of(command: str) -> str | None:
    """What is wrong with a command, apart from the options of a script of this repository."""
    words = words_of(command)
    named = [word for word in words if re.match(r"(benchmarks|recipes|accelerate_configs|tests|docs)/", word)]
    missing = [word for word in named if not (ROOT / word).exists()]
    if missing:
        return f"no such file: {missing}"
    if words[0] == "make":
        return None if words[1] in TARGETS else f"no target {words[1]}"
    if words[0] in ("accelerate", "torchrun", "pip"):
        return None if shutil.which(words[0], path=str(Path(sys.executable).parent)) else f"no program {words[0]}"
    if words[0] == "dmuon-hf":
        return problem_of_our_command(words[1:])
    if "-m" in words:
        module = words[words.index("-m") + 1]
        return None if importlib.util.find_spec(module) else f"no module {module}"
    return None if script_call(words) else "runs nothing of this repository"


def problem_of_our_command(arguments: list[str]) -> str | None:
    """What the parser of the package says."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        try:
            make_parser().parse_args(arguments)
        except SystemExit:
            return output.getvalue()
    return None


def helps(rank: int, world: int, calls: list[list[str]]) -> list[tuple[object, str]]:
    """Exit code and output of each script when `--help` follows its arguments, whose values are parsed before it."""
    results: list[tuple[object, str]] = []
    for script, *arguments in calls:
        sys.argv = [script, *arguments, "--help"]
        sys.path.insert(0, str((ROOT / script).parent))
        output, code = io.StringIO(), "did not exit"
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                runpy.run_path(str(ROOT / script), run_name="__main__")
            except SystemExit as end:
                code = end.code
        sys.path.pop(0)
        results.append((code, output.getvalue()))
    return results


def test_documents_print_commands_of_every_kind() -> None:
    heads = {words_of(command)[0] for command in printed_commands()}
    assert {"make", "pip", "accelerate", "torchrun", "dmuon-hf", "python", ".venv/bin/python"} <= heads


@pytest.mark.parametrize("command", printed_commands())
def test_printed_command_names_what_exists(command: str) -> None:
    assert problem_of(command) is None


def test_printed_options_are_those_of_the_scripts() -> None:
    calls = [call for command in printed_commands() if (call := script_call(words_of(command)))]
    assert len({call[0] for call in calls}) > 8
    for call, (code, output) in zip(calls, run_ranks(helps, 1, calls, init=False)[0], strict=True):
        assert code == 0, f"{call}: {output[-500:]}"
        options = {word.partition("=")[0] for word in call if word.startswith("--")}
        assert [o for o in options if not re.search(rf"{re.escape(o)}\b(?!-)", output)] == [], call


def test_option_that_a_script_does_not_have_is_noticed() -> None:
    (code, output), (bad, _) = run_ranks(
        helps, 1, [["benchmarks/step.py", "--cores", "4"], ["benchmarks/step.py", "--modes", "none"]], init=False
    )[0]
    assert code == 0 and "--cores" not in output
    assert bad == 2
