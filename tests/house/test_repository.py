"""Files at the root agree with one another and with the code."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

import dmuon_hf

if importlib.util.find_spec("tomllib"):
    import tomllib
else:  # Python 3.10
    import pip._vendor.tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(p for d in ("dmuon_hf", "tests", "recipes", "benchmarks", "docs") for p in (ROOT / d).rglob("*.*"))
TEXTS = [p for p in SOURCES if p.suffix in (".py", ".md", ".yaml")] + sorted(ROOT.glob("*.md")) + [ROOT / "Makefile"]


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_commands_of_the_documents_are_targets(document):
    text = (ROOT / document).read_text()
    commands = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert commands
    assert commands <= targets


def test_files_that_the_readme_and_makefile_name_exist():
    text = (ROOT / "README.md").read_text() + (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\b(?:recipes|accelerate_configs|benchmarks|docs)/[\w./]+\.\w+", text))
    assert len(named) >= 3
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_table_of_launches_and_trainers_names_tests_that_exist():
    page = (ROOT / "docs/trainers.md").read_text().partition("## Which launch is tested with which trainer")[2]
    tests = {int(n): test for n, test in re.findall(r"^(\d+)\. `(tests/\S+)`$", page, flags=re.MULTILINE)}
    cells = [cell for row in re.findall(r"^\| .*", page, flags=re.MULTILINE)[1:] for cell in row.split("|")[2:-1]]
    used = {int(number) for cell in cells for number in re.findall(r"(?<!\w)\d+", cell)}
    assert used == set(tests) == set(range(1, len(tests) + 1))
    for test in tests.values():
        path, name = test.split("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text(), test
    for cell in map(str.strip, cells):
        assert re.match(r"-$|by hand|(GRPO )?(refused[^,]*, )?\d+", cell), cell


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_python_blocks_of_the_documents_are_valid_and_use_public_names(document):
    import dmuon_hf.core as core

    for block in _blocks(ROOT / document, "python"):
        compile(block, document, "exec")
        for module, prefix in ((dmuon_hf, "dmuon_hf"), (core, "dmuon")):
            names = re.findall(rf"\b{prefix}\.(\w+)\(", block)
            assert [n for n in names if n not in module.__all__] == []


def test_version_is_the_same_everywhere(project):
    assert project["version"] == dmuon_hf.__version__
    assert f"[{dmuon_hf.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_pin_every_declared_dependency(project):
    pins = dict(
        line.partition(";")[0].split("==")
        for name in ("constraints.txt", "requirements-kernels.txt")
        for line in (ROOT / name).read_text().splitlines()
        if line and line[0] != "#"
    )
    pinned = {name.lower().replace("_", "-") for name in pins}
    declared = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    names = {re.split(r"[<>=\[]", requirement)[0].lower().replace("_", "-") for requirement in declared}
    assert names - pinned == {"dmuon-hf"}
    # A local version tag (+cpu, +cu130) would tie the list to one kind of machine.
    assert [version for version in pins.values() if "+" in version] == []


def test_installed_versions_are_the_pinned_ones():
    from importlib.metadata import version

    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    here = {pin.name: str(pin.specifier) for pin in pins if pin.marker is None or pin.marker.evaluate()}
    for name in ("torch", "transformers", "accelerate", "safetensors"):
        assert here[name] == f"=={version(name).split('+')[0]}"


def test_versions_checked_at_run_time_are_the_declared_ones(project):
    from dmuon_hf.compat import SUPPORTED

    declared = project["dependencies"] + project["optional-dependencies"]["hf"]
    assert [str(item) for item in SUPPORTED if str(item) not in declared] == []


def test_package_is_marked_as_typed_and_licensed(project):
    assert (ROOT / "dmuon_hf" / "py.typed").exists()
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_ci_script_is_executable_and_runs_quality_wheel_and_tests():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert [line for line in lines if line.startswith("make")] == ["make quality", "make wheel", "make test"]


def test_current_stamp_makes_the_environment_target_do_nothing(tmp_path):
    pinned = ("pyproject.toml", "constraints.txt", "requirements-kernels.txt")
    content = b"".join((ROOT / name).read_bytes() for name in pinned)
    for name in (*pinned, "Makefile"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv").mkdir()
    checksum = subprocess.run(["cksum"], input=content, capture_output=True, check=True).stdout.split()[0].decode()
    (tmp_path / ".venv" / f".installed-{checksum}").touch()
    done = subprocess.run(["make", "-n", "venv"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pip" not in done.stdout


def test_package_sources_do_not_print():
    printing = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / "dmuon_hf").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r"\s*print\(", line)
    ]
    assert printing == []


def test_texts_contain_no_unfinished_markers():
    marker = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    assert [str(p.relative_to(ROOT)) for p in TEXTS if marker.search(p.read_text())] == []
