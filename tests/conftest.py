"""What every test is held to: it leaves nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

from leaks import Before
from regauge.log import logger

# The same examples every time, on a machine of any speed, and nothing written.
settings.register_profile("regauge", deadline=None, database=None, derandomize=True)
settings.load_profile("regauge")


@pytest.fixture(autouse=True)
def _plain_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin each test with the logger as it is imported; the command line sets it up."""
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = Before()
    yield
    problems = before.leaks()
    if problems:
        pytest.fail("; ".join(problems))
