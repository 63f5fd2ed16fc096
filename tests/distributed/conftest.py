"""Fixtures: one shared world per size; the world of one process is the test process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distributed import datasets, jobs
from distributed.runs import DATA, Runs
from distributed.world import World


class Alone:
    """The world of one process: the test process."""

    size = 1
    is_complete = True

    def run(self, job: str, *arguments: Any) -> list[Any]:
        """Call `jobs.<job>` in this process; return its result as the result of rank 0."""
        return [getattr(jobs, job)(*arguments)]

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], World | Alone]]:
    """Return a function from a size to its world, which starts at its first use."""
    started: dict[int, World | Alone] = {}

    def world(size: int) -> World | Alone:
        if size in started and not started[size].is_complete:
            started.pop(size).close()
        if size not in started:
            started[size] = World(size) if size > 1 else Alone()
        return started[size]

    yield world
    for shared_world in started.values():
        shared_world.close()


@pytest.fixture(scope="session")
def runs(worlds: Callable[[int], World | Alone], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the runs that tests share, over one dataset of each layout."""
    root = tmp_path_factory.mktemp("data")
    data = {DATA.get(name, name): write(root / name) for name, write in datasets.WRITERS.items()}
    return Runs(tmp_path_factory.mktemp("runs"), data, worlds)
