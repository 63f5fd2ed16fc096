"""Process that sends requests to a server: one message in for each load, its result out.

The first message is the target and the file with the texts; None answers it. The process is
separate from the server and from the program that analyses the results.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regauge.evaluation.benchmark.http_load import HttpLoad, HttpTarget, LoadResult
from regauge.system.json_files import read_json_list

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def run_loads(pipe: Connection) -> None:
    """Run the loads of a pipe, until it is closed."""
    target, path = pipe.recv()
    texts = read_json_list(path, "start the benchmark again")
    with asyncio.Runner(loop_factory=_find_loop_factory()) as runner:
        runner.run(_run_loads(pipe, target, texts))


async def _run_loads(pipe: Connection, target: HttpTarget, texts: list[str]) -> None:
    async with HttpLoad(target, texts) as load:
        pipe.send(None)
        with suppress(EOFError):
            while True:
                pipe.send(await _run_load(load, pipe.recv()))


async def _run_load(load: HttpLoad, spec: dict[str, Any]) -> LoadResult:
    """Run one load at the start time on the monotonic clock, which all processes share."""
    await asyncio.sleep(max(0.0, spec["start_at"] - time.monotonic()))
    if "concurrency" in spec:
        return await load.run_closed(
            spec["concurrency"], spec["texts_per_request"], spec["seconds"]
        )
    return await load.run_open(spec["arrivals"], spec["texts_per_request"], spec["seconds"])


def _find_loop_factory() -> Any:
    """Return uvloop's event loop, which sends more requests per second, if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
