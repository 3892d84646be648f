"""A table of what the compiled kernels take, printed after the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kernels.resources import Resources

_ROWS = pytest.StashKey[list[str]]()


@pytest.fixture
def record_resources(request: pytest.FixtureRequest) -> Callable[[str, Resources], None]:
    """Add a line for the kernel of that name to the table."""

    def record(name: str, resources: Resources) -> None:
        request.config.stash.setdefault(_ROWS, []).append(resources.row(name))

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if rows:
        terminalreporter.section("compiled kernels, per thread block")
        for row in rows:
            terminalreporter.write_line(row)
