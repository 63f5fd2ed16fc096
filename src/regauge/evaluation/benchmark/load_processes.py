"""Processes that send requests to a server, as one load."""

from __future__ import annotations

import dataclasses
import json
import selectors
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING, Any, Self

from regauge.evaluation.benchmark.http_load import HttpTarget, LoadResult, merge_results
from regauge.system import stop_signals
from regauge.system.errors import ChildError, NoProgressError
from regauge.system.files import write_json
from regauge.system.json_files import parse_object

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

WORKER = "regauge.evaluation.benchmark.load_worker"
START_DELAY_SECONDS = 0.05
"""Time between the order to start a load and its start, in which all processes receive it."""
POLL_SECONDS = 0.5
GRACE_SECONDS = 30.0
"""Time that a process may need beyond its load and the timeout of a request."""
TEXTS = "texts.json"


class LoadProcesses:
    """Processes that share each load; a context manager. `folder` receives the texts."""

    def __init__(
        self, target: HttpTarget, texts: Sequence[str], folder: Path, num_processes: int = 1
    ) -> None:
        self._target = target
        self._first_line = {"target": dataclasses.asdict(target), "texts": str(folder / TEXTS)}
        write_json(folder / TEXTS, list(texts))
        self._num_processes = num_processes
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", WORKER]
        for _ in range(self._num_processes):
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                start_new_session=True,
            )
            self._children.append(child)
            _send_line(child, self._first_line)
        try:
            for child in self._children:
                _receive_line(child, time.monotonic() + GRACE_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()
        self._children.clear()

    def run_closed(self, concurrency: int, texts_per_request: int, seconds: float) -> LoadResult:
        """Send requests on connections, each after the answer to the last one of its connection."""
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
        """Return the merged measurements of one load."""
        shared = {
            "texts_per_request": texts_per_request,
            "seconds": seconds,
            "start_at": time.monotonic() + START_DELAY_SECONDS,
        }
        children = self._children[: len(specs)]
        for child, spec in zip(children, specs, strict=True):
            _send_line(child, {**spec, **shared})
        deadline = time.monotonic() + seconds + self._target.timeout_seconds + GRACE_SECONDS
        results = [_receive_line(child, deadline) for child in children]
        return merge_results([LoadResult(**result) for result in results])


def _send_line(child: subprocess.Popen[str], document: dict[str, Any]) -> None:
    stream = _get_stream(child.stdin)
    stream.write(json.dumps(document) + "\n")
    stream.flush()


def _receive_line(child: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
    """Return the next document of a process.

    Raises ChildError if it ended, NoProgressError after the deadline, and StopSignalError after a
    stop signal.
    """
    stream = _get_stream(child.stdout)
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not selector.select(POLL_SECONDS):
            stop_signals.check_stop()
            if time.monotonic() > deadline:
                problem = "the load generator makes no progress"
                raise NoProgressError(problem, "lower server.timeout_seconds")
    line = stream.readline()
    if not line:
        code = child.wait()
        raise ChildError(code if code > 0 else 128 - code, "the load generator ended; see above")
    return parse_object(line)


def _get_stream(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise AssertionError("the process has pipes")
    return stream
