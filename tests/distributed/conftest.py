"""One shared world for each size; the world of one process is this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distributed.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], World]]:
    """Return a function from a size to its world, started when it is first asked for."""
    started: dict[int, World] = {}

    def world(size: int) -> World:
        if size not in started:
            started[size] = World(size)
        return started[size]

    yield world
    for each in started.values():
        each.close()
