"""The architecture tests measure the tree, and what they measured is printed at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

LINES = pytest.StashKey[list[str]]()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that adds a line to the report."""
    return request.config.stash.setdefault(LINES, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(LINES, [])
    if lines:
        terminalreporter.write_sep("-", "architecture")
        for line in lines:
            terminalreporter.write_line(line)
