"""Fixtures of the tests with a real Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.conftest import runs, worlds
from distributed.runs import Runs
from faults.conftest import Jobs

__all__ = ["runs", "worlds"]


@pytest.fixture
def jobs(runs: Runs) -> Iterator[Jobs]:
    """Return a factory of supervised runs."""
    jobs = Jobs(runs)
    yield jobs
    jobs.kill_all()
