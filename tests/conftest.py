"""What every test is held to: it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from leaks import Before

# The same examples every time, on a machine of any speed, and nothing written.
settings.register_profile("regauge", deadline=None, database=None, derandomize=True)
settings.load_profile("regauge")


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = Before()
    yield
    problems = before.leaks()
    if problems:
        pytest.fail("; ".join(problems))
