"""Processes that send requests to a server as one load."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from regauge.evaluation.benchmark.http_load import HttpLoad, HttpTarget, LoadResult, merge_results
from regauge.system.children import FunctionProcess, convert_return_code, start_function
from regauge.system.errors import ChildError, NoProgressError
from regauge.system.files import write_json
from regauge.system.json_files import read_json_list

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    import numpy as np

WORKER = "regauge.evaluation.benchmark.load_processes:run_loads"
START_DELAY_SECONDS = 0.05
"""Time between the order to start a load and its start, in which all processes receive it."""
GRACE_SECONDS = 30.0
"""Seconds granted to a process beyond its load and the request timeout."""
TEXTS = "texts.json"


class LoadProcesses:
    """Processes that share each load; a context manager. `folder` receives the texts."""

    def __init__(
        self, target: HttpTarget, texts: Sequence[str], folder: Path, num_processes: int = 1
    ) -> None:
        self._target = target
        self._texts = folder / TEXTS
        write_json(self._texts, list(texts))
        self._num_processes = num_processes
        self._children: list[FunctionProcess] = []

    def __enter__(self) -> Self:
        for _ in range(self._num_processes):
            self._children.append(start_function(WORKER, new_session=True))
            _send(self._children[-1], (self._target, self._texts))
        try:
            for child in self._children:
                _receive(child, time.monotonic() + GRACE_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
        self._children.clear()

    def run_closed(self, concurrency: int, texts_per_request: int, seconds: float) -> LoadResult:
        """Send requests on connections, each after the previous answer on the same connection."""
        count = min(self._num_processes, concurrency)
        shares = [len(range(rank, concurrency, count)) for rank in range(count)]
        specs = [{"concurrency": share} for share in shares]
        return self._run(specs, texts_per_request, seconds)

    def run_open(self, arrivals: np.ndarray, texts_per_request: int, seconds: float) -> LoadResult:
        """Send a request at each arrival time, [requests] in seconds, and wait for all answers."""
        count = self._num_processes
        specs = [{"arrivals": arrivals[rank::count].tolist()} for rank in range(count)]
        return self._run(specs, texts_per_request, seconds)

    def _run(
        self, specs: list[dict[str, Any]], texts_per_request: int, seconds: float
    ) -> LoadResult:
        shared = {
            "texts_per_request": texts_per_request,
            "seconds": seconds,
            "start_at": time.monotonic() + START_DELAY_SECONDS,
        }
        children = self._children[: len(specs)]
        for child, spec in zip(children, specs, strict=True):
            _send(child, {**spec, **shared})
        deadline = time.monotonic() + seconds + self._target.timeout_seconds + GRACE_SECONDS
        return merge_results([_receive(child, deadline) for child in children])


def _send(child: FunctionProcess, message: Any) -> None:
    with suppress(BrokenPipeError):  # the answer is missing then
        child.pipe.send(message)


def _receive(child: FunctionProcess, deadline: float) -> Any:
    """Return the next answer of a process.

    Raises ChildError if the process ended, NoProgressError after the deadline, and StopSignalError
    after a stop signal.
    """
    try:
        return child.receive(deadline - time.monotonic())
    except TimeoutError:
        problem = "the load generator makes no progress"
        raise NoProgressError(problem, "lower server.timeout_seconds") from None
    except EOFError:
        code = convert_return_code(child.process.wait()) or 1
        raise ChildError(code, "the load generator ended; see above") from None


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
